"""Every algorithm once, with tiny inputs: what `tests/conformance` runs its properties over.

A new method adds one entry to `LOCAL` or `BUILDERS`: a function of the name and the dtype that returns a `Case`.  A
public factory of `commjax.algorithms` that is called neither here nor in `tests/registry_cases.py` fails
`tests/conformance/test_entry.py`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax.numpy as jnp

from commjax import compressors
from commjax.algorithms import (
    averaged_prox,
    ditto,
    ef_bv,
    fedavg,
    fedprox,
    flix,
    local_gd,
    scafflix,
    scaffold,
    sppm_as,
)
from commjax.algorithms.fedp3 import ldp_fedp3, sketched
from commjax.core.base import Algorithm
from commjax.problems import quadratic
from commjax.prox import cohort, solvers
from commjax.sampling import samplings
from tests.registry_cases import (
    ALPHA,
    CLUSTERS,
    COMPRESSORS,
    IDS,
    L_I,
    MU_I,
    PROBLEM,
    VALUE_AND_GRAD,
    Case,
    D,
    N,
    by_layers,
    cast,
    on_a_network,
    on_a_pytree,
    on_classes,
    on_gradient_descent,
    on_local_steps,
    on_quadratics,
    on_rows,
    rows_loss,
    start,
    tree_loss,
)

__all__ = [
    "BUILDERS",
    "COMPRESSORS",
    "DISTINCT",
    "IDS",
    "KINDS",
    "LOCAL",
    "NAMES",
    "PROBLEM",
    "VALUE_AND_GRAD",
    "Case",
    "D",
    "N",
    "build",
    "cast",
    "start",
    "tree_loss",
]

LOCAL: dict[str, tuple[Algorithm, Any, int, dict[str, Any]]] = {
    "scafflix": (
        scafflix.scafflix(VALUE_AND_GRAD),
        scafflix.theoretical(L_I, MU_I, ALPHA),
        3,
        {"personal": True},
    ),
    "scafflix cohort": (
        scafflix.scafflix(VALUE_AND_GRAD, cohort=6),
        scafflix.theoretical(L_I, MU_I, ALPHA),
        3,
        {"personal": True},
    ),
    # With the key of the conformance suite the coins of p = 0.6 are 1, 0, 1.
    "scafflix iterations": (
        scafflix.iterations(VALUE_AND_GRAD),
        scafflix.theoretical(L_I, MU_I, ALPHA, p=0.6),
        4,
        {"personal": True, "silent": True},
    ),
    "i-scaffnew": (scafflix.i_scaffnew(VALUE_AND_GRAD), scafflix.theoretical(L_I, MU_I), 2, {}),
    "flix": (flix.flix(VALUE_AND_GRAD), flix.theoretical(L_I, ALPHA), 2, {"personal": True}),
    "fedavg": (fedavg.fedavg(VALUE_AND_GRAD, steps=3), fedavg.HParams(0.2), 1, {}),
    "fedavg cohort": (fedavg.fedavg(VALUE_AND_GRAD, steps=3, cohort=6), fedavg.HParams(0.2), 1, {}),
    "fedprox": (fedprox.fedprox(VALUE_AND_GRAD, steps=3), fedprox.HParams(0.2, 0.3), 1, {}),
    "scaffold": (scaffold.scaffold(VALUE_AND_GRAD, steps=3), scaffold.HParams(0.2), 3, {}),
    "sppm-as": (
        sppm_as.sppm_as(quadratic.loss, samplings.stratified(CLUSTERS), lambda hparams: solvers.gradient_descent(2.5)),
        sppm_as.HParams(2.0, 3),
        1,
        {},
    ),
    "sppm-as hubs": (
        sppm_as.sppm_as(
            quadratic.loss,
            samplings.nice(N, 5),
            lambda hparams: solvers.gradient_descent(2.5),
            cohort.Hubs.make([0, 1, 1, 0, 2, 2, 0, 1]),
        ),
        sppm_as.HParams(2.0, 2),
        1,
        {},
    ),
    "fedprox-sppm-as": (
        averaged_prox.fedprox_sppm_as(
            quadratic.loss, samplings.stratified(CLUSTERS), lambda hparams: solvers.gradient_descent(3.0)
        ),
        averaged_prox.HParams(1.0, 2, 0.0, most=2),
        1,
        {},
    ),
    "fedavg-sppm-as": (
        averaged_prox.fedavg_sppm_as(
            quadratic.loss, samplings.stratified(CLUSTERS), lambda hparams: solvers.gradient_descent(4.0)
        ),
        averaged_prox.HParams(1.0, 2, 0.0, most=2),
        1,
        {},
    ),
    "mb-local-gd": (
        local_gd.mb_local_gd(VALUE_AND_GRAD, samplings.block(CLUSTERS)),
        local_gd.HParams(0.2, 3),
        1,
        {},
    ),
    "ditto": (ditto.ditto(VALUE_AND_GRAD, steps=3), ditto.HParams(0.2, 0.1, 0.3), 2, {}),
    "sketched": (sketched.sketched(VALUE_AND_GRAD), sketched.HParams(0.2), 1, {}),
    "sketched pruned": (
        sketched.sketched(VALUE_AND_GRAD, sketched.uniform(0.9), compressors.identity(), steps=2),
        sketched.HParams(0.2),
        1,
        {},
    ),
}
PRIVATE: dict[str, Algorithm] = {
    "ldp-fedp3": ldp_fedp3.ldp_fedp3(rows_loss),
    "ldp-fedp3 sent": ldp_fedp3.ldp_fedp3(rows_loss, clipped="sent", capacity=4),
}
BUILDERS: dict[str, Callable[[str, Any], Case]] = {
    "ef-bv comp": lambda name, dtype: on_quadratics(name, "comp", None, dtype),
    "ef-bv top-k": lambda name, dtype: on_quadratics(name, "top-k", None, dtype),
    "ef-bv m-nice": lambda name, dtype: on_quadratics(name, "m-nice", None, dtype),
    "ef-bv perm-k": lambda name, dtype: on_quadratics(name, "perm-k", None, dtype),
    "ef-bv dithering": lambda name, dtype: on_quadratics(name, "dithering", None, dtype),
    "ef-bv l1": lambda name, dtype: on_quadratics(
        name, "comp", partial(ef_bv.theoretical, regime="kl"), dtype, weight=0.1
    ),
    "ef-bv leafwise": on_a_pytree,
    "ef-bv network": on_a_network,
    "ef21": lambda name, dtype: on_quadratics(name, "top-k", ef_bv.ef21_hparams, dtype, shifted=True),
    "diana": lambda name, dtype: on_quadratics(name, "rand-k", ef_bv.diana_hparams, dtype),
    "compressed gd": lambda name, dtype: on_quadratics(name, "rand-k", ef_bv.compressed_gd_hparams, dtype),
    "gd": on_gradient_descent,
    "fedp3": by_layers,
    "fedp3 attention": by_layers,
    "fedp3 released": by_layers,
    "fedcr": on_classes,
    "fedcr layers": on_classes,
    **{name: lambda name, dtype: on_rows(name, PRIVATE[name], dtype) for name in PRIVATE},
    **{
        name: lambda name, dtype: on_local_steps(name, *LOCAL[name][:2], dtype, LOCAL[name][2], **LOCAL[name][3])
        for name in LOCAL
    },
}
NAMES = list(BUILDERS)
# These have the code of another entry, with another compressor, regularizer or hparams.
_LIKE_ANOTHER = {"ef-bv top-k", "ef-bv dithering", "ef-bv l1", "ef-bv leafwise", "diana", "compressed gd"}
DISTINCT = [name for name in NAMES if name not in _LIKE_ANOTHER]
# A method of each kind, for what is dear to test and hardly depends on the method.
KINDS = [
    "ef-bv comp",
    "ef-bv m-nice",
    "ef-bv network",
    "scafflix",
    "scafflix cohort",
    "fedavg cohort",
    "scaffold",
    "sppm-as",
    "fedp3",
    "fedp3 attention",
    "ldp-fedp3",
    "sketched",
]


@cache
def build(name: str, dtype: Any = jnp.float64) -> Case:
    """One object per (name, dtype), so that what one test compiled serves the next."""
    return BUILDERS[name](name, dtype)
