"""The private mechanism: clipping, sensitivity, Poisson sampling, noise, and losses that are not per example."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.core import random_words
from commjax.data.stacked import Examples
from commjax.privacy import mechanism
from commjax.theory import ldp_fedp3 as theory

pytestmark = pytest.mark.long

KEY = jax.random.key(0)


# --- clipping and sensitivity


@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_every_row_is_clipped_exactly_and_by_itself(seed, C):
    rng = np.random.default_rng(seed)
    grads = {
        "w": rng.standard_normal((5, 2, 3)) * 10.0 ** rng.uniform(-2, 2, (5, 1, 1)),
        "b": rng.standard_normal((5, 4)),
    }
    grads["w"][0], grads["b"][0] = 0.0, 0.0
    rows = rng.uniform(size=5) < 0.7
    found, squared = mechanism.clipped_sum(jax.tree.map(jnp.asarray, grads), C, jnp.asarray(rows))
    flat = np.concatenate([grads["b"].reshape(5, -1), grads["w"].reshape(5, -1)], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    np.testing.assert_allclose(squared, norms**2, rtol=1e-12)
    wanted = sum(
        (row * min(1.0, C / norm) if norm else row for row, norm, here in zip(flat, norms, rows) if here), np.zeros(10)
    )
    np.testing.assert_allclose(np.concatenate([found["b"].ravel(), found["w"].ravel()]), wanted, rtol=1e-11, atol=1e-12)
    alone, _ = mechanism.clipped_sum(jax.tree.map(jnp.asarray, grads), C, jnp.arange(5) == 3)
    length = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(alone))))
    assert length == pytest.approx(min(C, norms[3]))


def test_an_infinite_norm_means_no_clipping():
    grads = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    found, _ = mechanism.clipped_sum(grads, math.inf, jnp.ones(2, bool))
    np.testing.assert_array_equal(found, [3.0, 4.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_row_whose_gradient_overflows_does_not_show(bad):
    """A NaN in the sum would tell that the row was there."""
    grads = jnp.asarray([[0.3, 0.4], [bad, 1.0]])
    found, _ = mechanism.clipped_sum(grads, 1.0, jnp.ones(2, bool))
    np.testing.assert_allclose(found, [0.3, 0.4])


def test_half_precision_is_clipped_in_single():
    rng = np.random.default_rng(1)
    grads = jnp.asarray(rng.standard_normal((50, 400)), jnp.bfloat16)
    found, _ = jax.vmap(lambda row: mechanism.clipped_sum(row[None], 1.0, jnp.ones(1, bool)))(grads)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_one_row_moves_the_mean_by_the_sensitivity_and_not_more(relation):
    """Every data set of three rows over a grid, every neighbour, every batch: sums are divided by a fixed b (F17,
    F18)."""
    C, b = 1.5, 2.0
    values = np.array([-4.0, -1.5, 0.5, 3.0])
    sums = {}
    for rows in itertools.product(values, repeat=3):
        for here in itertools.product((False, True), repeat=3):
            sums[rows, here] = (rows, here)
    total = jax.jit(jax.vmap(lambda rows, here: mechanism.clipped_sum(rows[:, None], C, here)[0][0] / b))
    found = total(*(jnp.asarray([one[part] for one in sums.values()]) for part in (0, 1)))
    sums = dict(zip(sums, found.tolist()))
    moves = []
    for (rows, here), value in sums.items():
        if relation == "replace-one":
            moves += [abs(value - sums[(new, *rows[1:]), here]) for new in values]
        elif here[0]:
            moves.append(abs(value - sums[rows, (False, *here[1:])]))
    assert max(moves) == pytest.approx(theory.sensitivity(C, b, relation))


def test_the_fixed_denominator_is_what_keeps_the_sensitivity():
    """Divided by the number of rows that came, the mean of one row moves by C, not by C / b."""
    alone = mechanism.clipped_sum(jnp.asarray([[5.0], [0.0]]), 1.0, jnp.asarray([True, False]))[0] / 1
    gone = mechanism.clipped_sum(jnp.asarray([[5.0], [0.0]]), 1.0, jnp.asarray([False, False]))[0] / 1
    assert float((alone - gone)[0]) == 1.0 > theory.sensitivity(1.0, 10, "add-remove")


# --- sampling and noise


def test_rows_come_independently_with_the_chance_that_was_asked_for():
    rate, m, trials = 0.3, 4, 20_000
    rows = jnp.asarray([True, True, False, True])
    came = np.asarray(jax.vmap(lambda key: mechanism.poisson(key, rate, rows))(jax.random.split(KEY, trials)))
    assert came.shape == (trials, m) and not came[:, 2].any()
    real = came[:, [0, 1, 3]]
    law = {
        pattern: rate ** sum(pattern) * (1 - rate) ** (3 - sum(pattern))
        for pattern in itertools.product((0, 1), repeat=3)
    }
    for pattern, chance in law.items():
        seen = np.mean(np.all(real == pattern, axis=1))
        assert abs(seen - chance) < 4.5 * math.sqrt(chance * (1 - chance) / trials)
    assert mechanism.poisson(KEY, 1.0, rows).tolist() == rows.tolist()
    assert not mechanism.poisson(KEY, 0.0, rows).any()


@pytest.mark.parametrize("rate", [2e-7, 1e-4, 0.1, 0.3, 0.5, 0.7, 0.999999])
def test_no_row_comes_more_often_than_the_certificate_says(rate, monkeypatch):
    """The 2^32 equally likely words around the limit, one after another."""
    words = np.maximum(0, int(rate * 2**32) + np.arange(-3000, 20))
    monkeypatch.setattr(random_words, "bits", lambda key, shape, dtype: jnp.asarray(words, dtype))
    came = np.asarray(mechanism.poisson(KEY, rate, jnp.ones(len(words), bool)))
    below = words[came].max() + 1  # so many of the words bring the row
    assert not came[words >= below].any() and below / 2**32 <= rate
    assert below / 2**32 >= rate * (1 - 2**-20) - 2**-32


def test_the_sum_is_made_in_full_precision():
    """Where matrix products are truncated (TPU, TF32), clipped gradients would be longer than C."""
    jaxpr = jax.make_jaxpr(lambda grads: mechanism.clipped_sum(grads, 1.0, jnp.ones(3, bool)))(jnp.ones((3, 2)))
    products = [line for line in str(jaxpr).splitlines() if "dot_general" in line or "precision" in line]
    assert products and any("HIGHEST" in line for line in products)


def test_the_noise_is_standard_in_every_leaf_and_leaves_of_one_shape_and_dtype_are_independent():
    like = {
        "a": jnp.zeros((100, 50)),
        "b": jnp.zeros((100, 50)),
        "c": [jnp.zeros((100, 50)), jnp.zeros(5000, jnp.float32)],
    }
    noise = mechanism.gaussian_like(KEY, like)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), noise) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), like
    )
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(noise)]
    for leaf in leaves:
        assert abs(leaf.mean()) < 0.06 and abs(leaf.std() - 1) < 0.04
    assert np.abs(np.corrcoef(leaves) - np.eye(4)).max() < 0.06
    assert len(np.unique(leaves[:3])) == 15_000


def test_no_leaf_has_the_noise_of_a_key_that_others_split_off():
    noise = mechanism.gaussian_like(KEY, [jnp.zeros(3)] * 3)
    taken = [jax.random.normal(key, (3,)) for key in jax.random.split(KEY)]
    assert not any(np.array_equal(mine, other) for mine in noise for other in taken)


# --- the loss of a row


def good(params, rows):
    return jnp.mean((rows["a"] @ params) ** 2)


def test_a_single_row_has_its_axis_and_weight_1():
    data = Examples(jnp.arange(6.0).reshape(3, 2), jnp.arange(3), jnp.array([0.5, 0.5, 0.0]))
    one = mechanism.single(data, jnp.asarray(1))
    np.testing.assert_array_equal(one.inputs, [[2.0, 3.0]])
    assert one.targets.tolist() == [1] and one.weights.tolist() == [1.0]
    assert mechanism.present(data).tolist() == [True, True, False]
    plain = mechanism.single({"a": jnp.arange(3.0)}, jnp.asarray(2))
    assert plain["a"].tolist() == [2.0] and mechanism.present({"a": jnp.arange(3.0)}).all()


def test_means_over_rows_are_accepted_with_and_without_padding():
    rng = np.random.default_rng(2)
    a, w = jnp.asarray(rng.standard_normal((4, 3))), jnp.asarray(rng.standard_normal(3))
    mechanism.check_per_example(good, w, {"a": a})

    def weighted(params, rows):
        return jnp.sum(rows["weights"] * (rows["a"] @ params) ** 2) + 0.1 * jnp.sum(params**2)

    mechanism.check_per_example(weighted, w, {"a": a, "weights": jnp.array([1 / 3, 1 / 3, 1 / 3, 0.0])})
    with pytest.raises(ValueError, match="loss is not a mean over rows"):
        mechanism.check_per_example(weighted, w, {"a": a, "weights": jnp.array([0.7, 0.1, 0.1, 0.1])})


def test_losses_that_are_not_per_example_are_refused():
    rng = np.random.default_rng(3)
    data, w = {"a": jnp.asarray(rng.standard_normal((4, 3)))}, jnp.asarray(rng.standard_normal(3))
    with pytest.raises(ValueError, match=r"loss returns an array of shape \(4,\); allowed: one number"):
        mechanism.check_per_example(lambda p, rows: (rows["a"] @ p) ** 2, w, data)

    def normalised(p, rows):  # as batch normalisation does
        centred = rows["a"] - jnp.mean(rows["a"], axis=0, keepdims=True)
        return jnp.mean((centred @ p) ** 2)

    def total(p, rows):
        return jnp.sum((rows["a"] @ p) ** 2)

    def contrastive(p, rows):
        scores = rows["a"] @ p
        return jnp.mean(jnp.abs(scores[:, None] - scores[None, :]))

    for loss in (normalised, total, contrastive):
        with pytest.raises(ValueError, match="loss is not a mean over rows: it or its gradient differs by"):
            mechanism.check_per_example(loss, w, data)
    # At w = 0 the values agree (all 0); the gradients must be looked at
    with pytest.raises(ValueError, match="loss is not a mean over rows"):
        mechanism.check_per_example(lambda p, rows: jnp.sum(rows["a"] @ p), 0 * w, data)


def test_a_loss_is_looked_at_where_rows_can_meet():
    """Not only in the initial params, and not in a client whose single row has nobody to meet."""
    rng = np.random.default_rng(3)
    a = jnp.asarray(rng.standard_normal((4, 3)))

    def hidden(p, rows):  # the mean of rows at p = 0, to first order
        return jnp.mean(rows["a"] @ p) + jnp.var(rows["a"] @ p)

    with pytest.raises(ValueError, match="loss is not a mean over rows"):
        mechanism.check_per_example(hidden, jnp.zeros(3), {"a": a})
    counts = jnp.array([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]])
    found = mechanism.largest({"a": jnp.stack([a, 2 * a, 3 * a]), "weights": counts})
    np.testing.assert_array_equal(found["a"], 2 * a)


def test_data_that_has_no_rows_is_refused():
    for data in ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(3)}, {"a": jnp.zeros(())}, {"a": jnp.zeros((0, 2))}):
        with pytest.raises(ValueError, match=r"every leaf of a client's data must be \[rows, \.\.\.\], got shapes"):
            mechanism.num_rows(data)
