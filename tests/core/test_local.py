"""What a client does by itself: rows that are drawn fairly, steps that are those of NumPy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core import local

KEY = jax.random.key(1)


class Table(NamedTuple):
    inputs: jax.Array
    weights: jax.Array


def table(kind, rows, weights):
    rows, weights = jnp.asarray(rows), jnp.asarray(weights)
    return Table(rows, weights) if kind is tuple else {"inputs": rows, "weights": weights}


def parts(batch):
    return (batch.inputs, batch.weights) if isinstance(batch, Table) else (batch["inputs"], batch["weights"])


def test_all_rows_are_all_rows():
    data = {"a": jnp.arange(3)}
    assert local.all_rows(KEY, data) is data


@pytest.mark.parametrize("size", [1, 4, 9])
def test_without_weights_rows_are_drawn_uniformly_and_leaves_stay_together(size):
    data = {"a": jnp.arange(5.0), "b": 10 * jnp.arange(5.0)[:, None]}
    keys = jax.random.split(KEY, 3000)
    batch = jax.vmap(lambda key: local.minibatch(size)(key, data))(keys)
    assert batch["a"].shape == (3000, size) and batch["b"].shape == (3000, size, 1)
    np.testing.assert_array_equal(batch["b"][..., 0], 10 * batch["a"])
    counts = np.bincount(np.asarray(batch["a"]).astype(int).ravel(), minlength=5)
    draws = 3000 * size
    assert np.abs(counts / draws - 0.2).max() < 5 * np.sqrt(0.16 / draws)


@pytest.mark.parametrize("kind", [tuple, dict])
@pytest.mark.parametrize("weights", [[0.25] * 4 + [0.0] * 2, [0.1, 0.2, 0.3, 0.4, 0.0, 0.0]], ids=["equal", "unequal"])
def test_with_weights_padding_is_never_drawn_and_the_sum_is_unbiased(kind, weights):
    rows = [1.0, -2.0, 5.0, 3.0, 1e9, jnp.nan]
    data = table(kind, rows, weights)
    exact = np.dot(rows[:4], weights[:4])
    inputs, priced = parts(jax.vmap(lambda key: local.minibatch(3)(key, data))(jax.random.split(KEY, 6000)))
    assert set(np.asarray(inputs).ravel().tolist()) == set(rows[:4])
    sums = np.asarray(jnp.sum(inputs * priced, axis=1))
    assert abs(sums.mean() - exact) < 5 * sums.std() / np.sqrt(6000)
    one, price = parts(local.minibatch(1)(KEY, data))
    at = rows.index(float(one[0]))
    assert price[0] == pytest.approx(4 * weights[at])  # over the four rows that count: exactly unbiased


def test_equal_weights_become_1_over_the_size_of_the_batch():
    _, weights = parts(local.minibatch(5)(KEY, table(dict, np.ones(7), [0.25] * 4 + [0.0] * 3)))
    np.testing.assert_allclose(weights, 1 / 5, rtol=1e-15)
    _, whole = parts(local.minibatch(5)(KEY, table(tuple, np.ones(4), np.full(4, 0.25))))
    np.testing.assert_allclose(whole, 1 / 5, rtol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_kept(dtype):
    data = {"inputs": jnp.arange(4, dtype=jnp.uint8), "weights": jnp.full(4, 0.25, dtype)}
    batch = local.minibatch(3)(KEY, data)
    assert batch["inputs"].dtype == jnp.uint8 and batch["weights"].dtype == dtype


def test_the_draw_depends_on_the_key_only():
    data = jnp.arange(100)
    first, again, other = (local.minibatch(10)(key, data) for key in (KEY, KEY, jax.random.key(2)))
    assert first.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize("size", [0, -3])
def test_an_empty_batch_is_refused(size):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        local.minibatch(size)


@pytest.mark.parametrize(
    "data",
    [
        {"a": jnp.ones(3), "b": jnp.ones(4)},
        {"a": jnp.ones(3), "b": jnp.ones(())},
        jnp.ones((0, 2)),
        jnp.ones(()),
        {},
    ],
    ids=["lengths differ", "a number among rows", "no rows", "a number", "nothing"],
)
def test_data_that_has_no_rows_in_common_is_refused(data):
    with pytest.raises(ValueError, match=r"every leaf of a client's data must be \[rows, \.\.\.\], got shapes"):
        local.minibatch(2)(KEY, data)


def loss(x, rows):
    return jnp.mean(jnp.sum((x[None] - rows) ** 2, axis=1)) / 2


ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((6, 3)))


def test_steps_are_those_of_numpy_and_the_loss_is_the_first():
    train = local.sgd(jax.value_and_grad(loss), local.minibatch(2), 4)
    found, first = train(KEY, 0.3, jnp.ones(3), ROWS)
    x, losses = np.ones(3), []
    for t in range(4):
        batch = np.asarray(local.minibatch(2)(jax.random.fold_in(KEY, t), ROWS))
        losses.append(np.mean(np.sum((x - batch) ** 2, axis=1)) / 2)
        x = x - 0.3 * (x - batch.mean(0))
    np.testing.assert_allclose(found, x, rtol=1e-13)
    np.testing.assert_allclose(first, losses[0], rtol=1e-13)
    assert len(set(losses)) == 4


def test_a_correction_is_added_to_the_gradient_at_the_present_model():
    train = local.sgd(jax.value_and_grad(loss), local.all_rows, 3)
    found, _ = train(KEY, 0.3, jnp.ones(3), ROWS, lambda x: 2 * x + 1)
    x = np.ones(3)
    for _ in range(3):
        x = x - 0.3 * (x - np.asarray(ROWS).mean(0) + 2 * x + 1)
    np.testing.assert_allclose(found, x, rtol=1e-13)


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_refused(steps):
    with pytest.raises(ValueError, match=f"steps must be at least 1, got {steps}"):
        local.sgd(jax.value_and_grad(loss), local.all_rows, steps)
