"""LDP-FedP3's formulas, in plain numbers: the noise, and its cost in accuracy and in communication.

A client has m rows and uses b = q m of them per round on average.  The gradient of each row is clipped to C.  There are
K rounds and d parameters.  Gaussian noise of variance sigma^2 is added to each coordinate of the mean gradient.
`noise_variance` is *not* a guarantee, whatever its constant c: an accountant computes guarantees
(`commjax.privacy.accounting`).
"""

import math
from typing import NamedTuple

# A number of rounds or rows; formulas may give fractions.
Count = float | int
_RELATIONS = {"add-remove": 1, "replace-one": 2}


def check_relation(relation: str) -> None:
    """Raise a ValueError unless the relation of neighbouring data sets is known.

    Args:
        relation: "add-remove" (one row more or less) or "replace-one" (one row changed).
    """
    if relation not in _RELATIONS:
        raise ValueError(f"relation={relation!r}; allowed: {', '.join(map(repr, _RELATIONS))}")


def check_target(epsilon: float, delta: float) -> None:
    """Raise a ValueError unless epsilon is positive and finite, and 0 < delta < 1.

    Args:
        epsilon: privacy parameter.
        delta: privacy parameter.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}; allowed: positive and finite")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta}; allowed: 0 < delta < 1")


def sensitivity(C: float, b: Count, relation: str) -> float:
    """Return how far one row can move the mean gradient, which is the sum divided by b.

    It is C/b if a row is added or removed, and 2C/b if a row is replaced.
    Differs (docs/errata.md): F17 (the gradient of each row is clipped, not the mean gradient).

    Args:
        C: clipping norm.
        b: denominator of the mean.
        relation: "add-remove" or "replace-one".

    Returns:
        The sensitivity.

    >>> sensitivity(1.0, 10.0, "replace-one")
    0.2
    """
    check_relation(relation)
    return _RELATIONS[relation] * C / b


def noise_variance(epsilon: float, delta: float, *, c: float, C: float, K: Count, m: int) -> float:
    """Return the thesis's noise variance, with a constant c that the thesis does not give.

        sigma^2 = c K C^2 log(1/delta) / (m^2 epsilon^2)

    Thesis: Sec. C.4.2.
    Differs (docs/errata.md): F15 (log(1/delta); the theorem of Sec. 4.3 prints log(1/epsilon), which is 0 at epsilon =
    1), F20 (the constants c and c' are unknown).
    Holds if: epsilon < c' q^2 K.

    Args:
        epsilon: privacy parameter.
        delta: privacy parameter.
        c: the constant.
        C: clipping norm.
        K: number of rounds.
        m: number of rows of a client.

    Returns:
        sigma^2.

    >>> round(noise_variance(1.0, 1e-5, c=1.0, C=1.0, K=1000, m=500), 6)
    0.046052
    """
    check_target(epsilon, delta)
    return c * K * C**2 * math.log(1 / delta) / (m * epsilon) ** 2


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return epsilon for rho-zCDP: it is (rho + 2 sqrt(rho log(1/delta)), delta)-DP (Bun and Steinke, 2016).

    Args:
        rho: parameter of zero-concentrated differential privacy.
        delta: privacy parameter.

    Returns:
        epsilon.
    """
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def full_batch_epsilon(sigma: float, delta: float, *, C: float, K: Count, m: int, relation: str) -> float:
    """Return the epsilon that zCDP guarantees after K rounds, each with all m rows and Gaussian noise sigma.

        epsilon = zcdp_epsilon(rho, delta),   rho = K sensitivity(C, m, relation)^2 / (2 sigma^2)

    Args:
        sigma: standard deviation of the noise on each coordinate of the mean gradient.
        delta: privacy parameter.
        C: clipping norm.
        K: number of rounds.
        m: number of rows of a client.
        relation: "add-remove" or "replace-one".

    Returns:
        epsilon.

    >>> round(full_batch_epsilon(0.04605170186**0.5, 1e-5, C=1.0, K=1000, m=500, relation="add-remove"), 2)
    1.46
    """
    return zcdp_epsilon(K * sensitivity(C, m, relation) ** 2 / (2 * sigma**2), delta)


def poisson_variance(C: float, q: float, b: Count) -> float:
    """Return the bound E |g - grad f_i|^2 <= (1 - q) C^2 / b for Poisson sampling and a sum divided by b = q m.

    Thesis: Lemma C.4.6.
    Differs (docs/errata.md): F18 (the bound is false for b rows drawn without replacement; see `fixed_variance`).

    Args:
        C: clipping norm.
        q: probability of each row.
        b: denominator of the mean.

    Returns:
        The bound.
    """
    return (1 - q) * C**2 / b


def fixed_variance(spread: float, m: int, b: int) -> float:
    """Return the variance of the mean gradient of b of m rows, drawn without replacement.

        E |g - grad f_i|^2 = (m - b) / (m - 1) spread / b

    Args:
        spread: mean_j |g_j - mean|^2 over the rows.
        m: number of rows, at least 2.
        b: number of drawn rows.

    Returns:
        The variance.

    >>> fixed_variance(1.0, 2, 1), poisson_variance(1.0, 0.5, 1.0)
    (1.0, 0.5)
    """
    return (m - b) / (m - 1) * spread / b


def utility(
    delta0: float, L: float, *, C: float, d: int, gamma: float, K: Count, sigma2: float, q: float, b: Count
) -> float:
    """Return the bound on the mean squared gradient norm over K rounds.

        mean_k E |grad f(w^k)|^2 <= Delta_0 / (gamma K) + (gamma L / 2) [C^2 (1 + (1 - q) / b) + d sigma^2]

    Thesis: Sec. C.4.2.
    Holds if: gradients of single rows are bounded by C, the noise is scaled by gamma, gamma <= 1/L.
    Differs (docs/errata.md): F16 (scaling of the noise), F17 (bound for single rows), F19 (the factor 1 + (1 - q)/b,
    which Poisson sampling needs; with exactly b rows it is 1).

    Args:
        delta0: Delta_0 = f(w^0) - inf f.
        L: smoothness constant of f.
        C: clipping norm.
        d: number of parameters.
        gamma: stepsize.
        K: number of rounds.
        sigma2: variance of the noise.
        q: probability of each row.
        b: mean number of rows in a round.

    Returns:
        The bound.
    """
    return delta0 / (gamma * K) + gamma * L / 2 * (C**2 * (1 + (1 - q) / b) + d * sigma2)


class Schedule(NamedTuple):
    """The result of `schedule`.

    Attributes:
        K: number of rounds, not rounded.
        gamma: stepsize.
        bound: bound on mean_k E |grad f|^2.
        cost: d K, the number of parameters sent by all clients together.
    """

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
    """Return K and gamma that balance the two terms of `utility`, with sigma^2 from `noise_variance`.

        K     = max(m epsilon sqrt(L Delta_0) / (C sqrt(c d log(1/delta))),  m^2 epsilon^2 / (c d log(1/delta)))
        gamma = min(1/L,  sqrt(Delta_0 c d log(1/delta)) / (C m epsilon sqrt(L)))
        bound = (2 + (1 - q) / (2b)) C sqrt(L Delta_0 c d log(1/delta)) / (m epsilon)

    Thesis: Sec. 4.3.
    Differs (docs/errata.md): F15 (log(1/delta)), F19 (the thesis lacks sqrt(Delta_0) and the term with b).

    Args:
        epsilon: privacy parameter.
        delta: privacy parameter.
        L: smoothness constant of f.
        delta0: Delta_0 = f(w^0) - inf f.
        C: clipping norm.
        c: constant of `noise_variance`.
        d: number of parameters.
        m: number of rows of a client.
        b: mean number of rows in a round; None means (1 - q)/b = 0, as in the thesis.

    Returns:
        The schedule.

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
    """Return d sigma^2 L / (2 gamma), which noise on the weights, not scaled by gamma, adds to mean_k E |grad f|^2.

    Thesis: Alg. 11 and Sec. C.4.2.  Differs (docs/errata.md): F16 (the noise has to be scaled by gamma).

    Args:
        L: smoothness constant of f.
        d: number of parameters.
        sigma2: variance of the noise.
        gamma: stepsize.

    Returns:
        The term.
    """
    return d * sigma2 * L / (2 * gamma)


def communication(epsilon: float, delta: float, *, m: int, d: int, n: int, omega: float) -> dict[str, float]:
    """Return the thesis's comparison: the number of parameters sent to reach the private accuracy, without constants.

    Thesis: Table C.3.

    Args:
        epsilon: privacy parameter.
        delta: privacy parameter.
        m: number of rows of a client.
        d: number of parameters.
        n: number of clients.
        omega: relative variance of the compressor of the compared methods.

    Returns:
        The number of parameters by method.

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
