"""The compiled programs of runs and sweeps, without checks of their arguments.

compiled_run      many rounds, on one device or over a mesh
compiled_sweep    many settings and keys; the settings may be dealt out to a mesh
run_in_place      `compiled_run` that overwrites its state, for `runner.loop`
sweep_in_place    `compiled_sweep` that overwrites its states

All have the methods `trace` and `lower` of a jitted function.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from commjax.core import rounds, shards
from commjax.core.base import Algorithm, Key, State
from commjax.core.batches import BatchFn, full_batch
from commjax.core.shards import AXIS, Inputs


def _rounds(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    *,
    batch_fn: BatchFn = full_batch,
    axis_name: str | None = None,
    mesh: Mesh | None = None,
    n: int | None = None,
) -> tuple[State, Any]:
    """`run` without its checks, not compiled."""
    if mesh is not None:

        def on_shard(
            key: Key, hparams: Any, state: State, data: PyTree, /, *, axis_name: str | None
        ) -> tuple[State, Any]:
            return compiled_run(
                key, algorithm, hparams, state, data, num_rounds, batch_fn=batch_fn, axis_name=axis_name
            )

        return shards.on_shards(on_shard, mesh, Inputs(key, hparams, state, data), n)
    key_step, key_batch = jax.random.split(key)

    def one_round(state: State, _: None) -> tuple[State, Any]:
        batch = batch_fn(jax.random.fold_in(key_batch, state.server.round), state.clients.id, data)
        after, metrics = algorithm.step(key_step, hparams, state, batch, axis_name=axis_name)
        return after._replace(server=rounds.next_round(state.server, after.server)), metrics

    return jax.lax.scan(one_round, state, None, length=num_rounds)


_STATIC = ("algorithm", "num_rounds", "batch_fn", "axis_name", "mesh", "n")
compiled_run = jax.jit(_rounds, static_argnames=_STATIC)


def _sweep_rounds(
    keys: Key,
    algorithm: Algorithm,
    hparams: Any,
    states: Any,
    data: PyTree,
    num_rounds: int,
    *,
    batch_fn: BatchFn = full_batch,
    at_once: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Any, Any]:
    """`sweep` from states [h, s], without its checks, not compiled."""
    if mesh is not None:

        def on_device(keys: Key, hparams: Any, states: Any, data: PyTree) -> tuple[Any, Any]:
            return _sweep_rounds(keys, algorithm, hparams, states, data, num_rounds, batch_fn=batch_fn, at_once=at_once)

        split = P(AXIS)
        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(P(), split, split, P()),
            out_specs=split,
            check_vma=False,  # there are no collectives
        )
        return mapped(keys, hparams, states, data)
    ids = states.clients.id[0, 0]

    def setting_run(key: Key, hparams: Any, state: State, round: Array, length: int) -> tuple[State, Any]:
        # All runs are in the same round and have the same clients.  With one shared round and id array, the compiler
        # computes what depends on key and round only (coins, cohorts and their data, candidates) once for all hparams.
        state = State(state.server._replace(round=round), state.clients._replace(id=ids))
        return compiled_run(key, algorithm, hparams, state, data, length, batch_fn=batch_fn)

    if at_once is None:
        run_from = partial(setting_run, round=states.server.round[0, 0], length=num_rounds)
        return jax.vmap(jax.vmap(run_from, in_axes=(0, None, 0)), in_axes=(None, 0, 0))(keys, hparams, states)

    # The outer loops go over rounds and keys: what depends on these two only is computed once for all settings and
    # stays in the cache.
    def one_round(states: Any, _: None) -> tuple[Any, Any]:
        step = partial(setting_run, round=states.server.round[0, 0], length=1)

        def of_key(inputs: tuple[Key, Any]) -> Any:
            key, states = inputs
            return jax.lax.map(lambda inputs: step(key, *inputs), (hparams, states), batch_size=at_once)

        return jax.lax.map(of_key, (keys, states))

    def swapped(rows: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), rows)

    states, metrics = jax.lax.scan(one_round, swapped(states), None, length=num_rounds)
    return swapped(states), swapped(jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, :, :, 0], 0, 2), metrics))


_SWEEP_STATIC = ("algorithm", "num_rounds", "batch_fn", "at_once", "mesh")
compiled_sweep = jax.jit(_sweep_rounds, static_argnames=_SWEEP_STATIC)

# For `loop`, which owns its states: a chunk overwrites the state that it began with, so the n x d shifts are in memory
# once.
run_in_place = jax.jit(_rounds, static_argnames=_STATIC, donate_argnames="state")
sweep_in_place = jax.jit(_sweep_rounds, static_argnames=_SWEEP_STATIC, donate_argnames="states")
