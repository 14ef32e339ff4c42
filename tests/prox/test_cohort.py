"""Who takes part in a round: the draw, the rows, and a federated round with a cohort on one device and on four."""

from collections import Counter
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from commjax.core import rounds
from commjax.core.base import Message, State
from commjax.devices.mesh import AXIS, client_mesh, shard_step
from commjax.prox import cohort
from commjax.sampling import samplings

pytestmark = pytest.mark.slow

N, KEY = 8, jax.random.key(5)
IDS = jnp.arange(N)


@pytest.mark.parametrize("size", range(1, N + 1))
def test_a_cohort_has_exactly_its_size(size):
    for seed in range(5):
        member = rounds.cohort_members(jax.random.key(seed), IDS, N, size)
        assert member.dtype == bool and int(member.sum()) == size


def test_every_cohort_is_as_likely_as_every_other():
    draws = 6000
    keys = jax.random.split(KEY, draws)
    member = np.asarray(jax.vmap(lambda key: rounds.cohort_members(key, jnp.arange(4), 4, 2))(keys))
    counts = Counter(map(tuple, member.tolist()))
    assert len(counts) == 6  # 2 of 4
    chance = 1 / 6
    assert max(abs(count / draws - chance) for count in counts.values()) < 5 * np.sqrt(chance * (1 - chance) / draws)


def test_whether_a_client_takes_part_does_not_depend_on_the_order_of_ids():
    member = np.asarray(rounds.cohort_members(KEY, IDS, N, 3))
    order = np.random.default_rng(0).permutation(N)
    np.testing.assert_array_equal(rounds.cohort_members(KEY, jnp.asarray(order), N, 3), member[order])
    np.testing.assert_array_equal(rounds.cohort_members(KEY, IDS[2:5], N, 3), member[2:5])


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_devices_agree_on_who_takes_part_and_weigh_them_to_a_mean(devices):
    def drawn(ids):
        drawn_cohort = rounds.cohort(KEY, ids, 3, AXIS)
        assert drawn_cohort.at is None
        return drawn_cohort.member, drawn_cohort.weights

    spec = P(AXIS)
    mesh = client_mesh(devices)
    member, weights = jax.shard_map(drawn, mesh=mesh, in_specs=(spec,), out_specs=(spec, spec))(IDS)
    np.testing.assert_array_equal(member, rounds.cohort_members(KEY, IDS, N, 3))
    np.testing.assert_allclose(weights, np.where(member, N / 3, 0), rtol=1e-15)


def test_only_the_rows_of_the_members_are_taken_and_put_back():
    rows = {"id": IDS, "x": jnp.arange(2.0 * N).reshape(N, 2)}
    drawn_cohort = rounds.cohort(KEY, IDS, 3)
    member = np.asarray(rounds.cohort_members(KEY, IDS, N, 3))
    taken = drawn_cohort.take(rows)
    np.testing.assert_array_equal(taken["id"], np.flatnonzero(member))
    np.testing.assert_array_equal(taken["x"], rows["x"][member])
    assert drawn_cohort.weights is None
    put = drawn_cohort.put(rows, jax.tree.map(lambda leaf: -leaf - 1, taken))
    np.testing.assert_array_equal(put["x"], np.where(member[:, None], -rows["x"] - 1, rows["x"]))
    masked = rounds.Members(jnp.asarray(member), None, None).put(rows, jax.tree.map(lambda leaf: -leaf - 1, rows))
    chex.assert_trees_all_equal(masked, put)


@pytest.mark.parametrize("size", [None, N])
def test_a_cohort_of_all_is_no_cohort(size):
    drawn_cohort = rounds.cohort(KEY, IDS, size)
    assert drawn_cohort == rounds.Members(None, None, None)
    rows, new = {"x": IDS}, {"x": -IDS}
    assert drawn_cohort.take(rows) is rows and drawn_cohort.put(rows, new) is new


@pytest.mark.parametrize("size", [-1, 0, N + 1])
def test_a_size_that_cannot_be_is_refused(size):
    with pytest.raises(ValueError, match=f"between 1 and the number of clients, got {size} of {N}"):
        rounds.cohort_members(KEY, IDS, N, size)
    with pytest.raises(ValueError, match=f"got {size} of {N}"):
        rounds.cohort(KEY, IDS, size)
    if size < 1:
        with pytest.raises(ValueError, match=rf"at least 1 client \(or None for all\), got {size}"):
            toy(size)


class Server(NamedTuple):
    round: jax.Array
    params: jax.Array


class Client(NamedTuple):
    id: jax.Array
    visits: jax.Array


def toy(size, over=jax.vmap):
    """x <- x + mean over the cohort of (id + draw); each client counts its visits and sends 8 (id + 1) bits."""

    def init(params, ids):
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids, jnp.zeros(len(ids), jnp.int32)))

    def client_step(round, hparams, server, client, data):
        number = client.id.astype(jnp.float64)
        value = number + jax.random.uniform(round.client_key, ())
        return client._replace(visits=client.visits + 1), Message(value, 8 * (number + 1)), data * server.params

    def server_step(hparams, server, value):
        return Server(server.round + 1, server.params + value)

    return rounds.federated(init, client_step, server_step, lambda server: 64, size, over)


@pytest.mark.parametrize("devices", [None, 1, 4])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_federated_round_is_the_members_mean_and_bits_are_shared_among_all(devices, size):
    algorithm = toy(size)
    step = algorithm.step if devices is None else shard_step(algorithm, client_mesh(devices))
    state, data = algorithm.init(jnp.asarray(2.0), IDS), jnp.arange(8.0) * 10
    x, visits = 2.0, np.zeros(N)
    for t in range(3):
        key = jax.random.fold_in(KEY, t)
        S = np.flatnonzero(rounds.cohort_members(jax.random.fold_in(key, N), IDS, N, size))
        S = np.arange(N) if size == N else S
        values = [i + float(jax.random.uniform(jax.random.fold_in(key, i), ())) for i in S]
        state, metrics = step(KEY, None, state, data)
        np.testing.assert_allclose(metrics.loss, np.mean(10.0 * S) * x, rtol=1e-12)
        np.testing.assert_allclose(metrics.bits_up, 8 * np.sum(S + 1) / N, rtol=1e-12)
        np.testing.assert_allclose(metrics.bits_down, 64 * size / N, rtol=1e-12)
        x += np.mean(values)
        visits[S] += 1
        np.testing.assert_allclose(state.server.params, x, rtol=1e-12)
        np.testing.assert_array_equal(state.clients.visits, visits)


def test_a_cohort_one_after_another_is_the_cohort_at_once():
    data = jnp.arange(8.0)
    together, apart = toy(3), toy(3, rounds.one_by_one)
    found = [one.step(KEY, None, one.init(jnp.asarray(2.0), IDS), data) for one in (together, apart)]
    chex.assert_trees_all_close(*found, rtol=1e-13)


def test_only_the_cohort_works():
    """Off a mesh the program holds the work of the members, not of all."""
    shapes = []

    def over(one):
        def mapped(*rows):
            shapes.append(jax.tree.leaves(rows)[0].shape)
            return jax.vmap(one)(*rows)

        return mapped

    algorithm = toy(3, over)
    jax.eval_shape(algorithm.step, KEY, None, algorithm.init(jnp.asarray(2.0), IDS), jnp.arange(8.0))
    assert shapes == [(3,)]


def test_the_price_of_a_model_is_a_number_of_the_default_dtype():
    params = {"w": jnp.ones((2, 3), jnp.float32), "b": jnp.ones(5, jnp.bfloat16)}
    bits = rounds.bits_of(params)
    assert bits == 6 * 32 + 5 * 16 and bits.dtype == jnp.float64


def test_only_members_of_a_block_are_counted_where_blocks_have_unequal_sizes():
    """block([[0, 1, 2], [3]]) has three slots; a cohort of one client sends one vector."""
    sampling, params = samplings.block([[0, 1, 2], [3]]), jnp.zeros(5, jnp.float32)
    sizes = set()
    for seed in range(8):
        draw = sampling.sample(jax.random.key(seed))
        members = int(draw.mask.sum())
        assert len(draw.ids) == 3 and float(cohort.upload_bits(draw, 4, params)) == members / 4 * 5 * 32
        sizes.add(members)
    assert sizes == {1, 3}


@pytest.mark.parametrize("hub", [None, jnp.array([0, 1, 0])], ids=["flat", "hubs"])
def test_the_oracle_of_the_prox_and_each_client_s_part_are_the_formula(hub):
    """F = sum_i w_i f_i + |x - center|^2 / (2 gamma), and F = sum_i (w_i / w) F_i with F_i = w f_i + the same
    square."""
    rng = np.random.default_rng(3)
    A, center, x = rng.standard_normal((3, 4, 4)), rng.standard_normal(4), rng.standard_normal(4)
    H, w, gamma = A @ A.transpose(0, 2, 1), np.array([0.5, 0.0, 1.2]), 0.7
    drawn = cohort.Cohort(jnp.asarray(H), jnp.asarray(w), hub)
    oracle = cohort.prox_oracle(
        lambda params, H: params @ H @ params / 2, lambda x: x, drawn, jnp.asarray(center), gamma, hubs=2
    )
    away, fits, grads = x - center, np.einsum("j,ijk,k->i", x, H, x) / 2, H @ x
    value, grad = oracle.value_and_grad(jnp.asarray(x))
    np.testing.assert_allclose(value, w @ fits + away @ away / (2 * gamma), rtol=1e-13)
    np.testing.assert_allclose(grad, w @ grads + away / gamma, rtol=1e-13)
    np.testing.assert_allclose(oracle.hessian(jnp.asarray(x)), np.tensordot(w, H, 1) + np.eye(4) / gamma, rtol=1e-13)
    values, rows = oracle.local.value_and_grad(jnp.tile(jnp.asarray(x), (3, 1)))
    np.testing.assert_allclose(values, w.sum() * fits + away @ away / (2 * gamma), rtol=1e-13)
    np.testing.assert_allclose(rows, w.sum() * grads + away / gamma, rtol=1e-13)
    hessians = oracle.local.hessian(jnp.tile(jnp.asarray(x), (3, 1)))
    np.testing.assert_allclose(hessians, w.sum() * H + np.eye(4) / gamma, rtol=1e-13)
    np.testing.assert_allclose(oracle.local.weights, w / w.sum(), rtol=1e-15)
