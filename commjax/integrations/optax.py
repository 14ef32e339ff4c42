"""EF-BV inside anybody's data-parallel training loop: the mean of the gradients, compressed, as an Optax transformation.

Two forms of one update.  An `Aggregator` takes gradients with a leading client axis (`vmap`, sharded jit); a transformation takes
the gradient of its own device under `pmap` or `shard_map` and stands where the loop had its `pmean`:

    tx = optax.chain(optax_face.ef_bv_mean(compressor, n, key, lam=1.0, nu=1.0, axis_name="clients"), optax.adam(1e-3))

The state has the two places of every state here (`base.State`), so `commjax.core.checkpoint` saves it, and `specs` and `axes` say how
it lies on a mesh.  No key lives in it: resuming needs the state only.  The collective moves dense arrays, as `pmean` did; `bits`
is what the messages weigh when they are encoded, and Optax's own state stays with the server.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree, Shaped
from optax.experimental import aggregating

from commjax.algorithms.ef_bv import Client
from commjax.compressors.sparse import top_k
from commjax.compressors.vectors import check_count, leafwise
from commjax.core import rounds, tree
from commjax.core.base import Compressor, Key, Params, State

AXIS = "clients"
Transformation = Any  # an `optax.GradientTransformationExtraArgs`; its own types are narrower than what Optax takes


class Server(NamedTuple):
    """What every device knows."""

    round: Int[Array, ""]
    shift: Params  # h = mean_i h_i
    bits: Shaped[Array, ""]  # of the last message, mean over clients


class Sent(NamedTuple):
    """The state of `compressed_mean`."""

    round: Int[Array, ""]
    bits: Shaped[Array, ""]


def top_share(share: float) -> Compressor:
    """top-k with the largest `share` of every leaf, at least one entry: a leaf stays in the cache while its threshold is found.

    >>> top_share(0.5).compress(jax.random.key(0), jnp.array([1.0, -3.0])).value.tolist()
    [0.0, -3.0]
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    return leafwise(lambda d: top_k(max(1, round(share * d))))


def ef_bv(
    compressor: Compressor, n: int, key: Key, *, lam: Any, nu: Any, axis_name: str | None = None
) -> Transformation:
    """EF-BV's estimate g of the mean of n gradients; EF21 at nu == lam, DIANA at nu == 1.

        d_i = C_i(grad_i - h_i)             h_i <- h_i + lam d_i
        g   = h + nu mean_i d_i             h   <- h + lam mean_i d_i

    An `optax.experimental.aggregating.Aggregator`: `update` takes gradients with a leading axis of clients, all n of them or,
    under an `axis_name`, those of this device.  With `optax.sgd(gamma)` after it, it is `algorithms.ef_bv` bit for bit.

    Thesis: Alg. EF-BV (Fig. 2.1).
    Holds if: what follows is a gradient step; with momentum or Adam after it the theorems do not speak.

    >>> from commjax.compressors import identity
    >>> mean = ef_bv(identity(), 2, jax.random.key(0), lam=1.0, nu=1.0)
    >>> update, state = mean.update(jnp.array([[1.0], [3.0]]), mean.init(jnp.zeros(1)))
    >>> update.tolist(), state.clients.shift.tolist()
    ([2.0], [[1.0], [3.0]])
    """
    check_count("ef_bv", "n", n)

    def init(params: Params) -> State:
        zeros = tree.zeros_like(params)
        server = Server(jnp.zeros((), jnp.int32), zeros, jnp.zeros(()))
        return State(server, Client(jnp.arange(n, dtype=jnp.int32), tree.repeat(zeros, n)))

    def update(grads, state, params=None, **extra):
        server, rows = state
        _check(grads, n, axis_name, like=rows.shift)
        key_round = jax.random.fold_in(key, server.round)

        def one(client, grad):
            d = compressor.compress(key_round, tree.sub(grad, client.shift), client.id, n)
            return Client(client.id, tree.add_scaled(client.shift, lam, d.value)), d

        rows, messages = _over(one, len(rows.id))(rows, grads)
        d, bits = rounds.mean(messages, axis_name)
        g = tree.add_scaled(server.shift, nu, d)
        return g, State(Server(server.round + 1, tree.add_scaled(server.shift, lam, d), bits), rows)

    return aggregating.Aggregator(init, cast(Any, update))


def compressed_mean(compressor: Compressor, n: int, key: Key, axis_name: str | None = None) -> Transformation:
    """mean_i C_i(grad_i): a compressor as an `Aggregator`, without memory.  Holds if: C_i is unbiased.

    >>> from commjax.compressors import top_k
    >>> mean = compressed_mean(top_k(1), 2, jax.random.key(0))
    >>> mean.update(jnp.array([[1.0, 4.0], [3.0, 2.0]]), mean.init(jnp.zeros(2)))[0].tolist()
    [1.5, 2.0]
    """
    check_count("compressed_mean", "n", n)

    def init(params: Params) -> Sent:
        return Sent(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(grads, state, params=None, **extra):
        _check(grads, n, axis_name, params=params)
        local = len(jax.tree.leaves(grads)[0])
        ids = jnp.arange(local, dtype=jnp.int32)
        if axis_name is not None:
            ids = ids + jax.lax.axis_index(axis_name) * local
        key_round = jax.random.fold_in(key, state.round)
        messages = _over(lambda id, grad: compressor.compress(key_round, grad, id, n), local)(ids, grads)
        g, bits = rounds.mean(messages, axis_name)
        return g, Sent(state.round + 1, bits)

    return aggregating.Aggregator(init, cast(Any, update))


def per_client(transformation: optax.GradientTransformation, n: int) -> Transformation:
    """A transformation for each client, before the mean: `per_client(optax.ema(0.9), n)` is the momentum of EF21-SGDM.

    Stochastic gradients need it: where only 1 % is sent, an entry of h_i stays for about 100 steps, and so does its noise.

    >>> ema = per_client(optax.ema(0.5, debias=False), 2)
    >>> ema.update(jnp.array([[1.0], [3.0]]), ema.init(jnp.zeros(1)))[0].tolist()
    [[0.5], [1.5]]
    """
    check_count("per_client", "n", n)

    def init(params: Params) -> State:
        return State((), jax.vmap(transformation.init)(tree.repeat(params, n)))

    def update(grads, state, params=None, **extra):
        _check(grads, n, None, params=params)
        grads, rows = jax.vmap(lambda grad, row: transformation.update(grad, row, params))(grads, state.clients)
        return grads, State((), rows)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def ef_bv_mean(compressor: Compressor, n: int, key: Key, *, lam: Any, nu: Any, axis_name: str = AXIS) -> Transformation:
    """`ef_bv` under `pmap` or `shard_map`, one client a device: takes the device's own gradient, of the shape of the params.

    `init` makes all n rows and is called outside; `specs(state)` and `axes(state)` split them.  Under `shard_map` take the gradient
    at `clients.broadcast(params, axis_name)`: at replicated params JAX would sum it over the devices first (that is refused).
    """
    mean = ef_bv(compressor, n, key, lam=lam, nu=nu, axis_name=axis_name)

    def update(grad, state, params=None, **extra):
        server, row = state
        bare = row.id.ndim == 0  # pmap takes the client out of its axis, shard_map leaves it in an axis of one
        g, (server, rows) = mean.update(_rows(grad), State(server, _rows(row) if bare else row))
        return g, State(server, jax.tree.map(lambda leaf: leaf[0], rows) if bare else rows)

    return optax.GradientTransformationExtraArgs(mean.init, cast(Any, update))


def _rows(row: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], row)


def _over(one, local: int):
    """`vmap`, or the function itself where there is one client: a model's selection then runs leaf by leaf without an axis."""
    if local > 1:
        return jax.vmap(one)
    return lambda *rows: _rows(one(*jax.tree.map(lambda leaf: leaf[0], rows)))


def _check(
    grads: PyTree, n: int, axis_name: str | None, *, like: PyTree | None = None, params: PyTree | None = None
) -> None:
    """ValueError unless gradients have one row for each client of this device; `like` has their shapes, `params` those of a row"""
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    local = n // devices
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(grads)]
    wanted = [(local, *shape[1:]) for shape in shapes]
    if like is not None:
        wanted = [(local, *leaf.shape[1:]) for leaf in jax.tree.leaves(like)]
    elif params is not None:
        wanted = [(local, *jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
    rows = {len(leaf) for leaf in jax.tree.leaves(like)}
    if n % devices or shapes != wanted or rows - {local}:
        where = f"n = {n} clients" + ("" if axis_name is None else f" over {devices} devices")
        raise ValueError(
            f"grads must have a leading axis of {local} clients ({where}), as jax.vmap(jax.grad(loss), (None, 0))(params, data) "
            f"makes it; got leaves of shapes {shapes}, allowed: {wanted}"
        )
    if axis_name is None:
        return
    checked = axis_name in _varies(jax.lax.axis_index(axis_name))
    if checked and not all(axis_name in _varies(leaf) for leaf in jax.tree.leaves(grads)):
        raise ValueError(
            f"the gradient is the same on all devices of {axis_name!r}: under shard_map it was summed already.  Take it at "
            "clients.broadcast(params, axis_name)"
        )


def _varies(x: Array) -> frozenset:
    """The device axes over which a value varies, as far as `shard_map` keeps track; the attribute has had two names."""
    kind = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def specs(state: PyTree, axis_name: str = AXIS) -> PyTree:
    """PartitionSpecs of an Optax state with ours inside, for `shard_map` and `NamedSharding`: clients split, the rest replicated.

    >>> from commjax.compressors import identity
    >>> specs(ef_bv(identity(), 2, jax.random.key(0), lam=1.0, nu=1.0).init(jnp.zeros(1)))
    State(server=P(), clients=P('clients',))
    """
    return _placed(state, State(P(), P(axis_name)), P())


def shardings(state: PyTree, mesh: Mesh, axis_name: str = AXIS) -> PyTree:
    """The same as `NamedSharding`s, for `jax.device_put(state, ...)` before a sharded jit."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(state, axis_name))


def axes(state: PyTree) -> PyTree:
    """The same for `pmap`: in_axes and out_axes."""
    return _placed(state, State(None, 0), None)


def _placed(state: PyTree, ours: State, others: Any) -> PyTree:
    return jax.tree.map(
        lambda node: ours if isinstance(node, State) else others, state, is_leaf=lambda node: isinstance(node, State)
    )


def bits(state: PyTree) -> Array:
    """What one client sent in the last step, read from anywhere inside an Optax state; all that it sent, if there are several means"""
    found = optax.tree.get_all_with_path(state, "bits")
    if not found:
        raise ValueError("the Optax state holds no compressed mean: no `bits` in it")
    return jnp.stack([jnp.asarray(value) for _, value in found]).sum(axis=0)
