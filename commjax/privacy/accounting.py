"""Privacy accounting with dp-accounting: the epsilon of a run, and the noise for a target (epsilon, delta).

The mechanism is that of `commjax.privacy.mechanism`: each row is used with probability q, the noise is z times the
clipping norm, and there are K rounds.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from commjax.theory.ldp_fedp3 import check_relation, check_target


class Guarantee(NamedTuple):
    """A privacy guarantee: `rounds` sampled Gaussian mechanisms are (epsilon, delta)-DP for each client's rows.

    Holds if: the noise consists of real numbers from a source that only the client knows, and the number by which the
    sum of the gradients is divided is public.  For "replace-one" this may be the client's number of rows.  For
    "add-remove" it may not: pass a public number as `ldp_fedp3(rows=...)`.

    Attributes:
        epsilon: the guaranteed epsilon; infinite if there is no guarantee.
        delta: the guaranteed delta.  It includes the probability that `capacity` drops rows.
        noise: z, the noise multiplier: standard deviation of the noise on the sum, divided by the clipping norm.
        rate: q, the probability of each row in a round.
        rounds: K, the number of rounds.
        accountant: the accountant that gave the guarantee, "pld" or "rdp".
        relation: the relation of neighbouring data sets, "replace-one" or "add-remove".
        capacity: the largest number of rows that a client uses in a round; None means all.
    """

    epsilon: float
    delta: float
    noise: float
    rate: float
    rounds: int
    accountant: str
    relation: str
    capacity: int | None = None


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError("accounting for privacy needs dp-accounting: pip install 'commjax[privacy]'") from error
    return dp_accounting


_ORDERS = tuple(map(float, (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256)))


def renyi_replace_one(order: float, noise: float, rate: float) -> float:
    """Return the Renyi divergence of (1-q) N(0, z^2) + q N(1, z^2) from (1-q) N(0, z^2) + q N(-1, z^2).

    This pair dominates the sampled Gaussian mechanism if one row is replaced.  dp-accounting's PLD accountant composes
    the same pair; its RDP accountant does not support this relation.  The integral is computed by the trapezoidal rule,
    which converges exponentially, because the integrand is analytic in a strip.

    Args:
        order: order of the divergence, above 1.
        noise: z, the noise multiplier.
        rate: q, the probability of each row.

    Returns:
        The divergence.

    >>> round(renyi_replace_one(3.0, 2.0, 1.0), 9)  # order * 2^2 / (2 z^2)
    1.5
    """
    step = min(noise, noise**2) / 16
    x = np.arange(-2 - 15 * noise, 2 * order + 15 * noise, step)
    log_p, log_q = (_log_mixture(x, mean, noise, rate) for mean in (1.0, -1.0))
    exponent = order * log_p - (order - 1) * log_q
    top = exponent.max()
    return max(0.0, float((top + np.log(step * np.sum(np.exp(exponent - top)))) / (order - 1)))


def _log_mixture(x: np.ndarray, mean: float, noise: float, rate: float) -> np.ndarray:
    def log_normal(center: float) -> np.ndarray:
        return -((x - center) ** 2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))

    if rate == 1:
        return log_normal(mean)
    return np.logaddexp(math.log1p(-rate) + log_normal(0.0), math.log(rate) + log_normal(mean))


def _accounted(noise: float, rate: float, rounds: int, delta: float, accountant: str, relation: str) -> float:
    library = _library()
    event = library.SelfComposedDpEvent(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise)), rounds)
    relations = library.NeighboringRelation
    neighbours = relations.ADD_OR_REMOVE_ONE if relation == "add-remove" else relations.REPLACE_ONE
    if accountant == "pld":
        # Intervals of 1e-3 round up by at most 1e-3, and are ten times as fast as the default.
        return float(library.pld.PLDAccountant(neighbours, 1e-3).compose(event).get_epsilon(delta))
    if relation == "add-remove":
        return float(library.rdp.RdpAccountant(_ORDERS, neighbours).compose(event).get_epsilon(delta))
    divergences = [rounds * renyi_replace_one(order, noise, rate) for order in _ORDERS]
    return float(library.rdp.compute_epsilon(_ORDERS, divergences, delta)[0])


def overflow(capacity: int | None, rows: int, rate: float, rounds: int) -> float:
    """Bound the probability that more than `capacity` rows are sampled in some round (union bound).

    Args:
        capacity: the largest number of rows that a client uses in a round; None means all.
        rows: number of rows of the client.
        rate: q, the probability of each row.
        rounds: K, the number of rounds.

    Returns:
        The bound, at most 1.

    >>> overflow(None, 100, 0.1, 50), round(overflow(1, 2, 0.5, 2), 9)
    (0.0, 0.5)
    """
    if capacity is None or capacity >= rows:
        return 0.0
    from scipy.stats import binom

    return float(min(1.0, rounds * binom.sf(capacity, rows, rate)))


def guarantee(
    noise: float,
    rate: float,
    rounds: int,
    delta: float,
    *,
    accountant: str = "pld",
    relation: str = "replace-one",
    capacity: int | None = None,
    rows: int | None = None,
) -> Guarantee:
    """Compute the epsilon that an accountant guarantees for given noise and delta.

    With `capacity`, delta includes (1 + e^epsilon) times the probability that rows are dropped, because only then does
    the mechanism differ from the one without a capacity.

    Args:
        noise: z, the noise multiplier.
        rate: q, the probability of each row in a round.
        rounds: K, the number of rounds.
        delta: the target delta.
        accountant: "pld" (privacy loss distribution, tight) or "rdp" (Renyi).
        relation: "replace-one", the thesis's relation (Sec. C.3.3), or "add-remove", that of most papers.
        capacity: the largest number of rows that a client uses in a round; None means all.
        rows: number of rows of the client; required with `capacity`.

    Returns:
        The guarantee.  Its epsilon is infinite without noise, or if `capacity` drops rows too often.

    >>> round(guarantee(12.0, 1.0, 100, 1e-5).epsilon, 2)
    8.0
    >>> round(guarantee(12.0, 1.0, 100, 1e-5, relation="add-remove").epsilon, 2)
    3.55
    """
    check_target(1.0, delta)
    check_relation(relation)
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant={accountant!r}; allowed: 'pld', 'rdp'")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise={noise}; allowed: finite and >= 0")
    if not 0 < rate <= 1:
        raise ValueError(f"rate={rate}; allowed: 0 < rate <= 1 (a batch is not larger than the client's data)")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}; allowed: at least 1")
    if capacity is not None and rows is None:
        raise ValueError(f"capacity={capacity}; allowed: with the number of rows")
    # With a capacity, 1 % of delta is set aside for the rounds in which rows are dropped.
    lost = overflow(capacity, rows or 0, rate, rounds)
    share = delta if lost == 0 else 0.99 * delta
    epsilon = math.inf if noise == 0 else _accounted(noise, rate, rounds, share, accountant, relation)
    if lost > 0 and not (epsilon < 700 and (1 + math.exp(epsilon)) * lost <= delta - share):
        epsilon = math.inf
    return Guarantee(epsilon, delta, noise, rate, rounds, accountant, relation, capacity)


@cache
def calibrate(
    epsilon: float,
    delta: float,
    rate: float,
    rounds: int,
    *,
    accountant: str = "pld",
    relation: str = "replace-one",
    capacity: int | None = None,
    rows: int | None = None,
    tolerance: float = 1e-3,
) -> Guarantee:
    """Find the smallest noise multiplier whose guarantee is at most (epsilon, delta).

    Args:
        epsilon: the target epsilon.
        delta: the target delta.
        rate: q, the probability of each row in a round.
        rounds: K, the number of rounds.
        accountant: see `guarantee`.
        relation: see `guarantee`.
        capacity: see `guarantee`.
        rows: see `guarantee`.
        tolerance: relative tolerance of the noise multiplier.

    Returns:
        The guarantee; its `noise` is the multiplier.

    >>> least = calibrate(8.0, 1e-5, 1.0, 100)
    >>> least.epsilon <= 8, round(least.noise, 1)
    (True, 12.0)
    """
    check_target(epsilon, delta)

    def at(noise: float) -> Guarantee:
        return guarantee(
            noise, rate, rounds, delta, accountant=accountant, relation=relation, capacity=capacity, rows=rows
        )

    high = 1.0
    if accountant == "pld":
        # Start near the solution: the distributions for far too little noise are long arrays.
        high = calibrate(
            epsilon,
            delta,
            rate,
            rounds,
            accountant="rdp",
            relation=relation,
            capacity=capacity,
            rows=rows,
            tolerance=0.1,
        ).noise
    low = high
    best = at(high)
    while best.epsilon > epsilon:
        low, high = high, 2 * high
        if high > 1e9:
            raise ValueError(f"epsilon={epsilon}, capacity={capacity}; allowed: what some noise can reach")
        best = at(high)
    while low == high:
        low = high / 2
        if low >= 1 / 16 and (better := at(low)).epsilon <= epsilon:
            high, best = low, better
    while high > (1 + tolerance) * low:
        middle = math.sqrt(low * high)
        between = at(middle)
        if between.epsilon <= epsilon:
            high, best = middle, between
        else:
            low = middle
    return best
