"""A round of a large federation: 100 of n clients, whose states are stored on the host.

    python -m experiments.bench.federation                   about 20 seconds on 2 cores

The algorithm is EF-BV with comp-(10, d/2), d = 1000, float32 and 4 rows of data per client, for n = 1,000, 10,000 and
100,000 in turn.

Goals: under 30 ms per round at n = 100,000, and no growth with n.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.devices import host_clients
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    clients: tuple[int, ...] = (1_000, 10_000, 100_000)
    cohort: int = 100
    d: int = 1000  # dimension
    rows: int = 4  # rows of data per client
    rounds: int = 20  # rounds per timed block
    repeats: int = 5  # timed blocks


QUICK = Settings(rounds=10, repeats=3)


def least_squares(x, data):
    """Return value and gradient of |A x - b|^2 / rows, for data (A, b)."""
    features, targets = data
    error = features @ x - targets
    return error @ error / len(targets), 2 / len(targets) * features.T @ error


def tables(settings: Settings) -> list[Table]:
    """Measure all numbers of clients."""
    algorithm = ef_bv.ef_bv(least_squares, compressors.comp(10, settings.d // 2))
    hparams = ef_bv.HParams(1e-3, 1e-3, 1.0)
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((256, settings.rows, settings.d)).astype(np.float32)

    def side(n: int):
        many = [host_clients.start(algorithm, jnp.zeros(settings.d), n)]

        def fetch(ids):
            features = pool[ids % len(pool)]  # stands for a store on disk
            return features, features[..., 0]

        def rounds():
            many[0], metrics = host_clients.run(
                jax.random.key(0), algorithm, hparams, many[0], fetch, settings.rounds, size=settings.cohort
            )
            return metrics

        return Side(rounds, settings.rounds)

    names = [f"n = {n:,}" for n in settings.clients]
    return [
        Table(
            "Clients in the host's memory",
            f"EF-BV, cohorts of {settings.cohort}, d = {settings.d}, float32",
            "A round costs the same for any number of clients.",
            take_turns({name: side(n) for name, n in zip(names, settings.clients)}, settings.repeats),
            {f"{names[-1]} / {names[0]}": Ratio(names[-1], names[0], 1.3)},
            ("ms a round", 1e3),
            {names[-1]: 30},
        )
    ]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
