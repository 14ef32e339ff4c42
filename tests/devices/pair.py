"""One of two processes: a method of each kind for two rounds, its own part of the result to a file.

python -m tests.devices.pair ADDRESS PROCESS FILE              `test_distributed` starts both
"""

import sys

import jax
import numpy as np

from commjax.core import runner
from commjax.devices import hosts
from commjax.devices.mesh import client_mesh

ROUNDS, SEED = 2, 3


def main(address: str, process: int, path: str) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 1)
    hosts.start(address, 2, process)
    from tests import registry  # computes at once, so after the start

    mesh, found = client_mesh(), {}
    for name in registry.KINDS:
        case = registry.build(name)
        n = len(case.ids)
        ids = hosts.local_ids(n, mesh)

        rows = jax.tree.map(lambda leaf, ids=ids: np.asarray(leaf)[ids], (case.data, case.per_client))
        data, per_client = hosts.rows(rows, n, mesh)
        state = hosts.init(case.algorithm, case.params, n, mesh, **per_client)
        key = jax.random.key(SEED)
        state, record = runner.loop(
            key, case.algorithm, case.hparams, state, data, ROUNDS, mesh=mesh, n=n, progress=False
        )
        found |= {f"{name}/server/{i}": leaf for i, leaf in enumerate(jax.tree.leaves(state.server))}
        rows = [leaf.addressable_data(0) for leaf in jax.tree.leaves(state.clients)]
        found |= {f"{name}/clients/{i}": leaf for i, leaf in enumerate(rows)}
        found |= {f"{name}/{metric}": values for metric, values in record.metrics.items()}
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
