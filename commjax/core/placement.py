"""Where the state of `runner.loop` lives: on one device, or split over a mesh of devices.

OneDevice    everything is where the caller has put it
Clients      the clients are split over a mesh, whose devices may belong to several processes
Settings     the settings of a sweep are split over a mesh; each device has all clients
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from commjax.core import tree
from commjax.core.base import State
from commjax.core.shards import AXIS, cut_rows, pad_rows, padded, spread


def _copied(leaves: PyTree) -> PyTree:
    return jax.tree.map(jnp.array, leaves)


@runtime_checkable
class Placement(Protocol):
    """Where the state of a run is: how `runner.loop` puts states and data on devices, and takes states back.

    Attributes:
        mesh: the devices of the run; None is one device.
    """

    @property
    def mesh(self) -> Mesh | None:
        """The devices of the run; None is one device."""
        ...

    def start(self, state: State) -> Any:
        """Place the first state of `runner.loop`; the result is a copy that a chunk may overwrite."""
        ...

    def restore(self, whole: Any) -> Any:
        """Place a state that was read from a checkpoint."""
        ...

    def whole(self, state: Any) -> Any:
        """The state without padding, in the order of the caller: for `evaluate` and for a checkpoint."""
        ...

    def data(self, data: PyTree) -> PyTree:
        """Place the data of the clients."""
        ...


@dataclass(frozen=True)
class OneDevice:
    """Everything is where the caller has put it.

    Attributes:
        like: the first state of the run; a restored state is placed on its devices.
        repeats: numbers of settings and keys of a sweep; None if this is one run.
        mesh: None.
    """

    like: State
    repeats: tuple[int, int] | None = None
    mesh: None = None

    def start(self, state: State) -> Any:
        """Copy the state; in a sweep one copy for each setting and key."""
        return _copied(state if self.repeats is None else _repeated(state, self.repeats))

    def restore(self, whole: Any) -> Any:
        """Place the loaded state on the devices of the first state."""

        def placed(leaf: Any, like: Any) -> jax.Array:
            committed = isinstance(like, jax.Array) and like.committed
            return jax.device_put(leaf, like.sharding) if committed and self.repeats is None else jnp.asarray(leaf)

        return jax.tree.map(placed, whole, self.like)

    def whole(self, state: Any) -> Any:
        """Return the state unchanged."""
        return state

    def data(self, data: PyTree) -> PyTree:
        """Return the data unchanged."""
        return data


@dataclass(frozen=True)
class Clients:
    """The client rows are split over a mesh, padded; the server is replicated.

    Attributes:
        mesh: mesh with the one axis `AXIS`.
        n: number of clients.
    """

    mesh: Mesh
    n: int

    def start(self, state: State) -> State:
        """Copy the state to the mesh, with padded client rows."""
        return _copied(self.restore(state))

    def restore(self, whole: State) -> State:
        """Place a loaded state on the mesh, with padded client rows."""
        server = spread(whole.server, NamedSharding(self.mesh, P()))
        return State(server, self.data(whole.clients))

    def whole(self, state: State) -> State:
        """Return the state with n client rows.  If the devices do not divide n, each device has all rows."""
        if len(state.clients.id) == self.n:
            return state
        return State(state.server, _cut_replicated(state.clients, self.n, NamedSharding(self.mesh, P())))

    def data(self, data: PyTree) -> PyTree:
        """Place the rows of the clients on the mesh, padded."""
        return spread(pad_rows(data, self.mesh.size), NamedSharding(self.mesh, P(AXIS)))


@partial(jax.jit, static_argnames=("n", "sharding"))
def _cut_replicated(rows: PyTree, n: int, sharding: NamedSharding) -> PyTree:
    return jax.lax.with_sharding_constraint(cut_rows(rows, n), sharding)


@dataclass(frozen=True)
class Settings:
    """The settings of a sweep are dealt out to the devices of a mesh: device j of p has j, j + p, j + 2p, ...

    Attributes:
        mesh: mesh with the one axis `AXIS`.
        settings: number of settings; padding repeats the last one.
        keys: number of keys.
    """

    mesh: Mesh
    settings: int
    keys: int

    def deal(self, rows: PyTree) -> PyTree:
        """Place rows, one for each setting, on their devices."""
        total = padded(self.settings, self.mesh)
        order = np.minimum(np.arange(total).reshape(-1, self.mesh.size).T.ravel(), self.settings - 1)
        return spread(jax.tree.map(lambda leaf: np.asarray(leaf)[order], rows), NamedSharding(self.mesh, P(AXIS)))

    def start(self, state: State) -> Any:
        """Repeat the state for each setting and key.  Each device makes the states of its settings."""
        replicated, split = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P(AXIS))
        return _repeated_on(spread(state, replicated), (padded(self.settings, self.mesh), self.keys), split)

    def restore(self, whole: Any) -> Any:
        """Place the loaded states on the mesh."""
        return self.deal(whole)

    def whole(self, state: Any) -> Any:
        """Return the states in the order of the settings."""
        return _undealt(state, self.settings, self.mesh)

    def data(self, data: PyTree) -> PyTree:
        """Copy the data to each device."""
        return spread(data, NamedSharding(self.mesh, P()))


def _repeated(state: State, repeats: tuple[int, int]) -> Any:
    settings, keys = repeats
    return tree.repeat(tree.repeat(state, keys), settings)


@partial(jax.jit, static_argnames=("repeats", "sharding"))
def _repeated_on(state: State, repeats: tuple[int, int], sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(_repeated(state, repeats), sharding)


@partial(jax.jit, static_argnames=("settings", "mesh"))
def _undealt(rows: PyTree, settings: int, mesh: Mesh) -> PyTree:
    def in_order(leaf: jax.Array) -> jax.Array:
        table = leaf.reshape(mesh.size, len(leaf) // mesh.size, *leaf.shape[1:])
        return jnp.swapaxes(table, 0, 1).reshape(leaf.shape)[:settings]

    return jax.tree.map(in_order, rows)
