"""LDP-FedP3's formulas, in plain numbers: the noise, what it costs in accuracy and in communication.

m rows a client, b = q m of them a round on average, gradients of a row clipped to C, K rounds, d parameters, Gaussian noise
of variance sigma^2 on each coordinate of the mean gradient.  `noise_variance` is *not* a certificate, whatever its constant
c: that is an accountant's work (`commjax.privacy.accounting`).
"""

import math
from typing import NamedTuple

Count = float | int  # of rounds or rows: formulas give fractions
_RELATIONS = {"add-remove": 1, "replace-one": 2}


def check_relation(relation: str) -> None:
    """What neighbouring data sets differ in: one row more or less, or one row changed"""
    if relation not in _RELATIONS:
        raise ValueError(f"relation={relation!r}; allowed: {', '.join(map(repr, _RELATIONS))}")


def check_target(epsilon: float, delta: float) -> None:
    """epsilon > 0 and 0 < delta < 1"""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}; allowed: positive and finite")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta}; allowed: 0 < delta < 1")


def sensitivity(C: float, b: Count, relation: str) -> float:
    """How far one row can move the mean gradient, sum / b: C/b if it comes or goes, 2C/b if it changes.  Differs: F17.

    >>> sensitivity(1.0, 10.0, "replace-one")
    0.2
    """
    check_relation(relation)
    return _RELATIONS[relation] * C / b


def noise_variance(epsilon: float, delta: float, *, c: float, C: float, K: Count, m: int) -> float:
    """sigma^2 = c K C^2 log(1/delta) / (m^2 epsilon^2), with a constant c that the thesis does not give.

    Thesis: L4465.  Differs: F15 (log(1/delta); L1780 prints log(1/epsilon), which is 0 at epsilon = 1), F20 (c).
    Holds if: epsilon < c' q^2 K, c' unknown as well.

    >>> round(noise_variance(1.0, 1e-5, c=1.0, C=1.0, K=1000, m=500), 6)
    0.046052
    """
    check_target(epsilon, delta)
    return c * K * C**2 * math.log(1 / delta) / (m * epsilon) ** 2


def zcdp_epsilon(rho: float, delta: float) -> float:
    """rho-zCDP is (rho + 2 sqrt(rho log(1/delta)), delta)-DP (Bun and Steinke, 2016)"""
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def full_batch_epsilon(sigma: float, delta: float, *, C: float, K: Count, m: int, relation: str) -> float:
    """What K rounds with all m rows and noise sigma certainly have: rho = K sensitivity^2 / (2 sigma^2).

    >>> round(full_batch_epsilon(0.04605170186**0.5, 1e-5, C=1.0, K=1000, m=500, relation="add-remove"), 2)
    1.46
    """
    return zcdp_epsilon(K * sensitivity(C, m, relation) ** 2 / (2 * sigma**2), delta)


def poisson_variance(C: float, q: float, b: Count) -> float:
    """E |g - grad f_i|^2 <= (1 - q) C^2 / b for rows that come with chance q each and a sum divided by b = q m.

    Thesis: Lemma L4402.  Differs: F18 (false for b rows drawn without replacement, see `fixed_variance`).
    """
    return (1 - q) * C**2 / b


def fixed_variance(spread: float, m: int, b: int) -> float:
    """E |g - grad f_i|^2 = (m - b) / (m - 1) spread / b for b of m rows without replacement, spread = mean_j |g_j - mean|^2.

    >>> fixed_variance(1.0, 2, 1), poisson_variance(1.0, 0.5, 1.0)
    (1.0, 0.5)
    """
    return (m - b) / (m - 1) * spread / b


def utility(
    delta0: float, L: float, *, C: float, d: int, gamma: float, K: Count, sigma2: float, q: float, b: Count
) -> float:
    """mean_k E |grad f(w^k)|^2 <= Delta_0 / (gamma K) + (gamma L / 2) [C^2 (1 + (1 - q) / b) + d sigma^2].

    Thesis: L4480.  Holds if: gradients of single rows are bounded by C (F17), the noise is scaled by gamma (F16), gamma <= 1/L.
    Differs: F19.  With b rows exactly, |g| <= C and the factor 1 + (1 - q)/b falls away; with Poisson sampling it does not.
    """
    return delta0 / (gamma * K) + gamma * L / 2 * (C**2 * (1 + (1 - q) / b) + d * sigma2)


class Schedule(NamedTuple):
    """K rounds (not rounded), their stepsize, the bound on mean_k E |grad f|^2, and parameters sent by all clients."""

    K: float
    gamma: float
    bound: float
    cost: float


def schedule(
    epsilon: float,
    delta: float,
    *,
    L: float,
    delta0: float,
    C: float,
    c: float,
    d: int,
    m: int,
    b: Count | None = None,
) -> Schedule:
    """K and gamma that balance the two terms of `utility` with sigma^2 from `noise_variance`.

        K     = max(m epsilon sqrt(L Delta_0) / (C sqrt(c d log(1/delta))),  m^2 epsilon^2 / (c d log(1/delta)))
        gamma = min(1/L,  sqrt(Delta_0 c d log(1/delta)) / (C m epsilon sqrt(L)))
        bound = (2 + (1 - q) / (2b)) C sqrt(L Delta_0 c d log(1/delta)) / (m epsilon)

    Without `b`, (1 - q)/b is taken for 0, as in the thesis.
    Thesis: L1779.  Differs: F19 (sqrt(Delta_0) is missing there), F15; the part with b is ours.

    >>> found = schedule(1.0, 1e-5, L=2.0, delta0=10.0, C=1.0, c=1.0, d=100, m=500)
    >>> round(found.K, 3), round(found.gamma, 6), round(found.bound, 6)
    (217.147, 0.151743, 0.606971)
    """
    check_target(epsilon, delta)
    noise, budget = c * d * math.log(1 / delta), m * epsilon
    K = max(budget * math.sqrt(L * delta0) / (C * math.sqrt(noise)), budget**2 / noise)
    gamma = min(1 / L, math.sqrt(delta0 * noise) / (C * budget * math.sqrt(L)))
    extra = 0.0 if b is None else (1 - b / m) / b
    return Schedule(K, gamma, (2 + extra / 2) * C * math.sqrt(L * delta0 * noise) / budget, d * K)


def unscaled_floor(L: float, d: int, sigma2: float, gamma: float) -> float:
    """d sigma^2 L / (2 gamma): what noise on the weights, not scaled by gamma, leaves of mean_k E |grad f|^2.

    Thesis: Alg. L4179 and L4472.  Differs: F16.
    """
    return d * sigma2 * L / (2 * gamma)


def communication(epsilon: float, delta: float, *, m: int, d: int, n: int, omega: float) -> dict[str, float]:
    """The thesis's comparison: parameters sent to reach the private accuracy, constants left out.  Thesis: Table L4209.

    >>> found = communication(1.0, 1e-5, m=500, d=100, n=10, omega=9.0)
    >>> round(found["CDP-SGD"] / found["LDP-FedP3"], 9)
    1.0
    """
    check_target(epsilon, delta)
    log = math.log(1 / delta)
    root, square = m * epsilon * math.sqrt(d / log), (m * epsilon) ** 2 / log
    return {
        "LDP SVRG/SPIDER": n**1.5 * root,
        "SDM-DSGD": n**3.5 / (1 + omega) ** 1.5 * root + n / (1 + omega) * square,
        "CDP-SGD": n**1.5 / (1 + omega) ** 1.5 * root + n / (1 + omega) * square,
        "LDP-FedP3": root + square,
    }
