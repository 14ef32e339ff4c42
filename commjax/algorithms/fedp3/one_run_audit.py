"""An audit of privacy from a single training run with many canaries.

`private_training.audit` repeats the whole run thousands of times with and without one canary.  The method of Steinke,
Nasr and Jagielski ("Privacy auditing with one training run", 2023, https://arxiv.org/abs/2305.08846) flips a coin for
each of many canaries, trains once, and guesses the coins from the public iterates.  A private mechanism limits the
number of right guesses.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from commjax.algorithms.fedp3 import ldp_fedp3
from commjax.algorithms.fedp3.private_training import CLIP, FAR, GAMMA, _linear, _mechanism, log_ratio
from commjax.core.base import Algorithm, Key, State
from commjax.privacy.accounting import Guarantee

# Shares of the canaries that are guessed; each share is one test.
_SHARES = tuple(0.5**power for power in range(8))
# Distance in epsilon between two hypotheses.
_STEP = 0.02


class OneRun(NamedTuple):
    """What one run proves: the mechanism is not (epsilon, delta)-DP, at the stated confidence.

    Attributes:
        epsilon: the largest epsilon that the run disproves.
        guesses: number of canaries that were guessed, those with the largest |score|.
        correct: number of right guesses.
        canaries: number of canaries.
        confidence: probability that a mechanism which keeps its certificate is not accused.
    """

    epsilon: float
    guesses: int
    correct: int
    canaries: int
    confidence: float


def p_value(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """An upper bound of the chance that an (epsilon, delta)-DP mechanism allows `correct` right guesses or more.

        beta + 2 m delta max_i P(v - i <= B < v) / i,   beta = P(B >= v),   B ~ Binomial(r, e^epsilon / (e^epsilon + 1))

    with m canaries, r guesses and v right ones (Thm 5.2 of the paper).

    Args:
        epsilon: hypothesis, at least 0.
        delta: hypothesis, in [0, 1].
        canaries: number of independent fair coins (m).
        guesses: number of coins that were guessed (r); which ones may depend on the run.
        correct: number of right guesses (v).

    Returns:
        The bound, at most 1.

    >>> round(p_value(1.0, 0.0, 100, 10, 10), 6)  # (e / (e + 1))^10
    0.043604
    """
    from scipy.special import expit
    from scipy.stats import binom

    rate = expit(epsilon)
    beta = binom.sf(correct - 1, guesses, rate)
    steps = np.arange(1, correct + 1)
    alpha = np.max((binom.sf(correct - steps - 1, guesses, rate) - beta) / steps, initial=0.0)
    return float(min(1.0, beta + 2 * canaries * delta * alpha))


def lower_bound(
    scores: Float[np.ndarray, "m"], coins: Shaped[np.ndarray, "c"], delta: float, confidence: float = 0.95
) -> OneRun:
    """The largest epsilon that the guesses of one run disprove.

    The guess for a canary is the sign of its score.  The r canaries with the largest |score| are guessed, for eight
    values of r from m to m / 128; each test has an eighth of the error.  Hypotheses are tested from 0 upwards until one
    is not refuted.

    Args:
        scores: one number per canary, computed from what the run made public; positive speaks for the coin +1.
        coins: +1 or -1 per canary, independent and fair.
        delta: delta of the certificate that is audited.
        confidence: probability that an (epsilon, delta)-DP mechanism is not accused.

    Returns:
        The bound and the number of guesses behind it.

    >>> coins = np.tile([1, -1], 500)
    >>> lower_bound(coins + 0.0, coins, 1e-5).epsilon > 4.0 > lower_bound(np.ones(1000), coins, 1e-5).epsilon == 0.0
    True
    """
    m = len(scores)
    if m < 1 or np.shape(coins) != (m,) or not np.all(np.isin(coins, (-1, 1))):
        raise ValueError(f"coins has shape {np.shape(coins)}; allowed: +1 or -1 for each of the {m} scores")
    if not np.all(np.isfinite(scores)):
        raise ValueError(f"scores has {int(np.sum(~np.isfinite(scores)))} values that are not finite; allowed: finite")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}; allowed: 0 < confidence < 1")
    right = (np.sign(scores) == coins)[np.argsort(-np.abs(scores), kind="stable")]
    error = (1 - confidence) / len(_SHARES)
    best = OneRun(0.0, m, int(right.sum()), m, confidence)
    for guesses in sorted({max(1, int(share * m)) for share in _SHARES}):
        correct, steps = int(right[:guesses].sum()), 0
        while p_value(_STEP * (steps + 1), delta, m, guesses, correct) <= error:
            steps += 1
        if _STEP * steps > best.epsilon:
            best = OneRun(_STEP * steps, guesses, correct, m, confidence)
    return best


@partial(jax.jit, static_argnames=("build", "rounds", "replaced"))
def _train(build: Callable[..., Algorithm], key: Key, coins: Array, hparams: Any, rounds: int, replaced: bool) -> Array:
    """Scores of all canaries from the iterates of one run with one client; canary j changes coordinate j only."""
    m = len(coins)
    algorithm = build(_linear, rows=m)
    present = jnp.ones(m) if replaced else (coins > 0).astype(jnp.zeros(()).dtype)
    canaries = jnp.diag(coins if replaced else jnp.ones(m)) * (FAR * CLIP)
    data = {"rows": canaries[None], "weights": (present / jnp.maximum(jnp.sum(present), 1))[None]}
    scale = hparams.rate * m / (hparams.gamma * hparams.clip)

    def public_round(carry: tuple[State, Array], _: None) -> tuple[tuple[State, Array], None]:
        state, total = carry
        after, _ = algorithm.step(key, hparams, state, data)
        # x is z N(0, 1), plus the clipped canary if this round draws its row.
        x = (state.server.params - after.server.params) * scale
        score = log_ratio(x, 1, hparams) - (log_ratio(x, -1, hparams) if replaced else 0)
        return (after, total + score), None

    start = (algorithm.init(jnp.zeros(m), jnp.arange(1)), jnp.zeros(m))
    return jax.lax.scan(public_round, start, None, length=rounds)[0][1]


def audit(
    key: Key,
    certificate: Guarantee,
    canaries: int = 1000,
    confidence: float = 0.95,
    build: Callable[..., Algorithm] | None = None,
) -> OneRun:
    """Train once with many canaries and return the largest epsilon that the run disproves.

    One client has `canaries` rows.  The gradient of row j is 100 C in coordinate j, so that canaries do not disturb
    each other.  The coin of row j says whether the row has this gradient or its negative (replace-one), or whether it
    is present (add-remove).  The score is the log likelihood ratio of the coin given all iterates.  More canaries give
    more guesses, but the bound loses 2 m delta.

    Args:
        key: random key of the coins and of the run.
        certificate: what is audited; its noise, rate, rounds, delta and relation are used.
        canaries: number of rows (m); time and memory grow with m^2.
        confidence: probability that a mechanism which keeps its certificate is not accused.
        build: `build(loss, rows=...)` makes the algorithm under test; LDP-FedP3 if None.

    Returns:
        The bound: at most the certificate's epsilon, except with probability 1 - confidence.

    >>> from commjax.privacy.accounting import guarantee
    >>> certificate = guarantee(4.0, 1.0, 10, 1e-5)
    >>> 0 < audit(jax.random.key(0), certificate, 300).epsilon < certificate.epsilon
    True
    """
    if canaries < 1:
        raise ValueError(f"canaries={canaries}; allowed: at least 1")
    key_coins, key_run = jax.random.split(key)
    coins = jax.random.rademacher(key_coins, (canaries,), jnp.zeros(()).dtype)
    hparams = ldp_fedp3.HParams(GAMMA, CLIP, certificate.noise, certificate.rate)
    replaced = certificate.relation == "replace-one"
    scores = _train(build or _mechanism(None), key_run, coins, hparams, certificate.rounds, replaced)
    return lower_bound(np.asarray(scores, np.float64), np.asarray(coins), certificate.delta, confidence)
