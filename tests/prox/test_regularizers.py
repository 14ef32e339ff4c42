"""Proximal operators against a numerical argmin, their inequalities, dtypes, pytrees and bad input."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax import prox

REGULARIZERS = {
    "zero": (prox.zero(), lambda y: 0 * y),
    "l1": (prox.l1(0.7), lambda y: 0.7 * abs(y)),
    "l2_squared": (prox.l2_squared(3.0), lambda y: 1.5 * y**2),
    "elastic_net": (prox.elastic_net(0.4, 2.0), lambda y: 0.4 * abs(y) + y**2),
    "box": (prox.box(-0.5, 1.25), lambda y: 0.0 if -0.5 <= y <= 1.25 else math.inf),
    "nonnegative": (prox.nonnegative(), lambda y: 0.0 if y >= 0 else math.inf),
}
each = pytest.mark.parametrize("R, by_hand", REGULARIZERS.values(), ids=REGULARIZERS)
numbers = st.floats(-5, 5).map(lambda x: x if abs(x) > 1e-6 else 0.0)
gammas = st.floats(0.01, 20)


def argmin(objective, low, high):
    """Golden section: the objective is strictly convex, and infinite beyond an edge."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(100):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        # Both outside the domain: it is on the side of 0, where every domain here has points.
        if objective(left) == objective(right) == math.inf:
            low, high = (low, right) if left > 0 else (left, high)
        elif objective(left) < objective(right):
            high = right
        else:
            low = left
    return (low + high) / 2


@each
@given(numbers, gammas)
def test_the_prox_minimises_its_objective(R, by_hand, x, gamma):
    y = float(R.prox(gamma, jnp.array([x]))[0])
    minimiser = argmin(lambda z: by_hand(z) + (z - x) ** 2 / (2 * gamma), -6.0, 6.0)
    assert y == pytest.approx(minimiser, abs=1e-6)
    assert by_hand(y) < math.inf


@each
@given(st.lists(numbers, min_size=3, max_size=3))
def test_the_value_is_the_sum_over_coordinates(R, by_hand, x):
    assert R.value(jnp.array(x)) == pytest.approx(sum(by_hand(z) for z in x), rel=1e-12)


@each
@given(st.lists(numbers, min_size=4, max_size=4), gammas)
def test_the_prox_is_firmly_nonexpansive(R, by_hand, points, gamma):
    x, y = np.array(points[:2]), np.array(points[2:])
    p, q = (np.asarray(R.prox(gamma, jnp.asarray(z))) for z in (x, y))
    assert (p - q) @ (p - q) <= (p - q) @ (x - y) + 1e-12


@each
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("gamma", [0.5, jnp.float32(0.5), jnp.float64(0.5)], ids=["python", "f32", "f64"])
def test_dtypes_are_kept_and_the_value_is_finite_at_a_prox(R, by_hand, dtype, gamma):
    x = jnp.array([-2.0, 0.3, 2.0], dtype)
    y = R.prox(gamma, x)
    assert y.dtype == dtype
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    exact = R.prox(0.5, x.astype(jnp.float64))
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=tolerance, atol=tolerance)
    value = R.value(y)
    assert value.dtype == jnp.float64 and value.shape == ()
    np.testing.assert_allclose(value, R.value(exact), rtol=4 * tolerance, atol=tolerance)


def test_a_box_whose_edges_are_not_floats_of_the_dtype_contains_its_projections():
    R = prox.box(-0.1, 0.3)
    for dtype in (jnp.bfloat16, jnp.float32):
        assert R.value(R.prox(1.0, jnp.array([-5.0, 5.0], dtype))) == 0


def test_the_value_is_infinite_outside_the_box_and_zero_on_its_edges():
    R = prox.box(-1.0, 2.0)
    assert R.value(jnp.array([-1.0, 2.0])) == 0
    assert R.value(jnp.array([-1.0, 2.001])) == math.inf == R.value(jnp.array([0.0, -1.001]))
    assert prox.nonnegative().value(jnp.array([0.0, 1e300])) == 0
    assert prox.nonnegative().value(jnp.array([3.0, -1e-9])) == math.inf


@each
def test_pytrees_of_mixed_dtypes_are_taken_leaf_by_leaf(R, by_hand):
    params = {
        "w": jnp.array([[1.0, -2.0], [0.25, 3.0]]),
        "b": (jnp.array([0.5], jnp.float32), jnp.array(-4.0)),
    }
    moved = jax.jit(R.prox)(0.3, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, params)
    for leaf, before in zip(jax.tree.leaves(moved), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf, R.prox(0.3, before), rtol=1e-6)
    total = sum(by_hand(float(z)) for leaf in jax.tree.leaves(moved) for z in leaf.reshape(-1))
    np.testing.assert_allclose(jax.jit(R.value)(moved), total, rtol=1e-6)


def test_l1_and_l2_squared_are_the_ends_of_the_elastic_net():
    x = jnp.array([-2.0, 0.3, 2.0])
    for R, same in (
        (prox.l1(0.5), prox.elastic_net(0.5, 0.0)),
        (prox.l2_squared(3.0), prox.elastic_net(0.0, 3.0)),
    ):
        np.testing.assert_array_equal(R.prox(0.2, x), same.prox(0.2, x))
        assert R.value(x) == same.value(x)
    np.testing.assert_array_equal(prox.elastic_net(0.0, 0.0).prox(0.2, x), x)


BAD = {
    "l1": (lambda: prox.l1(-1.0), r"l1: weight .*got -1\.0"),
    "l1 nan": (lambda: prox.l1(math.nan), "l1: weight .*got nan"),
    "l2_squared": (lambda: prox.l2_squared(-2.0), r"l2_squared: weight .*got -2\.0"),
    "elastic_net l1": (lambda: prox.elastic_net(-1.0, 0.0), r"weight_l1 .*got -1\.0"),
    "elastic_net l2": (lambda: prox.elastic_net(0.0, math.inf), "weight_l2 .*got inf"),
    "box": (lambda: prox.box(1.0, 0.5), r"low must be at most high, got \[1\.0, 0\.5\]"),
    "box nan": (lambda: prox.box(math.nan, 0.5), r"low must be at most high, got \[nan, 0\.5\]"),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_box_may_be_a_point():
    assert prox.box(1.0, 1.0).prox(0.1, jnp.array([-3.0, 4.0])).tolist() == [1.0, 1.0]
