"""Old names of modules that were renamed before version 0.1.0.  Importing one raises an error with the new name."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    "commjax.accounting": "commjax.privacy.accounting",
    "commjax.agreement": "commjax.core.code",
    "commjax.algorithms.aggregation": "commjax.algorithms.fedp3.aggregation",
    "commjax.algorithms.fedcr_layers": "commjax.algorithms.fedcr.layers",
    "commjax.algorithms.fedp3_apart": "commjax.algorithms.fedp3.remote",
    "commjax.algorithms.fedp3_wire": "commjax.algorithms.fedp3.wire",
    "commjax.algorithms.ldp_fedp3": "commjax.algorithms.fedp3.ldp_fedp3",
    "commjax.algorithms.scafflix_apart": "commjax.algorithms.scafflix.remote",
    "commjax.algorithms.scafflix_round": "commjax.algorithms.scafflix.communication",
    "commjax.algorithms.sketched": "commjax.algorithms.fedp3.sketched",
    "commjax.algorithms.submodels": "commjax.algorithms.fedp3.submodels",
    "commjax.base": "commjax.core.base",
    "commjax.checkpoint": "commjax.core.checkpoint",
    "commjax.checks": "commjax.core.checks",
    "commjax.clients": "commjax.core.rounds",
    "commjax.clustering": "commjax.sampling.clustering",
    "commjax.cohorts": "commjax.sampling.samplings",
    "commjax.compressors.envelope": "commjax.federation.envelope",
    "commjax.compressors.laws": "commjax.compressors.exact_laws",
    "commjax.compressors.lift": "commjax.compressors.vectors",
    "commjax.compressors.select": "commjax.compressors.selection",
    "commjax.contract": "commjax.federation.contract",
    "commjax.data.fedjax_feed": "commjax.integrations.fedjax",
    "commjax.data.own": "commjax.data.local_rows",
    "commjax.data.tfds_feed": "commjax.integrations.tfds",
    "commjax.devices.distributed": "commjax.devices.hosts",
    "commjax.devices.parallel": "commjax.devices.mesh",
    "commjax.distributed": "commjax.devices.hosts",
    "commjax.exchange": "commjax.federation.exchange",
    "commjax.flower": "commjax.federation.flower",
    "commjax.layers": "commjax.algorithms.fedp3.layers",
    "commjax.llm.flax_face": "commjax.integrations.flax",
    "commjax.local": "commjax.core.local",
    "commjax.one_run_audit": "commjax.algorithms.fedp3.one_run_audit",
    "commjax.optax_face": "commjax.integrations.optax",
    "commjax.parallel": "commjax.devices.mesh",
    "commjax.plans": "commjax.algorithms.fedp3.plans",
    "commjax.private_training": "commjax.algorithms.fedp3.private_training",
    "commjax.problems.layered": "commjax.models.layered",
    "commjax.problems.networks": "commjax.models.networks",
    "commjax.problems.resnet": "commjax.models.resnet",
    "commjax.progress": "commjax.core.progress",
    "commjax.prox.adaptive": "commjax.prox.solvers.adaptive",
    "commjax.prox.federated": "commjax.prox.solvers.federated",
    "commjax.prox.quasi_newton": "commjax.prox.solvers.quasi_newton",
    "commjax.recommend": "commjax.algorithms.recommend",
    "commjax.records": "commjax.core.records",
    "commjax.robust": "commjax.core.robust",
    "commjax.runner": "commjax.core.runner",
    "commjax.signals": "commjax.core.signals",
    "commjax.tree": "commjax.core.tree",
}


# Packages that have the name of an old module, whose contents are now elsewhere.
MOVED_NAMES = {
    "commjax.federation": (
        "commjax.devices.host_clients",
        ("Federation", "StoppedError", "cohort_step", "members", "reopen", "run", "start"),
    ),
    "commjax.privacy": (
        "commjax.privacy.mechanism",
        (
            "check_per_example",
            "clip_factor",
            "clipped_sum",
            "gaussian_like",
            "num_rows",
            "poisson",
            "present",
            "single",
        ),
    ),
}


def message(name: str) -> str:
    """Return the error text for an old name.

    Args:
        name: the old name of a module, one of `MOVED`.

    Returns:
        One sentence that names the new module.
    """
    return f"{name} is now {MOVED[name]}"


class Finder(importlib.abc.MetaPathFinder):
    """An import finder that raises for old names.

    It is last in `sys.meta_path`, so it sees only modules that do not exist.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Raise a ModuleNotFoundError for an old name; find nothing else."""
        if fullname in MOVED:
            # Without the argument `name`: with it, `from package import old` would hide this text.
            raise ModuleNotFoundError(message(fullname))
        return None


def install() -> None:
    """Add the finder to `sys.meta_path`, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
