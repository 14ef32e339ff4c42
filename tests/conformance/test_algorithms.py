"""Properties that every algorithm has, each written once and run over `tests/registry.py`."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core import checkpoint, runner
from commjax.core.base import State
from tests import registry
from tests.registry import build

pytestmark = pytest.mark.slow

KEY = jax.random.key(7)
ALL = pytest.mark.parametrize("name", registry.NAMES)
KINDS = pytest.mark.parametrize("name", registry.KINDS)


@cache
def counted(algorithm):
    """The jitted step.  All tests share it, and none may make it trace twice."""
    traces = []

    def step(*inputs):
        traces.append(inputs)
        assert len(traces) == 1, "the step was traced again"
        return algorithm.step(*inputs)

    return jax.jit(step)


def stepper(name):
    return counted(build(name).algorithm)


@cache
def trajectory(name, rounds=3):
    """State and metrics after each of a few rounds on one device."""
    case = build(name)
    state, seen = case.init(), []
    for _ in range(rounds):
        state, metrics = stepper(name)(KEY, case.hparams, state, case.data)
        seen.append((state, metrics))
    return seen


def close(found, wanted, rtol=1e-10, atol=1e-12):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_trees_all_close(found, wanted, rtol=rtol, atol=atol)


def bitwise(found, wanted):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def scaled(hparams, factor):
    """Counts, such as local rounds, stay whole numbers."""
    return jax.tree.map(lambda number: number if isinstance(number, int) else number * factor, hparams)


@KINDS
def test_a_jitted_step_equals_an_eager_one(name):
    case, (state, _) = build(name), trajectory(name)[0]
    found = case.algorithm.step(KEY, case.hparams, state, case.data)
    close(found, trajectory(name)[1], rtol=1e-12, atol=1e-12)


@ALL
def test_changing_hyperparameters_and_keys_trace_once_and_matter(name):
    case = build(name)
    results = [
        stepper(name)(KEY, scaled(case.hparams, factor), case.init(), case.data)[0] for factor in (1.0, 0.7, 0.5)
    ]
    stepper(name)(jax.random.key(8), case.hparams, case.init(), case.data)
    first, *others = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.server.params)]) for s in results]
    assert all(np.abs(other - first).max() > 1e-6 for other in others)


@KINDS
def test_a_vmapped_sweep_equals_a_loop_over_hyperparameters_and_keys(name):
    case, rounds = build(name), 2
    settings = [case.hparams, scaled(case.hparams, 0.5)]
    keys = jax.random.split(KEY, 2)
    swept = runner.sweep(keys, case.algorithm, runner.stack(settings), case.init(), case.data, rounds)
    for h, hparams in enumerate(settings):
        for s, key in enumerate(keys):
            state, seen = case.init(), []
            for _ in range(rounds):
                # A run gives its steps one half of its key (tests/core/test_runner.py) and its batches the other.
                state, metrics = stepper(name)(jax.random.split(key)[0], hparams, state, case.data)
                seen.append(metrics)
            close(jax.tree.map(lambda leaf, h=h, s=s: leaf[h, s], swept), (state, runner.stack(seen)))


@ALL
def test_a_run_that_goes_through_a_checkpoint_file_is_the_whole_run_bit_for_bit(name, tmp_path):
    case, path, identity = build(name), tmp_path / "half", {"name": name}
    (_, _), (half, _), (end, metrics) = trajectory(name)
    checkpoint.save(path, half, {}, identity)
    loaded, _ = checkpoint.load(path, case.init(), identity)
    bitwise(loaded, half)
    bitwise(stepper(name)(KEY, case.hparams, loaded, case.data), (end, metrics))


@ALL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_leaf_of_the_state_keeps_its_dtype(name, dtype):
    case = build(name, dtype)
    state = case.init()
    floating = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floating} == {jnp.dtype(dtype)} and len(floating) >= case.floating
    after, metrics = jax.eval_shape(case.algorithm.step, KEY, case.hparams, state, case.data)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert metrics.loss.dtype == dtype and metrics.bits_up.dtype == jnp.zeros(()).dtype


@KINDS
def test_half_precision_prices_its_numbers_at_half_and_stays_finite(name):
    case = build(name, jnp.bfloat16)
    state, metrics = jax.jit(case.algorithm.step)(KEY, case.hparams, case.init(), case.data)
    chex.assert_tree_all_finite((state.server, state.clients, metrics))
    exact = trajectory(name)[0][1]
    assert 0 < metrics.bits_up < exact.bits_up and metrics.bits_down * 4 == exact.bits_down
    np.testing.assert_allclose(float(metrics.loss), float(exact.loss), rtol=0.05)


@ALL
def test_a_step_is_pure(name):
    case, (state, _) = build(name), trajectory(name)[0]
    inputs = (case.hparams, state, case.data)
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), inputs)
    first, second = (stepper(name)(KEY, *inputs) for _ in range(2))
    bitwise(first, second)
    for one, other in zip(jax.tree.leaves(inputs), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one, other)


@ALL
def test_the_round_advances_by_one_and_clients_keep_their_ids_and_metrics_are_finite(name):
    case = build(name)
    assert case.init().server.round == 0
    for t, (state, metrics) in enumerate(trajectory(name)):
        assert state.server.round == t + 1
        np.testing.assert_array_equal(state.clients.id, case.ids)
        chex.assert_trees_all_equal_structs(state.server.params, case.params)
        chex.assert_tree_all_finite((state.server, state.clients, metrics))
        assert (metrics.bits_up > 0) == (metrics.bits_down > 0) and (metrics.bits_up > 0 or case.silent)
        chex.assert_shape(list(metrics), ())


@ALL
def test_the_loss_falls(name):
    losses = [float(metrics.loss) for _, metrics in trajectory(name)]
    assert losses[-1] < losses[0]


@ALL
def test_a_client_s_row_does_not_depend_on_the_order_of_clients(name):
    case = build(name)
    order = np.random.default_rng(5).permutation(registry.N)

    def shuffled(rows):
        return jax.tree.map(lambda leaf: leaf[order], rows)

    state = case.algorithm.init(case.params, shuffled(case.ids), **shuffled(case.per_client))
    for wanted, metrics in trajectory(name):
        state, found = stepper(name)(KEY, case.hparams, state, shuffled(case.data))
        close(state, State(wanted.server, shuffled(wanted.clients)))
        close(found, metrics)


@pytest.mark.parametrize(
    "name, compressor, gradient",
    [
        ("ef-bv comp", "comp", registry.VALUE_AND_GRAD),
        ("ef-bv m-nice", "m-nice", registry.VALUE_AND_GRAD),
        ("ef-bv perm-k", "perm-k", registry.VALUE_AND_GRAD),
        ("ef-bv dithering", "dithering", registry.VALUE_AND_GRAD),
        ("ef-bv leafwise", "leafwise", jax.value_and_grad(registry.tree_loss)),
    ],
)
def test_bits_up_is_what_the_encoder_emits_and_the_bytes_give_the_state(name, compressor, gradient):
    case, compressor = build(name), registry.COMPRESSORS[compressor]
    (state, _), (after, metrics) = trajectory(name)[:2]
    key = jax.random.fold_in(KEY, state.server.round)
    sent = []
    for i in range(registry.N):
        data, shift, new = jax.tree.map(
            lambda leaf, i=i: leaf[i], (case.data, state.clients.shift, after.clients.shift)
        )
        message = jax.tree.map(jnp.subtract, gradient(state.server.params, data)[1], shift)
        sent.append(compressor.encode(key, message, i, registry.N))
        received = compressor.decode(key, sent[-1], message, i, registry.N)
        close(jax.tree.map(lambda h, d: h + case.hparams.lam * d, shift, received), new)
    assert metrics.bits_up == np.mean([8 * len(one) for one in sent]) > 0
