"""EF-BV as an Optax transformation is EF-BV, on one device and on many; it composes, resumes and refuses bad input."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.experimental import aggregating

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import checkpoint, rounds
from commjax.core.base import State
from commjax.devices.mesh import AXIS, client_mesh
from commjax.integrations import optax as cj_optax
from commjax.problems import quadratic
from tests.registry import COMPRESSORS, PROBLEM, VALUE_AND_GRAD, D, N, start

pytestmark = pytest.mark.long

KEY = jax.random.key(5)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
ROUNDS = 3
NAMED = {
    "ef-bv": ("comp", ef_bv.theoretical),
    "ef21": ("top-k", ef_bv.ef21_hparams),
    "diana": ("rand-k", ef_bv.diana_hparams),
    "m-nice": ("m-nice", ef_bv.theoretical),
}
ALL = pytest.mark.parametrize("method", NAMED)


@cache
def setting(method):
    compressor, tuned = NAMED[method]
    hparams = tuned(COMPRESSORS[compressor].constants(D, N), quadratic.constants(PROBLEM))
    return COMPRESSORS[compressor], hparams


@cache
def wanted(method):
    """The states and bits of `algorithms.ef_bv`, operation by operation: a compiler may fuse a product and a sum."""
    compressor, hparams = setting(method)
    algorithm = ef_bv.ef_bv(VALUE_AND_GRAD, compressor)
    state, seen = algorithm.init(start(jnp.float64), jnp.arange(N)), []
    step = algorithm.step
    for _ in range(ROUNDS):
        state, metrics = step(KEY, hparams, state, DATA)
        seen.append((state, metrics.bits_up))
    return seen


def same(found, wanted, exactly=False):
    params, (server, rows) = found
    state, bits = wanted
    pairs = [(params, state.server.params), (server.shift, state.server.shift), (rows.shift, state.clients.shift)]
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0 if exactly else 1e-12, atol=0 if exactly else 1e-14)
    assert server.round == state.server.round and server.bits == bits > 0
    np.testing.assert_array_equal(rows.id, np.arange(N))


def transformation(method, make, **how):
    compressor, hparams = setting(method)
    return optax.chain(make(compressor, N, KEY, lam=hparams.lam, nu=hparams.nu, **how), optax.sgd(hparams.gamma))


def per_client_step(tx, compiled=jax.jit):
    def step(params, state, data):
        grads = jax.vmap(VALUE_AND_GRAD, (None, 0))(params, data)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return compiled(step)


def device_step(tx, axis_name=cj_optax.AXIS, squeeze=False):
    """A data-parallel loop's step as it runs on one device."""

    def step(params, state, data):
        own = rounds.broadcast(params, axis_name)
        grad = VALUE_AND_GRAD(own, jax.tree.map(lambda leaf: leaf[0], data) if squeeze else data)[1]
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    return step


@ALL
def test_with_sgd_behind_it_the_aggregator_is_ef_bv_bit_for_bit(method):
    tx = transformation(method, cj_optax.ef_bv)
    params = start(jnp.float64)
    state, step = tx.init(params), per_client_step(tx, compiled=lambda step: step)
    for one in wanted(method):
        params, state = step(params, state, DATA)
        same((params, state[0]), one, exactly=True)


@ALL
@pytest.mark.parametrize("devices", [2, 8])
def test_sharded_jit_does_not_change_the_trajectory(method, devices):
    tx, mesh = transformation(method, cj_optax.ef_bv), client_mesh(devices)
    params = jax.device_put(start(jnp.float64), NamedSharding(mesh, P()))
    state = tx.init(params)
    state = jax.device_put(state, cj_optax.shardings(state, mesh))
    data = jax.device_put(DATA, NamedSharding(mesh, P(AXIS)))
    step = per_client_step(tx)
    for one in wanted(method):
        params, state = step(params, state, data)
        assert len(state[0].clients.shift.devices()) == devices
        same(jax.device_get((params, state[0])), one)


@ALL
def test_shard_map_with_one_client_a_device_does_not_change_the_trajectory(method):
    tx, mesh = transformation(method, cj_optax.ef_bv_mean), client_mesh(N)
    params = start(jnp.float64)
    state = tx.init(params)
    specs = cj_optax.specs(state)
    step = jax.jit(
        jax.shard_map(
            device_step(tx, squeeze=True), mesh=mesh, in_specs=(P(), specs, P(cj_optax.AXIS)), out_specs=(P(), specs)
        )
    )
    for one in wanted(method):
        params, state = step(params, state, DATA)
        same(jax.device_get((params, state[0])), one)


@ALL
def test_pmap_with_one_client_a_device_does_not_change_the_trajectory(method):
    tx = transformation(method, cj_optax.ef_bv_mean)
    params = start(jnp.float64)
    state = tx.init(params)
    axes = cj_optax.axes(state)
    step = jax.pmap(device_step(tx), axis_name=cj_optax.AXIS, in_axes=(None, axes, 0), out_axes=(None, axes))
    for one in wanted(method):
        params, state = step(params, state, DATA)
        same(jax.device_get((params, state[0])), one)


def test_several_clients_a_device_under_shard_map_do_not_change_the_trajectory():
    tx, mesh = transformation("m-nice", cj_optax.ef_bv, axis_name=cj_optax.AXIS), client_mesh(4)
    params = start(jnp.float64)
    state = tx.init(params)
    specs = cj_optax.specs(state)

    def step(params, state, data):
        own = rounds.broadcast(params, cj_optax.AXIS)
        grads = jax.vmap(VALUE_AND_GRAD, (None, 0))(own, data)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P(cj_optax.AXIS)), out_specs=(P(), specs))
    for one in wanted("m-nice"):
        params, state = jax.jit(mapped)(params, state, DATA)
        same(jax.device_get((params, state[0])), one)


def test_a_run_through_a_checkpoint_is_the_whole_run_bit_for_bit(tmp_path):
    tx = optax.chain(
        cj_optax.per_client(optax.trace(0.5), N), transformation("ef-bv", cj_optax.ef_bv), optax.trace(0.9)
    )
    step = per_client_step(tx)
    params, state = start(jnp.float64), tx.init(start(jnp.float64))
    for _ in range(2):
        params, state = step(params, state, DATA)
    checkpoint.save(tmp_path / "half", (params, state), {}, {})
    loaded, _ = checkpoint.load(tmp_path / "half", (start(jnp.float64), tx.init(start(jnp.float64))))
    chex.assert_trees_all_equal(step(*loaded, DATA), step(params, state, DATA))


def test_it_composes_with_clipping_before_and_momentum_after_it():
    compressor, hparams = setting("ef21")
    clip = optax.stateless(lambda rows, _: jax.vmap(partial(optax.projections.projection_l2_ball, scale=1.0))(rows))
    mean = cj_optax.ef_bv(compressor, N, KEY, lam=hparams.lam, nu=hparams.nu)
    tx = aggregating.process(clip, mean, optax.sgd(0.1, momentum=0.5))
    kinds = {type(tx), type(mean)}
    assert kinds == {aggregating.Aggregator}
    params, losses = start(jnp.float64), []
    state = tx.init(params)
    for _ in range(30):
        values, grads = jax.vmap(VALUE_AND_GRAD, (None, 0))(params, DATA)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(values.mean())
    assert losses[-1] < losses[0] and cj_optax.bits(state) > 0


def test_a_compressor_is_an_aggregator_that_averages_its_messages():
    compressor = COMPRESSORS["rand-k"]
    mean = cj_optax.compressed_mean(compressor, N, KEY)
    assert {type(mean)} == {aggregating.Aggregator}
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((N, D)))
    state = mean.init(grads[0])
    for number in range(2):
        key = jax.random.fold_in(KEY, number)
        messages = [compressor.compress(key, grads[i], i, N) for i in range(N)]
        found, state = mean.update(grads, state)
        np.testing.assert_allclose(found, np.mean([one.value for one in messages], axis=0), rtol=1e-14)
        assert state.round == number + 1 and state.bits == messages[0].bits == cj_optax.bits((state,))


def test_a_compressor_as_an_aggregator_numbers_clients_over_devices():
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((N, D)))
    single = cj_optax.compressed_mean(COMPRESSORS["perm-k"], N, KEY)
    several = cj_optax.compressed_mean(COMPRESSORS["perm-k"], N, KEY, cj_optax.AXIS)
    mapped = jax.shard_map(several.update, mesh=client_mesh(4), in_specs=(P(cj_optax.AXIS), P()), out_specs=(P(), P()))
    found, state = jax.jit(mapped)(grads, several.init(grads[0]))
    wanted, _ = single.update(grads, single.init(grads[0]))
    np.testing.assert_allclose(found, wanted, rtol=1e-14)
    assert state.round == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nested_params_keep_their_dtypes(dtype):
    params = {"layer": {"kernel": jnp.ones((3, 2), dtype)}, "bias": jnp.ones(2, dtype)}
    tx = cj_optax.ef_bv(cj_optax.top_share(0.5), 3, KEY, lam=0.5, nu=1.0)
    grads = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, 3 * leaf]), params)
    state = tx.init(params)
    updates, after = tx.update(grads, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    np.testing.assert_array_equal(updates["bias"], jnp.array([2, 0], dtype))


def test_momentum_of_each_client_stands_before_the_mean_and_lies_on_the_mesh_as_the_clients_do():
    tx = cj_optax.per_client(optax.ema(0.75, debias=False), N)
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((2, N, D)))
    state = tx.init(grads[0, 0])
    first, state = tx.update(grads[0], state)
    second, state = tx.update(grads[1], state)
    np.testing.assert_allclose(first, 0.25 * grads[0], rtol=1e-14)
    np.testing.assert_allclose(second, 0.75 * 0.25 * grads[0] + 0.25 * grads[1], rtol=1e-14)
    assert cj_optax.specs((state,)) == (State(P(), P(cj_optax.AXIS)),) and state.clients.ema.shape == (N, D)
    with pytest.raises(ValueError, match="per_client: n must be an integer of at least 1, got 0"):
        cj_optax.per_client(optax.ema(0.5), 0)


def test_top_share_keeps_a_share_of_every_leaf_and_at_least_one_entry():
    x = {"a": jnp.arange(1.0, 201.0), "b": jnp.array([1.0, -2.0])}
    value, bits = cj_optax.top_share(0.01).compress(KEY, x)
    assert np.flatnonzero(value["a"]).tolist() == [198, 199] and value["b"].tolist() == [0.0, -2.0]
    assert bits == 8 * len(cj_optax.top_share(0.01).encode(KEY, x))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match=rf"share must be in \(0, 1\], got {share}"):
        cj_optax.top_share(share)


@pytest.mark.parametrize("n", [0, -1, True])
def test_a_number_of_clients_that_is_none_is_refused(n):
    for make in (partial(cj_optax.ef_bv, lam=1.0, nu=1.0), cj_optax.compressed_mean):
        with pytest.raises(ValueError, match="n must be an integer of at least 1"):
            make(compressors.identity(), n, KEY)


def test_gradients_of_another_number_of_clients_are_refused():
    tx = cj_optax.ef_bv(compressors.identity(), 3, KEY, lam=1.0, nu=1.0)
    wrong = r"grads must have a leading axis of 3 clients .*got leaves of shapes \[\(2, 4\)\], allowed: \[\(3, 4\)\]"
    with pytest.raises(ValueError, match=wrong):
        tx.update(jnp.ones((2, 4)), tx.init(jnp.ones(4)))
    with pytest.raises(ValueError, match=wrong):
        mean = cj_optax.compressed_mean(compressors.identity(), 3, KEY)
        mean.update(jnp.ones((2, 4)), mean.init(jnp.ones(4)))


@pytest.mark.parametrize("shape", [(), (4,), (3,), (3, 2)])
def test_plain_gradients_without_a_client_axis_are_refused(shape):
    params = {"w": jnp.ones(shape)}
    grads = params  # what jax.grad(loss)(params, batch) gives
    for made in (
        cj_optax.ef_bv(compressors.identity(), 3, KEY, lam=1.0, nu=1.0),
        cj_optax.compressed_mean(compressors.identity(), 3, KEY),
        cj_optax.per_client(optax.ema(0.5), 3),
    ):
        with pytest.raises(
            ValueError, match=r"grads must have a leading axis of 3 clients \(n = 3 clients\), as jax.vmap"
        ):
            made.update(grads, made.init(params), params)


def test_another_number_of_devices_than_clients_is_refused():
    tx = cj_optax.ef_bv_mean(compressors.identity(), 8, KEY, lam=1.0, nu=1.0)
    state = tx.init(jnp.ones(4))
    specs = cj_optax.specs(state)
    mapped = jax.shard_map(
        lambda grads, state: tx.update(grads[0], state),
        mesh=client_mesh(4),
        in_specs=(P(cj_optax.AXIS), specs),
        out_specs=(P(), specs),
    )
    with pytest.raises(ValueError, match=r"leading axis of 2 clients \(n = 8 clients over 4 devices\)"):
        mapped(jnp.ones((8, 4)), state)


def test_a_gradient_that_shard_map_has_summed_already_is_refused():
    tx = cj_optax.ef_bv_mean(compressors.identity(), 4, KEY, lam=1.0, nu=1.0)
    state = tx.init(jnp.ones(4))
    specs = cj_optax.specs(state)

    def step(params, state, data):
        grad = jax.grad(lambda x: jnp.sum(x * data[0]))(params)
        return tx.update(grad, state)

    mapped = jax.shard_map(step, mesh=client_mesh(4), in_specs=(P(), specs, P(cj_optax.AXIS)), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"summed already.  Take it at rounds.broadcast\(params, axis_name\)"):
        mapped(jnp.ones(4), state, jnp.ones((4, 4)))


def test_the_bits_of_two_means_add_up():
    params = {"a": jnp.ones(4), "b": jnp.ones(6)}
    one, two = (cj_optax.compressed_mean(compressors.top_k(k), 2, KEY) for k in (1, 2))
    tx = optax.partition({"a": one, "b": two}, {"a": "a", "b": "b"})
    grads = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    _, state = tx.update(grads, tx.init(params), params)
    apart = [len(compressors.top_k(k).encode(KEY, jnp.ones(d))) * 8 for k, d in ((1, 4), (2, 6))]
    assert cj_optax.bits(state) == sum(apart) and all(apart)


def test_a_state_without_a_compressed_mean_has_no_bits():
    with pytest.raises(ValueError, match="no `bits` in it"):
        cj_optax.bits(optax.adam(0.1).init(jnp.ones(2)))


def test_specs_and_axes_split_the_clients_only():
    tx = optax.chain(cj_optax.ef_bv(compressors.identity(), 2, KEY, lam=1.0, nu=1.0), optax.sgd(0.1, momentum=0.9))
    state = tx.init(jnp.ones(3))
    specs, axes = cj_optax.specs(state, "data"), cj_optax.axes(state)
    assert specs[0] == State(P(), P("data")) and axes[0] == State(None, 0)
    assert jax.tree.leaves(specs[1:]) == [P()] and jax.tree.leaves(axes) == [0]
    placed = cj_optax.shardings(state, client_mesh(2))
    assert placed[0].clients.spec == P(cj_optax.AXIS) and placed[0].server.spec == P()
