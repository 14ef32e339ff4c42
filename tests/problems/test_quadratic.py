"""Quadratics against NumPy: loss, gradient, spectrum, constants, optimum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.problems import quadratic
from commjax.problems.constants import smoothness


def test_loss_and_gradient_equal_the_numpy_formula_on_every_client():
    problem = quadratic.random(0, n=3, d=4, mu=0.5, L=2.0)
    x = np.random.default_rng(1).standard_normal(4)
    both = jax.jit(jax.vmap(jax.value_and_grad(quadratic.loss), (None, 0)))
    values, grads = both(jnp.asarray(x), jax.tree.map(jnp.asarray, problem))
    for i in range(3):
        away = x - problem.c[i]
        np.testing.assert_allclose(values[i], away @ problem.H[i] @ away / 2, rtol=1e-12)
        np.testing.assert_allclose(grads[i], problem.H[i] @ away, rtol=1e-10)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_dtype_of_params_and_data_is_kept(dtype):
    problem = quadratic.random(0, n=2, d=3, mu=0.5, L=2.0)
    data = jax.tree.map(lambda a: jnp.asarray(a[0], dtype), problem)
    assert quadratic.loss(jnp.ones(3, dtype), data).dtype == dtype


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.floats(1e-3, 1.0), st.floats(1.0, 1e3))
@settings(deadline=None, max_examples=30)
def test_random_problems_keep_the_promised_spectrum(seed, n, d, mu, L):
    problem = quadratic.random(seed, n, d, mu=mu, L=L)
    assert problem.H.shape == (n, d, d) and problem.c.shape == (n, d)
    np.testing.assert_array_equal(problem.H, problem.H.transpose(0, 2, 1))
    spectra = np.linalg.eigvalsh(problem.H)
    assert spectra.min() >= mu - 1e-12 * L and spectra.max() <= L * (1 + 1e-12)
    np.testing.assert_allclose(spectra[0, -1], L, rtol=1e-12)
    if d > 1:
        np.testing.assert_allclose(spectra[0, 0], mu, atol=1e-12 * L)


def test_clients_differ_in_curvature_and_are_not_diagonal():
    problem = quadratic.random(0, n=3, d=4, mu=0.5, L=2.0)
    spectra = np.linalg.eigvalsh(problem.H)
    assert np.ptp(spectra[1:, -1]) > 1e-3
    assert np.abs(problem.H[1] - np.diag(np.diag(problem.H[1]))).max() > 0.01
    for spectrum, H in zip(spectra, problem.H, strict=True):
        np.testing.assert_allclose(spectrum.sum(), np.trace(H), rtol=1e-12)


def test_heterogeneity_scales_the_distance_between_minimisers():
    none, one, two = (quadratic.random(0, n=4, d=3, mu=1.0, L=2.0, heterogeneity=h).c for h in (0.0, 1.0, 2.0))
    np.testing.assert_array_equal(none, np.broadcast_to(none[0], none.shape))
    assert np.abs(none[0]).max() > 0.01
    np.testing.assert_allclose(two - none, 2 * (one - none), rtol=1e-12)
    np.testing.assert_array_equal(quadratic.random(0, n=4, d=3, mu=1.0, L=2.0).c, one)
    many = quadratic.random(0, n=2000, d=3, mu=1.0, L=2.0, heterogeneity=3.0).c
    np.testing.assert_allclose(many.std(axis=0), 3, rtol=0.05)


def test_constants_are_the_eigenvalues():
    problem = quadratic.random(3, n=4, d=5, mu=0.2, L=9.0)
    found = quadratic.constants(problem)
    L_i = np.array([np.linalg.norm(H, 2) for H in problem.H])
    mean = np.linalg.eigvals(problem.H.mean(axis=0)).real
    np.testing.assert_allclose(found.L_i, L_i, rtol=1e-12)
    np.testing.assert_allclose(found.L, mean.max(), rtol=1e-12)
    np.testing.assert_allclose(found.mu, mean.min(), rtol=1e-10)
    np.testing.assert_allclose(found.L_tilde, np.sqrt(np.mean(L_i**2)), rtol=1e-12)
    assert found.L_max == found.L_i.max()


def test_the_optimum_is_stationary_and_its_value_is_f():
    problem = quadratic.random(5, n=4, d=5, mu=0.2, L=9.0)
    best = quadratic.optimum(problem)
    data = jax.tree.map(jnp.asarray, problem)
    f = jax.value_and_grad(lambda x: jnp.mean(jax.vmap(quadratic.loss, (None, 0))(x, data)))
    value, grad = f(jnp.asarray(best.params))
    np.testing.assert_allclose(best.value, value, rtol=1e-12)
    assert np.linalg.norm(grad) <= 1e-13 and best.gradient_norm <= 1e-13


def test_the_reported_gradient_norm_is_that_of_the_mean_gradient():
    H = np.array([[[1e8, 0.3], [0.3, 1.0]], [[3.0, 0.7], [0.7, 2.0]]])
    problem = quadratic.Quadratic(H, np.array([[np.pi, np.e], [1 / 3, 1e5]]))
    best = quadratic.optimum(problem)
    mean = np.mean([h @ (best.params - c) for h, c in zip(H, problem.c, strict=True)], axis=0)
    np.testing.assert_allclose(best.gradient_norm, np.linalg.norm(mean), atol=1e-7)


def test_a_semidefinite_client_is_allowed_where_the_mean_is_definite():
    problem = quadratic.Quadratic(
        np.array([np.diag([1.0, 0.0]), np.diag([0.0, 3.0])]), np.array([[1.0, 2.0], [3.0, 4.0]])
    )
    assert quadratic.constants(problem).mu == 0.5
    np.testing.assert_allclose(quadratic.optimum(problem).params, [1, 4])
    assert quadratic.optimum(problem).value == 0


@pytest.mark.parametrize(
    ("H", "message"),
    [
        ([[np.nan, 0.0], [0.0, 1.0]], "not finite"),
        ([[1.0, 0.5], [0.0, 1.0]], "not symmetric"),
        ([[1.0, 0.0], [0.0, -0.1]], r"eigenvalue -0.1; allowed"),
    ],
)
def test_impossible_curvatures_are_refused(H, message):
    with pytest.raises(ValueError, match=message):
        quadratic.constants(quadratic.Quadratic(np.array([H]), np.zeros((1, 2))))


def test_non_finite_minimisers_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        quadratic.constants(quadratic.Quadratic(np.ones((1, 1, 1)), np.array([[np.inf]])))


@pytest.mark.parametrize("v", [[1.0, 0.0], [0.3, 0.7], [3e4, 7e4]])  # singular up to rounding, at any scale
def test_an_optimum_that_is_not_unique_is_refused(v):
    with pytest.raises(ValueError, match=r"mu=.*: the mean of the H_i is singular"):
        quadratic.optimum(quadratic.Quadratic(np.outer(v, v)[None], np.zeros((1, 2))))


def test_a_float32_product_is_symmetric_and_semidefinite_enough():
    A = np.random.default_rng(0).standard_normal((4, 5, 30)).astype(np.float32)
    H = np.einsum("nij,nik->njk", A, A) * (1 + 1e-7 * np.random.default_rng(1).standard_normal((4, 30, 30)))
    H[0, 0, 1] += 1e-6  # beside a small entry, rounding of the large ones
    assert quadratic.constants(quadratic.Quadratic(H, np.zeros((4, 30)))).L_max > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0, d=2"),
        ({"d": 0}, "n=2, d=0"),
        ({"mu": 0.0}, r"mu=0.0, L=2.0; allowed: 0 < mu"),
        ({"mu": 3.0}, r"mu=3.0, L=2.0; allowed: 0 < mu"),
        ({"L": np.inf}, r"L=inf; allowed: 0 < mu"),
        ({"heterogeneity": -1.0}, r"heterogeneity=-1.0; allowed: finite and >= 0"),
    ],
)
def test_bad_arguments_of_random_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quadratic.random(0, **{"n": 2, "d": 2, "mu": 1.0, "L": 2.0, **options})


@pytest.mark.parametrize(
    ("L_i", "options", "message"),
    [
        ([1.0, 0.0], {}, "L_i=.*finite positive"),
        ([1.0, np.inf], {}, "L_i=.*finite positive"),
        ([], {}, "L_i=.*finite positive"),
        ([1.0, 7.0], {"L": 5.1}, r"L=5.1; allowed: 0 < L <= L_tilde=5"),
        ([1.0, 7.0], {"L": 0.0}, r"L=0.0; allowed: 0 < L"),
        ([1.0, 7.0], {"L": 2.0, "mu": 2.1}, r"mu=2.1; allowed: 0 <= mu <= L=2"),
        ([1.0, 7.0], {"mu": -1.0}, r"mu=-1.0; allowed: 0 <= mu"),
    ],
)
def test_impossible_constants_are_refused(L_i, options, message):
    with pytest.raises(ValueError, match=message):
        smoothness(np.array(L_i), **options)
