"""What all parties agree on, and the data of each client. Nothing here needs Flower, so a simulation can import it.

    python -m flower_ef_bv.task DATASET N I [MU] [SEED]       print L_i of client I, to be told before the run

No party has the rows of another. A client parses its own rows, and the server has none. The stepsize needs
L_tilde = sqrt(mean_i L_i^2). The clients therefore tell their L_i, one number each, to the author of the run's
configuration (`smoothness`). Any upper bound is allowed; a larger bound gives a smaller stepsize. A client refuses to
take part if its own L_i shows that the number is too small.
"""

import sys
from functools import cache, partial
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.data import stacked
from commjax.data.local_rows import local_rows
from commjax.federation.envelope import RefusedError
from commjax.federation.exchange import Contract
from commjax.problems import constants, logistic


@cache
def own(name: str, n: int, id: int, mu: float, seed: int):
    """Load the rows of one client and compute its L_i.

    The rows are padded to the size of the largest client, so that one compiled program serves all.
    """
    dataset, mine, longest = local_rows(name, n, [id], seed)
    L_i = float(logistic.constants(dataset, mine, mu).L_i[0])
    return jax.tree.map(lambda leaf: leaf[0], stacked.stack(dataset, mine, longest)), L_i


def data(config, id: int):
    """Return the rows of client `id`. Raise RefusedError if they contradict the configuration."""
    rows, L_i = own(config["dataset"], config["n"], id, config["mu"], config["seed"])
    if rows.features.shape[1] != config["features"]:
        raise RefusedError(
            f"features={config['features']}; allowed: {rows.features.shape[1]}, which client {id}'s have"
        )
    if L_i > sqrt(config["n"]) * config["smoothness"]:
        least = L_i / sqrt(config["n"])
        raise RefusedError(
            f"smoothness={config['smoothness']}; allowed: at least {least:.4g}: L_{id} alone is {L_i:.4g}"
        )
    return rows


@cache
def method(mu: float, k: int, half: int, nice: int):
    """Return the compressor and EF-BV with it. `nice` > 0 adds m-nice participation with m = `nice`."""
    compressor = compressors.comp(k, half)
    compressor = compressors.m_nice(nice, compressor) if nice else compressor
    return compressor, ef_bv.ef_bv(jax.value_and_grad(partial(logistic.loss, mu=mu)), compressor)


def contract(config) -> Contract:
    """Build the contract from the run's configuration alone."""
    n, d = config["n"], config["features"]
    compressor, algorithm = method(config["mu"], config["k"], d // 2, config["nice"])
    bound = constants.smoothness(np.full(n, config["smoothness"]), mu=config["mu"])
    hparams = ef_bv.theoretical(compressor.constants(d, n), bound)
    return Contract(algorithm, hparams, partial(algorithm.init, jnp.zeros(d)), n, jax.random.key(config["seed"]))


if __name__ == "__main__":
    name, n, id, mu, seed = [*sys.argv[1:], *("0.1", "0")[len(sys.argv) - 4 :]]
    print(f"client {id} of {n}: L_i = {own(name, int(n), int(id), float(mu), int(seed))[1]:.6g}")
