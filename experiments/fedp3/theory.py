"""The thesis's statements on FedP3's convergence and privacy, for `python -m experiments.fedp3.privacy theory`."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms.fedp3 import sketched
from commjax.core import runner
from commjax.privacy import accounting
from commjax.problems import quadratic
from commjax.theory import fedp3 as aggregation
from commjax.theory import ldp_fedp3 as theory
from experiments import tables


def noise_floor(gamma: float, rounds: int, seeds: int) -> tuple[float, float, float]:
    """Measure the noise floor of the sketch for two clients |w -+ c|^2 / 2 with |c| = 1 (erratum F11).

    Args:
        gamma: Stepsize.
        rounds: Rounds of each run.
        seeds: Number of runs.

    Returns:
        The mean over runs of |grad f|^2 at the end, its exact limit gamma / (2 - gamma), and the printed bound.
    """
    c = np.zeros((2, 4))
    c[:, 0] = 1.0, -1.0
    data = jax.tree.map(jnp.asarray, quadratic.Quadratic(np.tile(np.eye(4), (2, 1, 1)), c))
    algorithm = sketched.sketched(jax.value_and_grad(quadratic.loss))
    start = jnp.zeros(4).at[1].set(math.sqrt(2e-3))
    state = algorithm.init(start, jnp.arange(2))
    keys = jax.random.split(jax.random.key(0), seeds)
    end, _ = runner.sweep(keys, algorithm, runner.stack([sketched.HParams(gamma)]), state, data, rounds)
    found = float(np.mean(np.sum(np.asarray(end.server.params[0]) ** 2, axis=-1)))
    printed = aggregation.stationarity(aggregation.Abc(1.0, 0.0, 0.0), 1.0, gamma, rounds, 1e-3)
    return found, gamma / (2 - gamma), printed


def formula_noise(delta: float, m: int, K: int, c: float) -> dict[str, float]:
    """Return the true epsilon of the thesis's sigma for epsilon = 1 with full batches, by relation (erratum F20).

    Args:
        delta: Privacy parameter.
        m: Rows of the client.
        K: Rounds.
        c: Constant of the formula, which the thesis does not give.
    """
    z = math.sqrt(theory.noise_variance(1.0, delta, c=c, C=1.0, K=K, m=m)) * m
    return {
        relation: accounting.guarantee(z, 1.0, K, delta, relation=relation).epsilon
        for relation in ("add-remove", "replace-one")
    }


def checks(out: Path, delta: float) -> list[dict]:
    """Check the thesis's statements about FedP3 as numbers, and write them as a table."""
    found, exact, printed = noise_floor(0.1, 100, 2000)
    table: list[dict] = [
        {
            "check": "E |grad f|^2 after 100 rounds, two clients",
            "thesis": f"<= {printed:.2e}",
            "measured": f"{found:.4f} ({exact:.4f} exactly)",
            "errata": "F11",
        }
    ]
    for c in (1.0, 2.0, 8.0):
        values = formula_noise(delta, 500, 1000, c)
        table.append(
            {
                "check": f"epsilon of sigma with c = {c:g} for epsilon = 1, K = 1000, m = 500",
                "thesis": "1",
                "measured": ", ".join(f"{name} {value:.2f}" for name, value in values.items()),
                "errata": "F20",
            }
        )
    plan = theory.schedule(1.0, delta, L=2.0, delta0=10.0, C=1.0, c=1.0, d=100, m=500)
    table.append(
        {
            "check": "bound for L = 2, Delta_0 = 10, C = 1, d = 100, m = 500",
            "thesis": f"{plan.bound / math.sqrt(10):.4f}",
            "measured": f"{plan.bound:.4f}",
            "errata": "F19",
        }
    )
    table.append(
        {
            "check": "variance of a batch of 1 of 2 rows, gradients +-1",
            "thesis": f"<= {theory.poisson_variance(1.0, 0.5, 1):g}",
            "measured": (
                f"{theory.fixed_variance(1.0, 2, 1):g} (Poisson sampling: {theory.poisson_variance(1.0, 0.5, 1):g})"
            ),
            "errata": "F18",
        }
    )
    table.append(
        {
            "check": "FedP3 against GD in bits, n = 100, epsilon = 1e-3",
            "thesis": "n / epsilon = 1e5 times cheaper",
            "measured": f"{aggregation.advantage_over_gd(100, 1e-3):g} times",
            "errata": "F14",
        }
    )
    growth = aggregation.pruning_growth(np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([1.0, 0.0]))
    table.append(
        {
            "check": "sup f(Pw) / f(w), one of two coordinates pruned",
            "thesis": "<= 1 + log(2) / K",
            "measured": f"{growth:.2f}",
            "errata": "F21",
        }
    )
    width = max(len(row["check"]) for row in table)
    lines = [f"{r['check']:{width}}  {r['thesis']:32} {r['measured']}  ({r['errata']})" for r in table]
    tables.save(out / "theory", table, "\n".join([f"{'check':{width}}  {'thesis':32} measured", *lines]))
    return table
