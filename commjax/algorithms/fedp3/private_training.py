"""Private runs: training with a certificate, and an attack that measures a lower bound of epsilon."""

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
from commjax.privacy.accounting import Guarantee
from commjax.privacy.mechanism import Loss


class Run(NamedTuple):
    """The end of a private run.

    The certificate covers the state and all states before it.  It does not cover `metrics.loss`, which is computed from
    the rows without noise and must not be released.

    Attributes:
        state: the last state.
        metrics: the metrics of all rounds.
        certificate: the privacy guarantee of the run.
    """

    state: State
    metrics: Any
    certificate: Guarantee


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
    **options: Any,
) -> Run:
    """Run LDP-FedP3 with noise calibrated to (epsilon, delta).

    Args:
        key: key of the run.
        loss: as in `ldp_fedp3.ldp_fedp3`.
        params: where the run starts.
        data: the data of all clients, leading axes n and rows.
        rounds: number of rounds.
        epsilon: target of the certificate.
        delta: target of the certificate.
        gamma: stepsize.
        clip: C, the norm to which the gradient of a row is clipped.
        batch: mean number of rows that the smallest client draws in a round.
        accountant: "pld" or "rdp" (`accounting.guarantee`).
        relation: "replace-one" or "add-remove", by which neighbouring data sets differ.
        sketch: as in `ldp_fedp3.ldp_fedp3`.
        rows: m_i, the public numbers of rows.  None is the clients' numbers of rows for "replace-one".  "add-remove"
            hides these, so that None is the number of rows of the arrays, padding included.
        **options: other arguments of `ldp_fedp3.ldp_fedp3`.

    Returns:
        The last state, the metrics and the certificate.

    >>> data = {"a": jnp.ones((2, 8, 3))}
    >>> found = train(jax.random.key(0), lambda w, rows: jnp.mean((rows["a"] @ w - 1) ** 2), jnp.zeros(3), data, 5,
    ...     epsilon=8.0, delta=1e-5, gamma=0.1, clip=1.0, batch=8.0)
    >>> found.certificate.epsilon <= 8, found.metrics.loss.shape
    (True, (5,))
    """
    counts = np.asarray(jax.vmap(lambda rows: jnp.sum(mechanism.present(rows)))(data))
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
        capacity=options.get("capacity"),
    )
    algorithm = ldp_fedp3.ldp_fedp3(loss, sketch, rows=public, **options)
    state = algorithm.init(params, jnp.arange(len(counts)), data=data)
    state, metrics = runner.run(key, algorithm, hparams, state, data, rounds)
    return Run(state, metrics, certificate)


# --- the attack


# Scales of the attacked runs: none of them is 1, and the canary is far above the clipping norm.
GAMMA, CLIP, FAR = 0.7, 0.5, 100.0


def _linear(params: Float[Array, "d"], data: dict[str, Array]) -> Array:
    """A loss whose gradient at a row is the row."""
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


class _Game(NamedTuple):
    """The static part of an attack: what is attacked, on how many rounds, rows and clients, and the relation."""

    build: Callable[..., Algorithm]
    rounds: int
    rows: int
    n: int
    replaced: bool


@partial(jax.jit, static_argnames=("static",))
def _play(static: _Game, keys: Key, worlds: Array, hparams: Any) -> Array:
    """Scores of one run per key.  The canary is `worlds` times FAR C; where `worlds` is 0 there is no canary."""
    build, rounds, rows, n, replaced = static
    algorithm = build(_linear, rows=rows)

    def game(inputs: tuple[Key, Array]) -> Array:
        key, canary = inputs
        gradients = jnp.zeros((n, rows, n)).at[0, 0].set(canary * FAR * CLIP)
        weights = jnp.ones((n, rows)).at[0, 0].set(jnp.where(canary == 0, 0.0, 1.0))
        data = {"rows": gradients, "weights": weights / jnp.sum(weights, axis=1, keepdims=True)}

        def public_round(state: State, _: None) -> tuple[State, Array]:
            after, _ = algorithm.step(key, hparams, state, data)
            # It is public which client sends which coordinate.  Client 0 sends one of n.
            sends = perm_k().compress(jax.random.fold_in(key, state.server.round), jnp.ones(n), 0, n).value > 0
            return after, jnp.sum(jnp.where(sends, state.server.params - after.server.params, 0))

        _, moves = jax.lax.scan(public_round, algorithm.init(jnp.zeros(n), jnp.arange(n)), None, length=rounds)
        # x is z N(0, 1), plus the clipped canary in the rounds that draw its row.
        x = moves * hparams.rate * rows / (hparams.gamma * hparams.clip)
        return jnp.sum(log_ratio(x, 1, hparams) - (log_ratio(x, -1, hparams) if replaced else 0))

    return jax.lax.map(game, (keys, worlds), batch_size=1000)


def canary_scores(
    key: Key,
    certificate: Guarantee,
    trials: int,
    *,
    rows: int = 4,
    n: int = 1,
    build: Callable[..., Algorithm] | None = None,
) -> tuple[Float[np.ndarray, "t"], Float[np.ndarray, "t"]]:
    """Log likelihood ratios of runs with the canary and of runs with its neighbour, from the public iterates.

    There are `n` clients and `n` params.  All gradients are 0, except for a canary of the first client: 100 C in every
    coordinate.  Its neighbour is -100 C (replace-one), or the row is missing (add-remove).  With one client no pair of
    data sets is easier to distinguish, and no attack on w^0, ..., w^K is better.  With more clients the same holds for
    `clipped="sent"`.  The canary is the first row and a capacity never drops it, so that the attack tests a capacity
    only as far as the canary is affected.

    Args:
        key: key of the runs.
        certificate: what is attacked; its noise, rate, rounds, relation and capacity are used.
        trials: number of runs with the canary, and number of runs with its neighbour.
        rows: number of rows per client.
        n: number of clients.
        build: `build(loss, rows=...)` makes the attacked algorithm; None is LDP-FedP3.

    Returns:
        The scores with the canary and the scores with its neighbour.
    """
    replaced = certificate.relation == "replace-one"
    hparams = ldp_fedp3.HParams(GAMMA, CLIP, certificate.noise, certificate.rate)
    worlds = jnp.repeat(jnp.array([1.0, -1.0 if replaced else 0.0]), trials)
    keys = jax.random.split(key, 2 * trials)
    static = _Game(build or _mechanism(certificate.capacity), certificate.rounds, rows, n, replaced)
    scores = _play(static, keys, worlds, hparams)
    both = np.asarray(scores, np.float64)
    return both[:trials], both[trials:]


@cache
def _mechanism(capacity: int | None) -> Callable[..., Algorithm]:
    return partial(ldp_fedp3.ldp_fedp3, clipped="sent", capacity=capacity)


def _clopper_pearson(hits: int, trials: int, error: float) -> tuple[float, float]:
    """Confidence limits of a probability.

    It lies below the first, or above the second, with probability at most `error` each.
    """
    from scipy.stats import beta

    lower = 0.0 if hits == 0 else float(beta.ppf(error, hits, trials - hits + 1))
    upper = 1.0 if hits == trials else float(beta.ppf(1 - error, hits + 1, trials - hits))
    return lower, upper


def epsilon_lower_bound(
    with_canary: Float[np.ndarray, "t"], without: Float[np.ndarray, "u"], delta: float, confidence: float = 0.95
) -> float:
    """A lower bound of epsilon, from scores that distinguish two neighbouring data sets.

    For every test "score > t" an (epsilon, delta)-DP mechanism satisfies

        TPR <= e^epsilon FPR + delta     and the same for 1 - FPR and 1 - TPR

    The threshold t and the inequality are chosen on every other score; the probabilities are measured on the remaining
    scores (Clopper-Pearson).

    Args:
        with_canary: scores of runs with the canary.
        without: scores of runs with its neighbour.
        delta: delta of the certificate.
        confidence: probability that the bound is right.

    Returns:
        An epsilon below which the mechanism is not (epsilon, delta)-DP, at this confidence; at least 0.

    >>> rng = np.random.default_rng(0)
    >>> epsilon_lower_bound(rng.normal(0, 1, 1000), rng.normal(0, 1, 1000), 1e-5) < 0.3
    True
    """
    if len(with_canary) < 4 or len(without) < 4:
        raise ValueError(f"{len(with_canary)} and {len(without)} scores; allowed: at least 4 of each")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}; allowed: 0 < confidence < 1")
    parts = [(np.sort(scores[::2]), np.sort(scores[1::2])) for scores in (with_canary, without)]
    (in_tune, in_test), (out_tune, out_test) = parts

    def bound(inside: np.ndarray, outside: np.ndarray, threshold: float, above: bool) -> float:
        def hits(scores: np.ndarray) -> int:
            count = len(scores) - int(np.searchsorted(scores, threshold, side="right"))
            return count if above else len(scores) - count

        # A score above the threshold speaks for the canary, one below it for the neighbour.
        first, second = (inside, outside) if above else (outside, inside)
        low = _clopper_pearson(hits(first), len(first), (1 - confidence) / 2)[0]
        high = _clopper_pearson(hits(second), len(second), (1 - confidence) / 2)[1]
        return math.log((low - delta) / high) if low > delta else -math.inf

    thresholds = np.quantile(np.concatenate([in_tune, out_tune]), np.linspace(0.005, 0.995, 100))
    _, threshold, above = max(
        (bound(in_tune, out_tune, t, side), t, side) for t in thresholds for side in (True, False)
    )
    return max(0.0, bound(in_test, out_test, threshold, above))


def audit(key: Key, certificate: Guarantee, trials: int = 4000, confidence: float = 0.95, **options: Any) -> float:
    """The largest epsilon that an attack with many runs disproves.

    Args:
        key: key of the runs.
        certificate: what is attacked.
        trials: number of runs with the canary, and number of runs without it.
        confidence: probability that a mechanism which keeps its certificate is not accused.
        **options: other arguments of `canary_scores`.

    Returns:
        The bound: at most the certificate's epsilon, except with probability 1 - confidence.

    >>> from commjax.privacy.accounting import guarantee
    >>> certificate = guarantee(4.0, 1.0, 10, 1e-5)
    >>> 0 < audit(jax.random.key(0), certificate, 400) < certificate.epsilon
    True
    """
    return epsilon_lower_bound(*canary_scores(key, certificate, trials, **options), certificate.delta, confidence)
