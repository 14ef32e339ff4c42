"""Arithmetic on pytrees against NumPy, and the dtypes it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commjax.core import tree

number = st.floats(-1e3, 1e3, width=32)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)
HALF = {"w": jnp.asarray([1.5, -2.0], jnp.bfloat16), "b": [jnp.asarray(3.0, jnp.float32)]}


@st.composite
def pairs(draw):
    """Two trees of equal structure: a dict with a nested list, leaves of different shapes."""
    sizes = [draw(shapes) for _ in range(2)]
    arrays = [[draw(hnp.arrays(np.float64, size, elements=number)) for size in sizes] for _ in range(2)]
    return tuple({"a": jnp.asarray(one), "b": [jnp.asarray(two)]} for one, two in arrays)


def equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-300)


def by_numpy(function, *trees):
    return jax.tree.map(lambda *leaves: function(*(np.asarray(leaf) for leaf in leaves)), *trees)


@given(pairs(), number)
def test_arithmetic_equals_numpy_leaf_by_leaf(pair, scalar):
    a, b = pair
    equal(tree.add(a, b), by_numpy(lambda x, y: x + y, a, b))
    equal(tree.sub(a, b), by_numpy(lambda x, y: x - y, a, b))
    equal(tree.scale(scalar, a), by_numpy(lambda x: scalar * x, a))
    equal(tree.add_scaled(a, scalar, b), by_numpy(lambda x, y: x + scalar * y, a, b))
    equal(tree.zeros_like(a), by_numpy(np.zeros_like, a))


@given(pairs())
def test_inner_products_and_sizes_equal_numpy_on_the_long_vector(pair):
    a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(one)]) for one in pair)
    np.testing.assert_allclose(tree.vdot(*pair), a @ b, rtol=1e-10, atol=1e-6)
    np.testing.assert_allclose(tree.sq_norm(pair[0]), a @ a, rtol=1e-10)
    assert tree.size(pair[0]) == a.size


@given(pairs(), st.integers(1, 4))
def test_repeat_gives_equal_rows(pair, n):
    rows = tree.repeat(pair[0], n)
    equal(rows, by_numpy(lambda leaf: np.stack([leaf] * n), pair[0]))


@pytest.mark.parametrize("scalar", [0.5, 2, jnp.float32(0.5), jnp.float64(0.5), jnp.bfloat16(0.5)])
def test_every_leaf_keeps_its_dtype_whatever_the_scalar_is(scalar):
    for found in (tree.scale(scalar, HALF), tree.add_scaled(HALF, scalar, HALF), tree.zeros_like(HALF)):
        assert jax.tree.map(lambda leaf: leaf.dtype, found) == {"w": jnp.bfloat16, "b": [jnp.float32]}


def test_add_scaled_has_the_dtypes_of_its_first_tree():
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), HALF)
    found = tree.add_scaled(HALF, 2.0, wide)
    assert found["w"].dtype == jnp.bfloat16 and found["w"].tolist() == [4.5, -6.0]
    assert tree.add_scaled(wide, 2.0, HALF)["w"].dtype == jnp.float64


def test_bits_of_the_leaves_are_kept_by_repeat():
    rows = tree.repeat({"w": jnp.asarray([1.5], jnp.bfloat16), "id": np.int32(3)}, 2)
    assert rows["w"].dtype == jnp.bfloat16 and rows["id"].dtype == jnp.int32 and rows["id"].tolist() == [3, 3]


def test_empty_trees_have_no_size_and_no_norm():
    assert tree.size({}) == 0 and tree.sq_norm({}) == 0.0


def test_trees_of_different_structure_are_refused():
    with pytest.raises(ValueError, match=r"(?i)key|structure|mismatch"):
        tree.add({"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"(?i)key|structure|mismatch"):
        tree.add_scaled({"a": jnp.ones(2)}, 1.0, {"a": jnp.ones(2), "b": jnp.ones(2)})


def test_varying_like_lets_a_constant_be_the_carry_of_a_loop_under_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("i")

    def total(x, cure):
        start = tree.varying_like(jnp.zeros(()), x) if cure else jnp.zeros(())
        return jax.lax.fori_loop(0, 3, lambda _, carry: carry + x[0], start)[None]

    def mapped(cure):
        return jax.shard_map(lambda x: total(x, cure), mesh=mesh, in_specs=spec, out_specs=spec)(jnp.arange(4.0))

    assert mapped(True).tolist() == [0.0, 3.0, 6.0, 9.0]
    with pytest.raises(TypeError, match="carry"):
        mapped(False)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16, jnp.int32])
def test_varying_like_changes_neither_values_nor_dtypes(dtype):
    a = {"x": jnp.asarray([1, -2, 0], dtype)}
    found = tree.varying_like(a, jnp.asarray([jnp.nan, 1.0]), jnp.ones((2, 2), jnp.int32))
    assert found["x"].dtype == dtype and found["x"].tolist() == a["x"].tolist()
