"""Logistic losses against NumPy, constants against the thesis's table, the optimum against its definition."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.data import embedded, libsvm, partition, stacked
from commjax.problems import logistic

pytestmark = pytest.mark.long

requires_data = pytest.mark.skipif("COMMJAX_DATA" not in os.environ, reason="COMMJAX_DATA names no data folder")
TABLE = json.loads(Path(__file__).parents[1].joinpath("data", "goldens_ef_bv.json").read_text())["efbv_table"]
load = functools.cache(libsvm.load)


def toy(num_rows=13, d=4, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.where(np.arange(num_rows) % 3 == 0, -1.0, 1.0)
    return libsvm.Dataset(scale * rng.standard_normal((num_rows, d)), labels, "toy")


ROWS = partition.blocks(13, 3, remainder="last", overlap=2)  # unequal clients that share rows
SINGLE = partition.blocks(13, 3, seed=1, remainder="last")


def oracle(x, dataset, ids):
    """Loss and gradient of the fit, by the formula."""
    A, b = dataset.features[ids], dataset.labels[ids]
    margin = b * (A @ x)
    grad = -(A * (b / (1 + np.exp(margin)))[:, None]).mean(axis=0)
    return np.log1p(np.exp(-margin)).mean(), grad


REGULARISERS = {
    logistic.loss: (lambda x, w: w / 2 * x @ x, lambda x, w: w * x),
    logistic.nonconvex_loss: (
        lambda x, w: w * np.sum(x**2 / (1 + x**2)),
        lambda x, w: 2 * w * x / (1 + x**2) ** 2,
    ),
}


@pytest.mark.parametrize("loss", REGULARISERS)
def test_loss_and_gradient_equal_the_numpy_formula_on_every_client(loss):
    dataset = toy()
    x = np.random.default_rng(1).standard_normal(4)
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, ROWS))
    both = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0, None)))
    values, grads = both(jnp.asarray(x), data, 0.3)
    value, grad = REGULARISERS[loss]
    for i, ids in enumerate(ROWS):
        fit, fit_grad = oracle(x, dataset, ids)
        np.testing.assert_allclose(values[i], fit + value(x, 0.3), rtol=1e-12)
        np.testing.assert_allclose(grads[i], fit_grad + grad(x, 0.3), rtol=1e-11)


@pytest.mark.parametrize("loss", REGULARISERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("weight", [0.1, 0, np.float64(0.1)])
def test_the_dtype_of_params_and_data_is_kept(loss, dtype, weight):
    data = jax.tree.map(lambda a: jnp.asarray(a[0], dtype), stacked.stack(toy(), ROWS))
    value, grad = jax.value_and_grad(loss)(jnp.ones(4, dtype), data, weight)
    assert value.dtype == grad.dtype == dtype


@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_huge_margins_neither_overflow_nor_lose_the_gradient(margin):
    data = stacked.ClientData(jnp.full((1, 1), margin), jnp.ones(1), jnp.ones(1))
    value, grad = jax.value_and_grad(logistic.loss)(jnp.ones(1), data, 0.0)
    np.testing.assert_allclose(value, max(-margin, 0))
    np.testing.assert_allclose(grad, [max(-margin, 0)], atol=1e-300)


def hessian_at_zero(loss, dataset, rows, weight):
    """Where the logistic curvature is largest; both regularisers have theirs there too."""
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, rows))
    d = dataset.features.shape[1]
    return np.asarray(jax.vmap(jax.hessian(loss), (None, 0, None))(jnp.zeros(d), data, weight))


@pytest.mark.parametrize(("rows", "d"), [(ROWS, 4), (SINGLE, 9)])  # more rows than columns, and fewer
def test_constants_are_the_largest_curvatures_of_the_clients_and_of_their_mean(rows, d):
    dataset = toy(d=d)
    for loss, found in [
        (logistic.loss, logistic.constants(dataset, rows, 0.3)),
        (logistic.nonconvex_loss, logistic.nonconvex_constants(dataset, rows, 0.3)),
    ]:
        H = hessian_at_zero(loss, dataset, rows, 0.3)
        L_i = np.linalg.eigvalsh(H)[:, -1]
        np.testing.assert_allclose(found.L_i, L_i, rtol=1e-10)
        np.testing.assert_allclose(found.L, np.linalg.eigvalsh(H.mean(axis=0))[-1], rtol=1e-10)
        np.testing.assert_allclose(found.L_tilde, np.sqrt(np.mean(L_i**2)), rtol=1e-10)
        np.testing.assert_allclose(found.L_max, max(L_i), rtol=1e-10)
        assert found.mu == (0.3 if loss is logistic.loss else 0)


def test_the_trace_bound_is_the_printed_formula_and_never_below_the_exact_constant():
    dataset = toy()
    bound = logistic.trace_bound(dataset, ROWS, 0.3)
    expected = [0.3 + sum(a @ a for a in dataset.features[ids]) / (4 * len(ids)) for ids in ROWS]
    np.testing.assert_allclose(bound.L_i, expected, rtol=1e-12)
    assert bound.L_tilde == bound.L and bound.mu == 0.3
    assert (bound.L_i >= logistic.constants(dataset, ROWS, 0.3).L_i).all()


def test_the_tab10_preset_doubles_mu_and_pools_the_rows():
    dataset = toy()
    preset, exact = logistic.reproduce_tab10(dataset, ROWS, 0.3), logistic.constants(dataset, ROWS, 0.3)
    np.testing.assert_allclose(preset.L_i, exact.L_i + 0.3, rtol=1e-12)
    pooled = np.linalg.eigvalsh(dataset.features.T @ dataset.features)[-1] / (4 * 13) + 0.6
    np.testing.assert_allclose(preset.L, pooled, rtol=1e-12)
    assert preset.mu == 0.3 and logistic.reproduce_tab10(dataset, ROWS).mu == 0.1


@functools.cache
def both_readings(name, n, xi, drop):
    """The thesis's clients; the goldens of xi = 2 (not of xi = 1) leave out the rows beyond n * (N // n)."""
    dataset = load(name)
    num_rows = len(dataset.labels)
    rows = partition.blocks(n * (num_rows // n) if drop else num_rows, n, remainder="last", overlap=xi)
    return logistic.reproduce_tab10(dataset, rows), logistic.constants(dataset, rows, 0.1)


@requires_data
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['dataset']}-k{row['k']}-xi{row['xi']}")
def test_both_readings_of_the_thesis_table_are_reproduced(row):
    printed, correct = both_readings(row["dataset"], row["n"], row["xi"], drop=row["xi"] == 2)
    golden, golden_correct = row["gamma_reproducing_table"], row["gamma_correct_reading"]
    np.testing.assert_allclose(printed.L, golden["L"], rtol=1e-9)
    np.testing.assert_allclose(printed.L_tilde, golden["Lt"], rtol=1e-9)
    np.testing.assert_allclose(correct.L_tilde, golden_correct["Lt"], rtol=1e-9)
    # The golden L of this reading is over the pooled rows; that of `constants` is of the mean over clients.
    np.testing.assert_allclose(printed.L - 0.1, golden_correct["L"], rtol=1e-9)
    assert correct.L_tilde >= correct.L


@requires_data
@pytest.mark.parametrize("name", ["mushrooms", "phishing"])
def test_dropping_the_remainder_changes_l_tilde_by_less_than_the_printed_digits(name):
    kept, dropped = (both_readings(name, 1000, 2, drop=drop)[0].L_tilde for drop in (False, True))
    assert kept != dropped
    np.testing.assert_allclose(kept, dropped, rtol=1e-3)


@requires_data
@pytest.mark.parametrize(
    ("name", "trace", "exact"),
    [("mushrooms", 5.25, 2.586), ("phishing", 0.25, 0.1626), ("a9a", 3.467, 1.572), ("w8a", 2.913, 0.661)],
)
def test_trace_and_eigenvalue_of_the_whole_data_are_those_of_erratum_e3(name, trace, exact):
    dataset = load(name)
    rows = partition.blocks(len(dataset.labels), 1)
    np.testing.assert_allclose(logistic.trace_bound(dataset, rows, 0.0).L, trace, rtol=1e-3)
    np.testing.assert_allclose(logistic.constants(dataset, rows, 0.0).L, exact, rtol=1e-3)


def check_optimum(dataset, rows, mu):
    best = logistic.optimum(dataset, rows, mu)
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, rows))
    f = jax.value_and_grad(lambda x: jnp.mean(jax.vmap(logistic.loss, (None, 0, None))(x, data, mu)))
    value, grad = f(jnp.asarray(best.params))
    assert best.gradient_norm <= 1e-12
    assert np.linalg.norm(grad) <= 5e-12
    np.testing.assert_allclose(best.value, value, rtol=1e-12)
    return best


@pytest.mark.parametrize("mu", [1e-3, 0.1])
@pytest.mark.parametrize("rows", [ROWS, SINGLE])
def test_the_optimum_is_stationary_for_the_mean_over_clients(rows, mu):
    check_optimum(toy(), rows, mu)


def test_the_optimum_is_reached_where_undamped_newton_cycles_forever():
    labels = np.array([-1.0, 1.0, 1.0])
    hard = libsvm.Dataset(np.array([[17.0, 11.0], [37.0, 116.0], [0.1, 0.65]]), labels, "hard")
    check_optimum(hard, [np.arange(3)], 1e-3)
    check_optimum(toy(num_rows=60, d=8, scale=30.0), partition.blocks(60, 4), 1e-4)


def test_the_optimum_of_breast_cancer_is_reached_from_every_partition():
    dataset = embedded.breast_cancer()
    for rows in (partition.blocks(569, 10), partition.blocks(569, 10, seed=3, remainder="last", overlap=2)):
        check_optimum(dataset, rows, 1e-3)


@requires_data
@pytest.mark.parametrize("name", ["mushrooms", "phishing", "a1a"])
def test_the_optimum_of_real_data_is_reached(name):
    dataset = load(name)
    check_optimum(dataset, partition.blocks(len(dataset.labels), 100), 0.1)


def test_rows_no_client_holds_do_not_count():
    dataset = toy()
    some = [np.arange(0, 4), np.arange(4, 9)]
    alone = libsvm.Dataset(dataset.features[:9], dataset.labels[:9], "nine")
    a, b = (logistic.optimum(x, some, 0.1) for x in (dataset, alone))
    np.testing.assert_allclose(a.params, b.params, rtol=1e-12)
    a, b = (logistic.constants(x, some, 0.1) for x in (dataset, alone))
    np.testing.assert_allclose(a.L, b.L, rtol=1e-12)


def test_a_tolerance_that_is_not_reached_is_an_error():
    with pytest.raises(RuntimeError, match=r"after 1 Newton steps; asked for tol=1e-12"):
        logistic.optimum(toy(), ROWS, 0.1, max_iterations=1)


@pytest.mark.parametrize("mu", [-0.1, np.nan, np.inf])
@pytest.mark.parametrize("function", ["constants", "nonconvex_constants", "reproduce_tab10", "trace_bound", "optimum"])
def test_a_bad_regulariser_weight_is_refused(function, mu):
    with pytest.raises(ValueError, match=rf"(mu|lam)={mu}; allowed: finite and >=? 0"):
        getattr(logistic, function)(toy(), ROWS, mu)


def test_an_optimum_without_strong_convexity_is_refused():
    with pytest.raises(ValueError, match=r"mu=0.0; allowed: finite and > 0"):
        logistic.optimum(toy(), ROWS, 0.0)


@pytest.mark.parametrize("function", ["constants", "nonconvex_constants", "reproduce_tab10", "trace_bound", "optimum"])
def test_non_finite_data_is_refused(function):
    dataset = toy()
    dataset.features[5, 2] = np.nan
    with pytest.raises(ValueError, match="toy: row 5 has a non-finite feature"):
        getattr(logistic, function)(dataset, ROWS, 0.1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_softplus_is_exact_to_rounding_everywhere(dtype):
    z = np.concatenate([np.linspace(-40, 40, 1601), [-700.0, -87.0, -1e-8, 0.0, 1e-8, 700.0, 1e30]]).astype(dtype)
    exact = np.logaddexp(0, z.astype(np.float64))
    found = logistic.softplus(jnp.asarray(z))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, exact, rtol=8 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).tiny)
    slope, bend = (jax.vmap(f)(jnp.asarray(z)) for f in (jax.grad(logistic.softplus), jax.hessian(logistic.softplus)))
    p = np.exp(-np.logaddexp(0, -z.astype(np.float64)))
    np.testing.assert_allclose(slope, p, rtol=64 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).tiny)
    np.testing.assert_allclose(bend, p * np.exp(-exact), rtol=1e-4, atol=np.finfo(dtype).eps)
    ends = np.asarray(logistic.softplus(jnp.asarray([-np.inf, np.inf, np.nan], dtype)))
    assert ends[0] == 0 and ends[1] == np.inf and np.isnan(ends[2])
