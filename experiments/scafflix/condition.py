"""Corollary 3.2.4: communication rounds against the condition number.

    python -m experiments.scafflix condition-number

Expected: slopes of log rounds 0.49 (Scafflix) and 1.00 (GD) on quadratics, 0.48 and 0.98 on logistic regression; 1.4
CPU minutes.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from commjax.algorithms import flix, scafflix
from commjax.core import runner
from commjax.problems import logistic, quadratic
from experiments import plots, tables
from experiments.scafflix.problem import Settings, problem, value_and_grad


def spread_quadratics(kappa: float, n: int, d: int, seed: int) -> quadratic.Quadratic:
    """Quadratics whose H_i are the same matrix, with eigenvalues from mu = 1/kappa to L = 1.

    Thus f is as badly conditioned as each f_i.
    """
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((d, d)))
    spectrum = np.geomspace(1 / kappa, 1, d)
    H = np.broadcast_to((basis * spectrum) @ basis.T, (n, d, d))
    # The minimisers differ along flat directions as much as along steep ones.
    return quadratic.Quadratic((H + H.transpose(0, 2, 1)) / 2, rng.standard_normal((n, d)))


def slope(kappas, rounds) -> float:
    """Slope of the least-squares line through (log kappa, log rounds)."""
    return float(np.polyfit(np.log(kappas), np.log(rounds), 1)[0])


@cache
def _observed(gradient):
    """Scafflix and GD with the metric |x - x*|^2.

    A client's batch is (its data, x*), so that all problems of one size share two compiled programs.
    """

    def own(params, batch):
        return gradient(params, batch[0])

    def distance(state, batch):
        return jnp.sum((state.server.params - batch[1][0]) ** 2)

    return tuple(runner.observe(one, distance=distance) for one in (scafflix.iterations(own), flix.flix(own)))


def length_for(kappa: float, fraction: float = 1e-6) -> int:
    """Number of iterations in which both methods reach the fraction."""
    return int(1.3 * kappa * np.log(1 / fraction)) + 200


def rounds_to_accuracy(
    gradient, data, smooth, mu, anchors, optimum, settings: Settings, fraction: float = 1e-6, length: int | None = None
):
    """Rounds of Scafflix and of GD until |x - x*|^2 is `fraction` of its first value, at alpha = 0.5.

    The distance is measured, because the theory's Psi consists of distances.  The flat directions, which cost most
    rounds, hardly change the objective.

    Args:
        gradient: (params [d], data of one client) -> (loss, gradient [d]).
        data: Data of all clients, with a leading client axis.
        smooth: Smoothness constants.
        mu: Strong convexity constant.
        anchors: Local optima [n, d].
        optimum: Minimiser of the FLIX objective [d].
        settings: The settings.
        fraction: Target, as a fraction of the first |x - x*|^2.
        length: Number of iterations; None: `length_for`.

    Returns:
        (kappa, rounds of Scafflix, rounds of GD).
    """
    n, d = anchors.shape
    alpha, kappa = 0.5, smooth.L_max / mu
    length = length_for(kappa, fraction) if length is None else length
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    data = (data, jnp.tile(jnp.asarray(optimum), (n, 1)))
    ours, plain = _observed(gradient)
    start = ours.init(jnp.ones(d), jnp.arange(n), optimum=jnp.asarray(anchors))
    hparams = scafflix.theoretical(smooth.L_i, mu, alpha)
    _, seen = runner.sweep(keys, ours, runner.stack([hparams]), start, data, length)
    counts = []
    for far, sent in zip(np.asarray(seen.distance[0]), np.asarray(seen.bits_up[0])):
        at = np.concatenate([[0], np.flatnonzero(sent[:-1] > 0) + 1])
        counts.append(tables.first(far[at], fraction * far[0]))
    begin = plain.init(jnp.ones(d), jnp.arange(n), optimum=jnp.asarray(anchors))
    descent = flix.theoretical(np.full(n, smooth.L), alpha)
    _, seen = runner.run(keys[0], plain, descent, begin, data, length)
    far = np.asarray(seen.distance)
    return kappa, float(np.mean(counts)), tables.first(far, fraction * far[0])


def condition_number(settings: Settings) -> dict[str, dict]:
    """Cor. 3.2.4: rounds of Scafflix grow like sqrt(kappa), those of GD like kappa."""
    found: dict[str, list] = {"quadratics": [], "logistic": []}
    gradient = jax.value_and_grad(quadratic.loss)
    for kappa in np.geomspace(10, 1e4, 7):
        data = spread_quadratics(kappa, settings.n, 20, settings.seed)
        smooth = quadratic.constants(data)
        found["quadratics"].append(
            rounds_to_accuracy(
                gradient,
                jax.tree.map(jnp.asarray, data),
                smooth,
                1 / kappa,
                data.c,
                # This is also FLIX's optimum, because all clients have the same alpha.
                quadratic.optimum(data).params,
                settings,
            )
        )
    for mu in np.geomspace(1e-1, 1e-3, 5):
        one = problem("breast_cancer", "iid", replace(settings, mu=float(mu)))
        optimum = logistic.flix_optimum(one.dataset, one.rows, float(mu), 0.5, one.optimum).params
        found["logistic"].append(
            rounds_to_accuracy(value_and_grad(float(mu)), one.data, one.smoothness, mu, one.optimum, optimum, settings)
        )
    figure, axes = plt.subplots(figsize=(3.4, 2.6), layout="constrained")
    results, lines = (
        {},
        [
            f"{'problem':12} {'kappa':>9} {'Scafflix':>9} {'GD':>9}   "
            "rounds to 1e-6 of the first |x - x*|^2, alpha = 0.5"
        ],
    )
    for marker, (name, rows) in zip("os", found.items()):
        kappas, ours, plain = np.array(rows).T
        slopes = {"Scafflix": slope(kappas, ours), "GD": slope(kappas, plain)}
        results[name] = {"kappa": kappas.tolist(), "Scafflix": ours.tolist(), "GD": plain.tolist(), "slopes": slopes}
        lines += [f"{name:12} {k:9.1f} {a:9.1f} {b:9.0f}" for k, a, b in rows]
        lines.append(f"{name:12} slope of log rounds: Scafflix {slopes['Scafflix']:.3f}, GD {slopes['GD']:.3f}")
        for label, values in (("Scafflix", ours), ("GD", plain)):
            axes.loglog(
                kappas,
                values,
                marker=marker,
                markersize=3.5,
                **{**plots.style(label), "label": f"{label}, {name}: slope {slopes[label]:.2f}"},
            )
    axes.set_xlabel(r"condition number $\kappa_{\max}$")
    axes.set_ylabel(r"rounds to $10^{-6}$ of the first $|x - x^\star|^2$")
    axes.legend()
    plots.save(figure, settings.out / "condition_number.png")
    tables.save(settings.out / "condition_number", [results], "\n".join(lines))
    return results
