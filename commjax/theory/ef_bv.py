"""EF-BV: scalings, contraction factors, stepsizes and rates (thesis L840-L1150), in forms that do not cancel (errata E5).

With realistic compressors 1 - r is about 1e-3 and s* about 1e-4, so `sqrt((1+r)/(2r)) - 1` loses four digits in float64 and all
of them in float32; every formula below is a ratio of sums of positive terms, and finite at r = 0 (no compression).
"""

import math

REGIMES = ("pl", "kl", "nonconvex")


def _check(eta: float, omega: float) -> None:
    if not 0 <= eta < 1:
        raise ValueError(f"eta must be in [0, 1): no scaling can control a compressor that loses everything; got {eta}")
    if not 0 <= omega < math.inf:
        raise ValueError(f"omega must be finite and at least 0, got {omega}")


def _check_regime(regime: str) -> None:
    if regime not in REGIMES:
        raise ValueError(f"regime must be one of {REGIMES}, got {regime!r}")


def best_scaling(eta: float, omega: float) -> float:
    """lambda* = min((1-eta) / ((1-eta)^2 + omega), 1), which maximises alpha = 1 - r.  With omega_ran it gives nu*.

    Thesis: Prop. 2 (L857).  Differs: E6, the minimum binds iff omega <= eta (1 - eta).
    """
    _check(eta, omega)
    return min((1 - eta) / ((1 - eta) ** 2 + omega), 1.0)


def contraction(eta: float, omega: float, lam: float) -> float:
    """r = (1 - lambda + lambda eta)^2 + lambda^2 omega; with (omega_ran, nu) it gives r_av."""
    return (1 - lam + lam * eta) ** 2 + lam**2 * omega


def one_minus_r(eta: float, omega: float, lam: float) -> float:
    """1 - r = lambda (2 (1-eta) - lambda ((1-eta)^2 + omega)), at lambda* equal to (1-eta)^2 / ((1-eta)^2 + omega)."""
    return lam * (2 * (1 - eta) - lam * ((1 - eta) ** 2 + omega))


def _alpha(eta: float, omega: float, lam: float) -> float:
    """1 - r, refused where the theorems do not hold."""
    _check(eta, omega)
    if not 0 < lam <= 1:
        raise ValueError(f"lambda must be in (0, 1], got {lam}")
    alpha = one_minus_r(eta, omega, lam)
    if not alpha > 0:
        limit = 2 * (1 - eta) / ((1 - eta) ** 2 + omega)
        raise ValueError(f"r = {1 - alpha:.6g} must be below 1: lambda must be below {limit:.6g}, got {lam:.6g}")
    return alpha


def s_star(r: float, alpha: float) -> float:
    """s* = sqrt((1+r)/(2r)) - 1 from r and alpha = 1 - r (L1013), infinite at r = 0."""
    if r == 0:
        return math.inf
    return alpha / (2 * r) / (math.sqrt((1 + r) / (2 * r)) + 1)


def s_nonconvex(r: float, alpha: float) -> float:
    """s = 1/sqrt(r) - 1 (L1127), infinite at r = 0."""
    if r == 0:
        return math.inf
    return alpha / (r + math.sqrt(r))


def _half_gap(r: float, alpha: float) -> float:
    """sqrt((1+r)/2) - sqrt(r) = sqrt(r) s*"""
    return alpha / 2 / (math.sqrt((1 + r) / 2) + math.sqrt(r))


def error_factor(r: float, alpha: float, r_av: float, regime: str = "pl") -> float:
    """sqrt(r_av / r) / s: what multiplies L-tilde in the stepsize."""
    _check_regime(regime)
    if regime == "nonconvex":
        return math.sqrt(r_av) * (1 + math.sqrt(r)) / alpha
    return math.sqrt(r_av) / _half_gap(r, alpha)


def inverse_theta(r: float, alpha: float, r_av: float, regime: str = "pl") -> float:
    """1 / theta, theta = s (1+s) r / r_av: zero when r_av is (theta is then infinite)."""
    _check_regime(regime)
    if regime == "nonconvex":
        return r_av * (1 + math.sqrt(r)) / alpha
    return r_av / (_half_gap(r, alpha) * math.sqrt((1 + r) / 2))


def stepsize(L: float, L_tilde: float, eta: float, omega: float, lam: float, r_av: float, regime: str = "pl") -> float:
    """gamma = 1 / (L + L_tilde sqrt(r_av/r) / s), with 2L instead of L under KL.

    Thesis: Thm 2.1 (PL, L1018), Thm 2.2 (KL, L1035), Thm 2.3 (nonconvex, L1130).
    Holds if: f is L-smooth, f_i is L_i-smooth, L_tilde^2 = mean L_i^2 (errata E1), r < 1.
    Differs: E11, for KL the printed proof needs mu <= 6L.  It extends to mu <= 6L + M where R is M-strongly convex, and, with
    another constant in Peter-Paul, to every mu at the rate max(1/(1 + gamma mu/2), 1 - b/(1 + s* b)), b = (1-r)/2: in effect the
    same one, since s* b is small.  No counterexample to the printed rate is known.
    """
    _check_regime(regime)
    alpha = _alpha(eta, omega, lam)
    r = contraction(eta, omega, lam)
    return 1 / ((2 * L if regime == "kl" else L) + L_tilde * error_factor(r, alpha, r_av, regime))


def lyapunov_weight(gamma: float, r: float, alpha: float, r_av: float, regime: str = "pl") -> float:
    """gamma / (2 theta): the weight of mean_i |grad f_i(x) - h_i|^2 in Psi."""
    return gamma / 2 * inverse_theta(r, alpha, r_av, regime)


def rate(gamma: float, mu: float, r: float, regime: str = "pl") -> float:
    """E Psi^{t+1} <= rate * Psi^t: max(1 - gamma mu, (1+r)/2) under PL, max(1/(1 + gamma mu / 2), (1+r)/2) under KL."""
    if regime not in ("pl", "kl"):
        raise ValueError(f"regime must be 'pl' or 'kl' for a linear rate, got {regime!r}")
    return max(1 / (1 + gamma * mu / 2) if regime == "kl" else 1 - gamma * mu, (1 + r) / 2)


def nonconvex_bound(gap: float, G0: float, gamma: float, inverse_theta: float, rounds: int) -> float:
    """E |grad f(x-hat)|^2 <= 2 (f(x0) - f_inf) / (gamma t) + G0 / (theta t) after t rounds (Thm 2.3, L1130)."""
    return 2 * gap / (gamma * rounds) + G0 * inverse_theta / rounds


def diana_stepsize(L_max: float, omega_ran: float) -> float:
    """1 / (L_max (1 + (1+sqrt 2)^2 omega_ran)): DIANA, f strongly convex, f_i convex, unbiased compressors (L1097)."""
    return 1 / (L_max * (1 + (1 + math.sqrt(2)) ** 2 * omega_ran))


def diana_lyapunov_weight(gamma: float, omega: float, omega_ran: float) -> float:
    """(2 + sqrt 2) gamma^2 omega_ran (1 + omega): the weight of mean_i |grad f_i(x*) - h_i|^2 in Phi (L1101)."""
    return (2 + math.sqrt(2)) * gamma**2 * omega_ran * (1 + omega)


def diana_rate(gamma: float, mu: float, omega: float) -> float:
    """max(1 - gamma mu, (1/2 + omega) / (1 + omega)) (L1104)."""
    return max(1 - gamma * mu, (0.5 + omega) / (1 + omega))


def compressed_gd_stepsize(L: float, L_max: float, omega_ran: float) -> float:
    """1 / (L + 2 omega_ran L_max): gradient descent on unbiased messages, f_i convex; a neighbourhood remains.

    From E |g|^2 <= |grad f|^2 + omega_ran mean |grad f_i|^2 <= 2 (L + 2 omega_ran L_max) (f - f*) + 2 omega_ran sigma*^2.
    """
    return 1 / (L + 2 * omega_ran * L_max)
