"""EF-BV's theorems as exact expectations of one step at arbitrary states, over every outcome (T11-T17).

The update is a NumPy oracle; that the package takes the same step is in tests/algorithms/test_ef_bv_step.py.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

from commjax import compressors as c
from commjax.algorithms import ef_bv
from commjax.data.libsvm import Dataset
from commjax.problems import logistic, quadratic
from commjax.problems.constants import smoothness
from commjax.theory import ef_bv as theory

N, D = 3, 4
EVERY = [c.comp(1, 2), c.comp(2, 3), c.mix(1, 1), c.top_k(1), c.rand_k(1), c.rand_k(2), c.m_nice(1)]
EVERY += [c.m_nice(2), c.m_nice(2, c.comp(1, 2)), c.perm_k(), c.scaled_sign(), c.scaled(0.5, c.comp(1, 3))]
COMPRESSORS = {one.name: one for one in [*EVERY, c.identity()]}
UNBIASED = {name: one for name, one in COMPRESSORS.items() if one.constants(D, N).eta == 0}
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
each_unbiased = pytest.mark.parametrize("compressor", UNBIASED.values(), ids=UNBIASED)


class Problem(NamedTuple):
    """f and all grad f_i at x [..., d], the constants, the optimum of f + R, the prox and R."""

    value: Any
    grads: Any
    smooth: Any
    mu: float = 0.0
    best: np.ndarray = np.zeros(D)
    prox: Any = staticmethod(lambda gamma, x: x)
    R: Any = staticmethod(lambda x: 0.0)

    def gap(self, x):
        return self.value(x) + self.R(x) - self.value(self.best) - self.R(self.best)

    def error(self, x, h):
        """G = mean_i |grad f_i(x) - h_i|^2"""
        return ((self.grads(x) - h) ** 2).sum((-1, -2)) / N


def of_quadratics(H, centre, R=None, prox=None, mu_R=0.0) -> Problem:
    """Of symmetric H_i that need not be positive semidefinite; their mean is, maybe singular."""
    H_mean = H.mean(0)
    spectrum = np.linalg.eigvalsh(H_mean)
    L = max(spectrum[-1], 1e-12)

    def value(x):
        away = x[..., None, :] - centre
        return np.einsum("...ni,nij,...nj->...", away, H, away) / (2 * N)

    def grads(x):
        return np.einsum("nij,...nj->...ni", H, x[..., None, :] - centre)

    best = np.linalg.pinv(H_mean + mu_R * np.eye(D)) @ np.einsum("nij,nj->i", H, centre) / N
    constants = smoothness(np.abs(np.linalg.eigvalsh(H)).max(-1), L)
    mu = min(spectrum[spectrum > 1e-9], default=0.0) + mu_R  # of PL: the smallest positive eigenvalue
    problem = Problem(value, grads, constants, mu, best)
    if prox is None:
        return problem
    if mu_R == 0:
        for _ in range(20_000):
            best = prox(1 / L, best - grads(best).mean(0) / L)
    return problem._replace(R=R, prox=prox, best=best)


def strongly_convex(seed=0, **kwargs):
    return of_quadratics(*quadratic.random(seed, N, D, mu=0.3, L=3.0), **kwargs)


def singular(seed=1):
    """PL and not strongly convex: every H_i, hence the mean, is flat along one direction."""
    H, centre = quadratic.random(seed, N, D, mu=0.3, L=3.0)
    flat = np.random.default_rng(seed).standard_normal(D)
    onto = np.eye(D) - np.outer(flat, flat) / (flat @ flat)
    return of_quadratics(onto @ H @ onto, centre)


def cancelling(seed=2, mean=(0.1, 0.2, 0.4, 0.5), centre=None, **kwargs):
    """f_i nonconvex, f convex, L far below L_tilde."""
    rng = np.random.default_rng(seed)
    H = rng.standard_normal((N, D, D))
    H = H + H.transpose(0, 2, 1)
    H = H - H.mean(0) + np.diag(mean)
    return of_quadratics(H, rng.standard_normal((N, D)) if centre is None else centre, **kwargs)


def ridge(M, base=strongly_convex):
    return base(R=lambda x: M / 2 * (x**2).sum(-1), prox=lambda gamma, x: x / (1 + gamma * M), mu_R=M)


def lasso(base=strongly_convex, weight=0.5):
    return base(
        R=lambda x: weight * np.abs(x).sum(-1),
        prox=lambda gamma, x: np.sign(x) * np.maximum(np.abs(x) - gamma * weight, 0),
    )


def narrow_box(width):
    """f linear, slopes a > 0, f_i not: KL with mu = min a / (2 width) > 6L and R not strongly convex."""
    H = cancelling(mean=(0.0,) * D)
    slopes = np.array([1.0, 1.5, 2.0, 3.0])
    shift = slopes - H.grads(np.zeros(D)).mean(0)
    return H._replace(
        value=lambda x: x @ slopes,
        grads=lambda x: H.grads(x) + shift,
        mu=slopes.min() / (2 * width),
        best=np.zeros(D),
        prox=lambda gamma, x: np.clip(x, 0, width),
        R=lambda x: np.where(((x >= 0) & (x <= width)).all(-1), 0.0, np.inf),
    )


def states(problem, seed=0, count=24):
    """Far from and near the fixed point, with G = 0, with equal and with different errors, with x = x*."""
    rng = np.random.default_rng(seed)
    for t in range(count):
        far, off = 10.0 ** rng.uniform(-3, 1, 2)
        x = problem.prox(1e-9, problem.best + far * rng.standard_normal(D) * (t % 7 > 0))
        wrong = rng.standard_normal((N, D) if t % 3 else (1, D)) if t % 5 else np.zeros((N, D))
        yield x, problem.grads(x) + off * wrong


def outcomes(problem, compressor, hparams, x, h):
    """The oracle: probabilities, x+ [m, d], h+ [m, n, d], g [m, d]."""
    probability, d = compressor.outcomes(problem.grads(x) - h)
    g = h.mean(0) + hparams.nu * d.mean(1)
    return probability, problem.prox(hparams.gamma, x - hparams.gamma * g), h + hparams.lam * d, g


class Setting(NamedTuple):
    hparams: ef_bv.HParams
    r: float
    r_av: float
    weight: float


def settings(problem, compressor, regime, factor=1.0, smooth=None):
    """The package's hparams and Lyapunov weight at nu*, nu = 1 and nu = lambda*."""
    eta, omega, omega_ran = constants = compressor.constants(D, N)
    for nu in (None, 1.0, theory.best_scaling(eta, omega)):
        gamma, lam, nu = ef_bv.theoretical(constants, smooth or problem.smooth, regime, nu=nu)
        r, r_av = theory.contraction(eta, omega, lam), theory.contraction(eta, omega_ran, nu)
        weight = theory.lyapunov_weight(factor * gamma, r, theory.one_minus_r(eta, omega, lam), r_av, regime)
        yield Setting(ef_bv.HParams(factor * gamma, lam, nu), r, r_av, weight)


def worst(problem, compressor, regime, *, factor=1.0, weight=1.0, smooth=None):
    """max over settings and states of E Psi+ / (rate Psi)"""
    found = -np.inf
    for one in settings(problem, compressor, regime, factor, smooth):
        rate = theory.rate(one.hparams.gamma, problem.mu, one.r, regime)
        for x, h in states(problem):
            probability, x1, h1, _ = outcomes(problem, compressor, one.hparams, x, h)
            before = problem.gap(x) + weight * one.weight * problem.error(x, h)
            after = probability @ (problem.gap(x1) + weight * one.weight * problem.error(x1, h1))
            if before > 1e-13:
                found = max(found, after / (rate * before))
    return found


@each_compressor
def test_the_errors_of_the_estimate_and_of_the_shifts_are_bounded_by_r_av_and_r(compressor):
    problem = strongly_convex()
    for one in settings(problem, compressor, "pl"):
        for x, h in states(problem):
            probability, _, h1, g = outcomes(problem, compressor, one.hparams, x, h)
            off = probability @ ((g - problem.grads(x).mean(0)) ** 2).sum(-1)
            assert off <= one.r_av * problem.error(x, h) * (1 + 1e-9) + 1e-20
            assert probability @ problem.error(x, h1) <= one.r * problem.error(x, h) * (1 + 1e-9) + 1e-20


@pytest.mark.parametrize("make", [strongly_convex, singular, cancelling])
@each_compressor
def test_one_step_contracts_the_lyapunov_function_under_pl(compressor, make):
    assert -np.inf < worst(make(), compressor, "pl") <= 1 + 1e-9  # nu = 1 is DIANA's Theorem, App. B (T14)


KL = {"ridge .1": ridge(0.1), "ridge 1e4": ridge(1e4), "ridge cancelling": ridge(10.0, cancelling)}
KL |= {
    "lasso": lasso(),
    "lasso cancelling": lasso(cancelling),
    "thin box": narrow_box(1e-3),
    "box": narrow_box(0.5),
}


@pytest.mark.parametrize("problem", KL.values(), ids=KL)
@each_compressor
def test_one_step_contracts_the_lyapunov_function_under_kl(compressor, problem):
    """Also where mu > 6L, which the printed proof does not reach (E11)."""
    assert -np.inf < worst(problem, compressor, "kl") <= 1 + 1e-9


@each_unbiased
@pytest.mark.parametrize("problem", [strongly_convex(), lasso(), ridge(3.0)], ids=["no R", "lasso", "ridge"])
def test_one_step_contracts_dianas_own_lyapunov_function(compressor, problem):
    _, omega, omega_ran = constants = compressor.constants(D, N)
    hparams = ef_bv.diana_hparams(constants, problem.smooth)
    assert hparams.lam == 1 / (1 + omega) and hparams.nu == 1
    weight = theory.diana_lyapunov_weight(hparams.gamma, omega, omega_ran)
    rate = theory.diana_rate(hparams.gamma, strongly_convex().mu, omega)  # of f alone

    def phi(x, h):
        shifts = ((problem.grads(problem.best) - h) ** 2).sum((-1, -2)) / N
        return ((x - problem.best) ** 2).sum(-1) + weight * shifts

    for x, h in states(problem, count=60):
        probability, x1, h1, g = outcomes(problem, compressor, hparams, x, h)
        assert probability @ phi(x1, h1) <= rate * phi(x, h) * (1 + 1e-9) + 1e-20
        np.testing.assert_allclose(probability @ g, problem.grads(x).mean(0), atol=1e-11)  # T17: E g = grad f


@each_unbiased
def test_compressed_gd_contracts_to_a_neighbourhood(compressor):
    problem = lasso()
    constants = compressor.constants(D, N)
    hparams = ef_bv.compressed_gd_hparams(constants, problem.smooth)
    noise = 2 * hparams.gamma**2 * constants.omega_ran * (problem.grads(problem.best) ** 2).sum() / N
    for x, _ in states(problem, count=60):
        probability, x1, h1, _ = outcomes(problem, compressor, hparams, x, np.zeros((N, D)))
        assert not h1.any()
        before = (1 - hparams.gamma * strongly_convex().mu) * ((x - problem.best) ** 2).sum()
        assert probability @ ((x1 - problem.best) ** 2).sum(-1) <= (before + noise) * (1 + 1e-9) + 1e-20


def nonconvex_logistic(lam=0.3):
    """sum_j x_j^2 / (1 + x_j^2) on a few rows, by hand; the constants are the package's."""
    rng = np.random.default_rng(3)
    A, b = rng.standard_normal((N, 2, D)), rng.choice([-1.0, 1.0], (N, 2))
    rows = list(np.arange(2 * N).reshape(N, 2))
    dataset = Dataset(A.reshape(-1, D), b.reshape(-1), "six rows")

    def margins(x):
        return b * np.einsum("njd,...d->...nj", A, x)

    def grads(x):
        fit = -np.einsum("...nj,njd->...nd", b / (1 + np.exp(margins(x))), A) / 2
        return fit + (2 * lam * x / (1 + x**2) ** 2)[..., None, :]

    def value(x):
        return np.logaddexp(0, -margins(x)).mean((-1, -2)) + lam * (x**2 / (1 + x**2)).sum(-1)

    return Problem(value, grads, logistic.nonconvex_constants(dataset, rows, lam))


@pytest.mark.parametrize("problem", [nonconvex_logistic(), cancelling(), cancelling(mean=(-0.2, 0.1, 0.3, 0.6))])
@each_compressor
def test_one_step_decreases_the_lyapunov_function_of_nonconvex_problems(compressor, problem):
    for one in settings(problem, compressor, "nonconvex"):
        for x, h in states(problem):
            probability, x1, h1, _ = outcomes(problem, compressor, one.hparams, x, h)
            change = probability @ (problem.value(x1) + one.weight * problem.error(x1, h1))
            change -= problem.value(x) + one.weight * problem.error(x, h)
            promised = one.hparams.gamma / 2 * (problem.grads(x).mean(0) ** 2).sum()
            rounding = 1e-9 * (promised + one.weight * problem.error(x, h)) + 1e-14 * (1 + abs(problem.value(x)))
            assert change <= -promised + rounding


@pytest.mark.parametrize("make", [strongly_convex, lasso])
@each_compressor
def test_a_stepsize_ten_times_too_large_breaks_the_theorems(compressor, make):
    assert worst(make(), compressor, "kl" if make is lasso else "pl", factor=10.0) > 1.01


@each_compressor
def test_a_lyapunov_weight_far_from_the_theorems_breaks_it(compressor):
    if compressor.name == "identity":
        assert all(one.weight == 0 for one in settings(strongly_convex(), compressor, "pl"))
        return
    assert worst(strongly_convex(), compressor, "pl", weight=1e-5) > 1.01
    assert worst(strongly_convex(), compressor, "pl", weight=1e4) > 1.01


def test_the_mean_square_of_the_smoothness_constants_is_what_the_stepsize_needs():
    """E1: with the sum gamma is sqrt(n) times too small, and with L for L_tilde it is too large."""
    problem = cancelling(mean=(0.01, 0.01, 0.02, 0.02))
    L_i = problem.smooth.L_i
    assert problem.smooth.L_tilde == pytest.approx(np.sqrt((L_i**2).sum() / N))
    of_sum = problem.smooth._replace(L_tilde=float(np.sqrt((L_i**2).sum())))
    constants = c.rand_k(1).constants(D, N)
    shrunk = ef_bv.theoretical(constants, problem.smooth).gamma / ef_bv.theoretical(constants, of_sum).gamma
    assert shrunk == pytest.approx(np.sqrt(N), rel=1e-3)
    too_small = problem.smooth._replace(L_tilde=problem.smooth.L)
    assert worst(problem, c.rand_k(1), "pl", smooth=too_small) > 1.01


def test_ef21_uses_its_new_shift_as_the_gradient_estimate():
    problem = strongly_convex()
    for compressor in COMPRESSORS.values():
        hparams = ef_bv.ef21_hparams(compressor.constants(D, N), problem.smooth)
        for x, h in states(problem, count=4):
            _, _, h1, g = outcomes(problem, compressor, hparams, x, h)
            np.testing.assert_allclose(g, h1.mean(1), atol=1e-12)
