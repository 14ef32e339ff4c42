"""EF-BV: scalings, contraction factors, stepsizes and rates, computed without cancellation.

Thesis: Sec. 2.2 to 2.5.  Differs (docs/errata.md): E5 (formulas without cancellation).

With realistic compressors 1 - r is about 1e-3 and s* about 1e-4, so `sqrt((1+r)/(2r)) - 1` loses four digits in float64
and all of them in float32.  Every formula below is a ratio of sums of positive terms, and is finite at r = 0 (no
compression).

Symbols: a compressor is in C(eta, omega) with average relative variance omega_ran; lambda and nu are the scalings of
EF-BV; r and r_av are the contraction factors for (omega, lambda) and (omega_ran, nu); alpha = 1 - r; x is the model,
h_i the control variate of client i, Psi the Lyapunov function of the theorems, f_inf the infimum of f.
`regime` is "pl" (Polyak-Lojasiewicz), "kl" (Kurdyka-Lojasiewicz, with a regularizer) or "nonconvex".
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
    """Return the scaling lambda* that maximises alpha = 1 - r.

        lambda* = min((1-eta) / ((1-eta)^2 + omega), 1)

    Thesis: Prop. 2.2.2.  Differs (docs/errata.md): E6 (lambda* = 1 if and only if omega <= eta (1 - eta)).

    Args:
        eta: relative bias, in [0, 1).
        omega: relative variance; with omega_ran the result is nu*.

    Returns:
        lambda*.
    """
    _check(eta, omega)
    return min((1 - eta) / ((1 - eta) ** 2 + omega), 1.0)


def contraction(eta: float, omega: float, lam: float) -> float:
    """Return the contraction factor r of a scaled compressor.

        r = (1 - lambda + lambda eta)^2 + lambda^2 omega

    Args:
        eta: relative bias.
        omega: relative variance; with omega_ran and nu the result is r_av.
        lam: lambda, the scaling.

    Returns:
        r.
    """
    return (1 - lam + lam * eta) ** 2 + lam**2 * omega


def one_minus_r(eta: float, omega: float, lam: float) -> float:
    """Return alpha = 1 - r without cancellation.

        1 - r = lambda (2 (1-eta) - lambda ((1-eta)^2 + omega))

    At lambda* without the minimum, this is (1-eta)^2 / ((1-eta)^2 + omega).

    Args:
        eta: relative bias.
        omega: relative variance.
        lam: lambda, the scaling.

    Returns:
        1 - r.
    """
    return lam * (2 * (1 - eta) - lam * ((1 - eta) ** 2 + omega))


def _alpha(eta: float, omega: float, lam: float) -> float:
    """Return 1 - r, and raise a ValueError where the theorems do not hold."""
    _check(eta, omega)
    if not 0 < lam <= 1:
        raise ValueError(f"lambda must be in (0, 1], got {lam}")
    alpha = one_minus_r(eta, omega, lam)
    if not alpha > 0:
        limit = 2 * (1 - eta) / ((1 - eta) ** 2 + omega)
        raise ValueError(f"r = {1 - alpha:.6g} must be below 1: lambda must be below {limit:.6g}, got {lam:.6g}")
    return alpha


def s_star(r: float, alpha: float) -> float:
    """Return s* = sqrt((1+r)/(2r)) - 1, infinite at r = 0 (thesis: Sec. 2.4).

    Args:
        r: contraction factor.
        alpha: 1 - r.

    Returns:
        s*.
    """
    if r == 0:
        return math.inf
    return alpha / (2 * r) / (math.sqrt((1 + r) / (2 * r)) + 1)


def s_nonconvex(r: float, alpha: float) -> float:
    """Return s = 1/sqrt(r) - 1, infinite at r = 0 (thesis: Sec. 2.5).

    Args:
        r: contraction factor.
        alpha: 1 - r.

    Returns:
        s.
    """
    if r == 0:
        return math.inf
    return alpha / (r + math.sqrt(r))


def _half_gap(r: float, alpha: float) -> float:
    """Return sqrt((1+r)/2) - sqrt(r) = sqrt(r) s*."""
    return alpha / 2 / (math.sqrt((1 + r) / 2) + math.sqrt(r))


def error_factor(r: float, alpha: float, r_av: float, regime: str = "pl") -> float:
    """Return sqrt(r_av / r) / s, the factor of L_tilde in the stepsize; s is `s_star`, nonconvex: `s_nonconvex`.

    Args:
        r: contraction factor for (omega, lambda).
        alpha: 1 - r.
        r_av: contraction factor for (omega_ran, nu).
        regime: "pl", "kl" or "nonconvex".

    Returns:
        The factor.
    """
    _check_regime(regime)
    if regime == "nonconvex":
        return math.sqrt(r_av) * (1 + math.sqrt(r)) / alpha
    return math.sqrt(r_av) / _half_gap(r, alpha)


def inverse_theta(r: float, alpha: float, r_av: float, regime: str = "pl") -> float:
    """Return 1 / theta for the theta = s (1+s) r / r_av of the Lyapunov function; it is zero if r_av is zero.

    s is `s_star`, in the nonconvex regime `s_nonconvex`.

    Args:
        r: contraction factor for (omega, lambda).
        alpha: 1 - r.
        r_av: contraction factor for (omega_ran, nu).
        regime: "pl", "kl" or "nonconvex".

    Returns:
        1 / theta.
    """
    _check_regime(regime)
    if regime == "nonconvex":
        return r_av * (1 + math.sqrt(r)) / alpha
    return r_av / (_half_gap(r, alpha) * math.sqrt((1 + r) / 2))


def stepsize(
    L: float, L_tilde: float, eta: float, omega: float, lam: float, r_av: float, *, regime: str = "pl"
) -> float:
    """Return the largest stepsize of the theorems.

        gamma = 1 / (L + L_tilde sqrt(r_av/r) / s),   with 2L instead of L under KL

    s is `s_star`, in the nonconvex regime `s_nonconvex`; r is the contraction factor for (omega, lambda).

    Thesis: Thm 2.4.1 (PL), Thm 2.4.2 (KL), Thm 2.5.1 (nonconvex).
    Holds if: f is L-smooth, f_i is L_i-smooth, L_tilde^2 = mean L_i^2, r < 1.
    Differs (docs/errata.md): E1 (L_tilde is a root *mean* square), E11 (for KL the printed proof needs mu <= 6L, or mu
    <= 6L + M if R is M-strongly convex; for every mu it gives the rate max(1/(1 + gamma mu/2), 1 - b/(1 + s* b)) with b
    = (1-r)/2, which is nearly the printed one because s* b is small).

    Args:
        L: smoothness constant of f.
        L_tilde: root mean square of the smoothness constants of the f_i.
        eta: relative bias.
        omega: relative variance.
        lam: lambda, the scaling.
        r_av: contraction factor for (omega_ran, nu).
        regime: "pl", "kl" or "nonconvex".

    Returns:
        gamma.
    """
    _check_regime(regime)
    alpha = _alpha(eta, omega, lam)
    r = contraction(eta, omega, lam)
    return 1 / ((2 * L if regime == "kl" else L) + L_tilde * error_factor(r, alpha, r_av, regime))


def lyapunov_weight(gamma: float, r: float, alpha: float, r_av: float, regime: str = "pl") -> float:
    """Return gamma / (2 theta), the weight of mean_i |grad f_i(x) - h_i|^2 in the Lyapunov function Psi.

    Args:
        gamma: stepsize.
        r: contraction factor for (omega, lambda).
        alpha: 1 - r.
        r_av: contraction factor for (omega_ran, nu).
        regime: "pl", "kl" or "nonconvex".

    Returns:
        The weight.
    """
    return gamma / 2 * inverse_theta(r, alpha, r_av, regime)


def rate(gamma: float, mu: float, r: float, regime: str = "pl") -> float:
    """Return the linear rate at which the Lyapunov function shrinks, E Psi^{t+1} <= rate * Psi^t.

        PL: max(1 - gamma mu, (1+r)/2)        KL: max(1/(1 + gamma mu / 2), (1+r)/2)

    Args:
        gamma: stepsize.
        mu: constant of the PL or KL inequality.
        r: contraction factor for (omega, lambda).
        regime: "pl" or "kl".

    Returns:
        The rate, below 1.
    """
    if regime not in ("pl", "kl"):
        raise ValueError(f"regime must be 'pl' or 'kl' for a linear rate, got {regime!r}")
    return max(1 / (1 + gamma * mu / 2) if regime == "kl" else 1 - gamma * mu, (1 + r) / 2)


def nonconvex_bound(gap: float, G0: float, gamma: float, inverse_theta: float, rounds: int) -> float:
    """Return the bound on the squared gradient norm after t rounds in the nonconvex regime (thesis: Thm 2.5.1).

        E |grad f(x-hat)|^2 <= 2 (f(x0) - f_inf) / (gamma t) + G0 / (theta t)

    x-hat is drawn uniformly from the first t iterates, and f_inf is the infimum of f.

    Args:
        gap: f(x0) - f_inf.
        G0: mean_i |grad f_i(x0) - h_i|^2 at the start.
        gamma: stepsize.
        inverse_theta: 1 / theta.
        rounds: t, the number of rounds.

    Returns:
        The bound.
    """
    return 2 * gap / (gamma * rounds) + G0 * inverse_theta / rounds


def diana_stepsize(L_max: float, omega_ran: float) -> float:
    """Return DIANA's stepsize 1 / (L_max (1 + (1+sqrt 2)^2 omega_ran)) (thesis: Prop. 2.4.6).

    Holds if: f strongly convex, f_i convex, unbiased compressors.

    Args:
        L_max: the largest smoothness constant of the f_i.
        omega_ran: average relative variance.

    Returns:
        gamma.
    """
    return 1 / (L_max * (1 + (1 + math.sqrt(2)) ** 2 * omega_ran))


def diana_lyapunov_weight(gamma: float, omega: float, omega_ran: float) -> float:
    """Return (2 + sqrt 2) gamma^2 omega_ran (1 + omega), the weight of mean_i |grad f_i(x*) - h_i|^2 in DIANA's Phi.

    Thesis: Prop. 2.4.6, where Phi is the Lyapunov function.

    Args:
        gamma: stepsize.
        omega: relative variance.
        omega_ran: average relative variance.

    Returns:
        The weight.
    """
    return (2 + math.sqrt(2)) * gamma**2 * omega_ran * (1 + omega)


def diana_rate(gamma: float, mu: float, omega: float) -> float:
    """Return DIANA's linear rate max(1 - gamma mu, (1/2 + omega) / (1 + omega)) (thesis: Prop. 2.4.6).

    Args:
        gamma: stepsize.
        mu: strong convexity constant of f.
        omega: relative variance.

    Returns:
        The rate.
    """
    return max(1 - gamma * mu, (0.5 + omega) / (1 + omega))


def compressed_gd_stepsize(L: float, L_max: float, omega_ran: float) -> float:
    """Return the stepsize 1 / (L + 2 omega_ran L_max) of gradient descent on unbiased messages with convex f_i.

    It converges to a neighbourhood only, because

        E |g|^2 <= |grad f|^2 + omega_ran mean |grad f_i|^2 <= 2 (L + 2 omega_ran L_max) (f - f*) + 2 omega_ran sigma*^2

    g is the mean of the messages, and sigma*^2 = mean_i |grad f_i(x*)|^2.

    Args:
        L: smoothness constant of f.
        L_max: the largest smoothness constant of the f_i.
        omega_ran: average relative variance.

    Returns:
        gamma.
    """
    return 1 / (L + 2 * omega_ran * L_max)
