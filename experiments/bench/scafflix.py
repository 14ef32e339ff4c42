r"""Communication rounds of i-Scaffnew on logistic regression, in one scan.

    python -m experiments.bench.scafflix

Networks are in `experiments.bench.networks`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import scafflix
from commjax.core import runner
from commjax.data.stacked import ClientData
from commjax.problems import logistic
from experiments.bench.measure import Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    clients: int = 8
    rows: int = 1000  # rows of a client
    features: int = 112
    rounds: int = 200
    repeats: int = 5


QUICK = Settings(repeats=3)


def tables(settings: Settings) -> list[Table]:
    """Measure a round, without compilation."""
    rng = np.random.default_rng(0)
    n, rows, d = settings.clients, settings.rows, settings.features
    data = ClientData(
        jnp.asarray(rng.standard_normal((n, rows, d)), jnp.float32),
        jnp.sign(jnp.asarray(rng.standard_normal((n, rows)), jnp.float32)),
        jnp.full((n, rows), 1 / rows, jnp.float32),
    )
    algorithm = scafflix.i_scaffnew(jax.value_and_grad(lambda x, one: logistic.loss(x, one, 0.1)))
    state = algorithm.init(jnp.zeros(d, jnp.float32), jnp.arange(n))
    inputs = (jax.random.key(0), algorithm, scafflix.HParams(0.1, 1.0, 0.2), state, data, settings.rounds)
    sides = {"i-Scaffnew": Side(lambda: runner.run(*inputs), settings.rounds)}
    return [
        Table(
            "Communication rounds of i-Scaffnew",
            f"logistic regression, {n} clients of {rows} rows, d = {d}, p = 0.2, one scan",
            "",
            take_turns(sides, settings.repeats),
            {},
            ("ms a communication round", 1e3),
        )
    ]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
