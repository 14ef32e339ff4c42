"""Private runs: training that comes with its certificate, and an attack on it that measures a lower bound of epsilon."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from commjax.algorithms.fedp3 import ldp_fedp3
from commjax.compressors.joint import perm_k
from commjax.core import runner
from commjax.core.base import Algorithm, Compressor, Key, Params, State
from commjax.privacy import mechanism
from commjax.privacy.accounting import Certificate
from commjax.privacy.mechanism import Loss


class Run(NamedTuple):
    """The end of a private run, its metrics, and what it may be believed to have kept private.

    The certificate is about the state, and all states before it.  It does not cover `metrics.loss`, which is computed from the rows
    without noise: not to be released.
    """

    state: State
    metrics: Any
    certificate: Certificate


def train(
    key: Key,
    loss: Loss,
    params: Params,
    data: PyTree,
    rounds: int,
    *,
    epsilon: float,
    delta: float,
    gamma: float,
    clip: float,
    batch: float,
    accountant: str = "pld",
    relation: str = "replace-one",
    sketch: Compressor | None = None,
    rows: int | Sequence[int] | None = None,
    **how: Any,
) -> Run:
    """`rounds` rounds of LDP-FedP3 with noise calibrated to (epsilon, delta); `how`: see `ldp_fedp3.ldp_fedp3`.

    `rows`: the m_i, public.  Without it, the clients' numbers of rows for "replace-one", and for "add-remove", which hides these, the
    number of rows that the arrays have room for.

    >>> data = {"a": jnp.ones((2, 8, 3))}
    >>> found = train(jax.random.key(0), lambda w, rows: jnp.mean((rows["a"] @ w - 1) ** 2), jnp.zeros(3), data, 5,
    ...     epsilon=8.0, delta=1e-5, gamma=0.1, clip=1.0, batch=8.0)
    >>> found.certificate.epsilon <= 8, found.metrics.loss.shape
    (True, (5,))
    """
    counts = np.asarray(jax.vmap(lambda one: jnp.sum(mechanism.present(one)))(data))
    if rows is None:
        room = jax.tree.leaves(data)[0].shape[1]
        rows = counts.tolist() if relation == "replace-one" else room
    public = np.broadcast_to(np.asarray(rows), counts.shape)
    if np.any(counts > public):
        worst = int(np.argmax(counts - public))
        raise ValueError(f"rows={rows}, but client {worst} has {counts[worst]}; allowed: at least as many as it has")
    hparams, certificate = ldp_fedp3.calibrated(
        epsilon,
        delta,
        gamma=gamma,
        clip=clip,
        batch=batch,
        rows=public.tolist(),
        rounds=rounds,
        accountant=accountant,
        relation=relation,
        capacity=how.get("capacity"),
    )
    algorithm = ldp_fedp3.ldp_fedp3(loss, sketch, rows=public, **how)
    state = algorithm.init(params, jnp.arange(len(counts)), data=data)
    state, metrics = runner.run(key, algorithm, hparams, state, data, rounds)
    return Run(state, metrics, certificate)


# --- the attack


GAMMA, CLIP, FAR = 0.7, 0.5, 100.0  # of the game: no scale is 1, and the canary is far beyond the clipping norm


def _linear(params: Float[Array, "d"], data: dict[str, Array]) -> Array:
    """Its gradient at a row is the row"""
    return jnp.sum(data["weights"] * (data["rows"] @ params))


def log_ratio(x: Float[Array, "..."], sign: int, hparams: Any) -> Float[Array, "..."]:
    """Log likelihood ratio of (1 - q) N(0, z^2) + q N(sign, z^2) and N(0, z^2) at x.

    Args:
        x: what a round made public, in units of the clipping norm.
        sign: +1 or -1, the canary.
        hparams: `ldp_fedp3.HParams` with noise z and rate q.

    Returns:
        The ratio, in the shape of x.
    """
    z, q = jnp.asarray(hparams.noise), jnp.asarray(hparams.rate)
    return jnp.logaddexp(jnp.log1p(-q), jnp.log(q) + (2 * sign * x - 1) / (2 * z**2))


@partial(jax.jit, static_argnames=("build", "rounds", "rows", "n", "replaced"))
def _play(build, keys: Key, worlds: Array, hparams: Any, rounds: int, rows: int, n: int, replaced: bool) -> Array:
    """Scores of one run per key; the canary is `worlds` times FAR C, and not there where that is 0"""
    algorithm = build(_linear, rows=rows)

    def game(inputs: tuple[Key, Array]) -> Array:
        key, canary = inputs
        gradients = jnp.zeros((n, rows, n)).at[0, 0].set(canary * FAR * CLIP)
        weights = jnp.ones((n, rows)).at[0, 0].set(jnp.where(canary == 0, 0.0, 1.0))
        data = {"rows": gradients, "weights": weights / jnp.sum(weights, axis=1, keepdims=True)}

        def one(state, _):
            after, _ = algorithm.step(key, hparams, state, data)
            # Who sends which coordinate is public: of n, client 0 sends one.
            sends = perm_k().compress(jax.random.fold_in(key, state.server.round), jnp.ones(n), 0, n).value > 0
            return after, jnp.sum(jnp.where(sends, state.server.params - after.server.params, 0))

        _, moves = jax.lax.scan(one, algorithm.init(jnp.zeros(n), jnp.arange(n)), None, length=rounds)
        x = moves * hparams.rate * rows / (hparams.gamma * hparams.clip)  # z N(0, 1), and the canary where its row came
        return jnp.sum(log_ratio(x, 1, hparams) - (log_ratio(x, -1, hparams) if replaced else 0))

    return jax.lax.map(game, (keys, worlds), batch_size=1000)


def canary_scores(
    key: Key,
    certificate: Certificate,
    trials: int,
    *,
    rows: int = 4,
    n: int = 1,
    build: Callable[..., Algorithm] | None = None,
) -> tuple[Float[np.ndarray, "t"], Float[np.ndarray, "t"]]:
    """Log likelihood ratios of `trials` runs with the canary and as many with its neighbour, from the public iterates.

    `n` clients with as many parameters and rows whose gradients are 0, but for a canary of the first one: 100 C in every coordinate.  Its
    neighbour has -100 C (replace-one) or is not there (add-remove).  With one client no pair is easier to tell apart, and no attack
    on w^0, ..., w^K is better; with more the same holds of `clipped="sent"`.  `build(loss, rows=...)` is what is attacked.  A
    capacity is attacked as far as the canary, which comes first and is never dropped, can see it.
    """
    replaced = certificate.relation == "replace-one"
    hparams = ldp_fedp3.HParams(GAMMA, CLIP, certificate.noise, certificate.rate)
    worlds = jnp.repeat(jnp.array([1.0, -1.0 if replaced else 0.0]), trials)
    keys = jax.random.split(key, 2 * trials)
    attacked = build or _mechanism(certificate.capacity)
    scores = _play(attacked, keys, worlds, hparams, certificate.rounds, rows, n, replaced)
    both = np.asarray(scores, np.float64)
    return both[:trials], both[trials:]


@cache
def _mechanism(capacity: int | None) -> Callable[..., Algorithm]:
    return partial(ldp_fedp3.ldp_fedp3, clipped="sent", capacity=capacity)


def _clopper_pearson(hits: int, trials: int, error: float) -> tuple[float, float]:
    """Below the lower and above the upper limit lies the true chance with probability `error` each, at most."""
    from scipy.stats import beta

    lower = 0.0 if hits == 0 else float(beta.ppf(error, hits, trials - hits + 1))
    upper = 1.0 if hits == trials else float(beta.ppf(1 - error, hits + 1, trials - hits))
    return lower, upper


def epsilon_lower_bound(
    with_canary: Float[np.ndarray, "t"], without: Float[np.ndarray, "u"], delta: float, confidence: float = 0.95
) -> float:
    """An epsilon below which the mechanism is not (epsilon, delta)-DP, with `confidence`: from scores that tell two neighbours apart.

        TPR <= e^epsilon FPR + delta     and the same of 1 - FPR and 1 - TPR

    for every test "score > t".  t and the side are chosen on one half of the scores, the chances (Clopper-Pearson) measured on
    the other.

    >>> rng = np.random.default_rng(0)
    >>> epsilon_lower_bound(rng.normal(0, 1, 1000), rng.normal(0, 1, 1000), 1e-5) < 0.3
    True
    """
    if len(with_canary) < 4 or len(without) < 4:
        raise ValueError(f"{len(with_canary)} and {len(without)} scores; allowed: at least 4 of each")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}; allowed: 0 < confidence < 1")
    halves = [(np.sort(scores[::2]), np.sort(scores[1::2])) for scores in (with_canary, without)]
    (in_tune, in_test), (out_tune, out_test) = halves

    def bound(inside: np.ndarray, outside: np.ndarray, threshold: float, above: bool) -> float:
        def hits(scores: np.ndarray) -> int:
            count = len(scores) - int(np.searchsorted(scores, threshold, side="right"))
            return count if above else len(scores) - count

        # "above" speaks for the canary, "below" for its neighbour
        first, second = (inside, outside) if above else (outside, inside)
        low = _clopper_pearson(hits(first), len(first), (1 - confidence) / 2)[0]
        high = _clopper_pearson(hits(second), len(second), (1 - confidence) / 2)[1]
        return math.log((low - delta) / high) if low > delta else -math.inf

    thresholds = np.quantile(np.concatenate([in_tune, out_tune]), np.linspace(0.005, 0.995, 100))
    _, threshold, above = max(
        (bound(in_tune, out_tune, t, side), t, side) for t in thresholds for side in (True, False)
    )
    return max(0.0, bound(in_test, out_test, threshold, above))


def audit(key: Key, certificate: Certificate, trials: int = 4000, confidence: float = 0.95, **how: Any) -> float:
    """The largest epsilon that `canary_scores` (with `how`) disproves: at most the certificate's, except with chance 1 - confidence.

    >>> from commjax.privacy.accounting import certify
    >>> certificate = certify(4.0, 1.0, 10, 1e-5)
    >>> 0 < audit(jax.random.key(0), certificate, 400) < certificate.epsilon
    True
    """
    return epsilon_lower_bound(*canary_scores(key, certificate, trials, **how), certificate.delta, confidence)
