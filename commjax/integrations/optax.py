"""The compressed mean of gradients by EF-BV as an Optax transformation, for any data-parallel training loop.

The update has two forms.  An `Aggregator` takes gradients with a leading client axis (`vmap`, sharded jit).  A
transformation takes the gradient of its own device under `pmap` or `shard_map`, and replaces the `pmean` of the loop:

    from commjax.integrations import optax as cj_optax
    mean = cj_optax.ef_bv_mean(compressor, n, key, lam=1.0, nu=1.0, axis_name="clients")
    tx = optax.chain(mean, optax.adam(1e-3))

The state is a `base.State`, so `commjax.core.checkpoint` saves it, and `specs` and `axes` split it over devices.  It
holds no key: a run resumes from the state alone.  The collective communicates dense arrays, as `pmean` does.  `bits`
counts the bits of the encoded messages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree, Shaped
from optax.experimental import aggregating

from commjax.algorithms.ef_bv import Client, client_update, estimate
from commjax.compressors.sparse import top_k
from commjax.compressors.vectors import check_count, leafwise
from commjax.core import rounds, tree
from commjax.core.base import Compressor, Key, Message, Params, Round, State

AXIS = "clients"
# An `optax.GradientTransformationExtraArgs`, whose declared types are narrower than what Optax accepts.
Transformation = Any


class Server(NamedTuple):
    """Server state of `ef_bv`, the same on every device.

    Attributes:
        round: number of updates so far.
        shift: h = mean_i h_i, the mean of the clients' control variates.
        bits: bits of the last message, as the mean over clients.
    """

    round: Int[Array, ""]
    shift: Params
    bits: Shaped[Array, ""]


class Sent(NamedTuple):
    """State of `compressed_mean`.

    Attributes:
        round: number of updates so far.
        bits: bits of the last message, as the mean over clients.
    """

    round: Int[Array, ""]
    bits: Shaped[Array, ""]


def top_share(share: float) -> Compressor:
    """Keep, in each leaf, the `share` of the entries with the largest magnitudes, and at least one entry.

    This is faster than top-k of the whole vector, because a leaf fits into the cache while its threshold is computed.

    Args:
        share: fraction of the entries, 0 < share <= 1.

    Returns:
        The compressor.

    >>> top_share(0.5).compress(jax.random.key(0), jnp.array([1.0, -3.0])).value.tolist()
    [0.0, -3.0]
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    return leafwise(lambda d: top_k(max(1, round(share * d))))


def ef_bv(
    compressor: Compressor, n: int, key: Key, *, lam: Any, nu: Any, axis_name: str | None = None
) -> Transformation:
    """Replace n gradients by EF-BV's estimate g of their mean; this is EF21 at nu == lam and DIANA at nu == 1.

        d_i = C_i(grad_i - h_i)             h_i <- h_i + lam d_i
        g   = h + nu mean_i d_i             h   <- h + lam mean_i d_i

    h_i is the control variate of client i, and h the mean of the h_i.  Followed by `optax.sgd(gamma)`, this equals
    `algorithms.ef_bv` bit for bit.

    Args:
        compressor: C_i, which compresses the messages d_i.
        n: number of clients.
        key: key of the run.
        lam: scaling of the control variates.
        nu: scaling of the estimate.
        axis_name: the device axis under `shard_map` or `pmap`; None if there is none.

    Returns:
        An `optax.experimental.aggregating.Aggregator`.  `update` takes gradients with a leading client axis: all n
        clients, or those of this device under an `axis_name`.

    Thesis: Alg. EF-BV (Fig. 2.1).
    Holds if: a plain gradient step follows.  No theorem covers momentum or Adam after it.

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

    def update(grads: PyTree, state: State, params: Params | None = None, **extra: Any) -> tuple[PyTree, State]:
        server, rows = state
        _check(grads, n, axis_name, like=rows.shift)
        shared = rounds.keys(key, server.round, n).shared

        def client_round(client: Client, grad: PyTree) -> tuple[Client, Message]:
            def send(x: PyTree) -> Message:
                return compressor.compress(shared, x, client.id, n)

            return client_update(Round(shared, client.id, n, send, run=key), lam, client, grad)

        rows, messages = _over(client_round, len(rows.id))(rows, grads)
        d, bits = rounds.mean(messages, axis_name)
        g, shift = estimate(lam, nu, server.shift, d)
        return g, State(Server(server.round + 1, shift, bits), rows)

    return aggregating.Aggregator(init, cast(Any, update))


def compressed_mean(compressor: Compressor, n: int, key: Key, axis_name: str | None = None) -> Transformation:
    """Replace n gradients by the mean of their compressed values, without error feedback.

        g = mean_i C_i(grad_i)

    Args:
        compressor: C_i, which compresses the gradients.
        n: number of clients.
        key: key of the run.
        axis_name: the device axis under `shard_map` or `pmap`; None if there is none.

    Returns:
        An `Aggregator` as that of `ef_bv`.

    Holds if: C_i is unbiased.

    >>> from commjax.compressors import top_k
    >>> mean = compressed_mean(top_k(1), 2, jax.random.key(0))
    >>> mean.update(jnp.array([[1.0, 4.0], [3.0, 2.0]]), mean.init(jnp.zeros(2)))[0].tolist()
    [1.5, 2.0]
    """
    check_count("compressed_mean", "n", n)

    def init(params: Params) -> Sent:
        return Sent(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(grads: PyTree, state: Sent, params: Params | None = None, **extra: Any) -> tuple[PyTree, Sent]:
        _check(grads, n, axis_name, params=params)
        local = len(jax.tree.leaves(grads)[0])
        ids = jnp.arange(local, dtype=jnp.int32)
        if axis_name is not None:
            ids = ids + jax.lax.axis_index(axis_name) * local
        shared = rounds.keys(key, state.round, n).shared
        messages = _over(lambda id, grad: compressor.compress(shared, grad, id, n), local)(ids, grads)
        g, bits = rounds.mean(messages, axis_name)
        return g, Sent(state.round + 1, bits)

    return aggregating.Aggregator(init, cast(Any, update))


def per_client(transformation: optax.GradientTransformation, n: int) -> Transformation:
    """Apply a transformation to the gradient of each client, before the mean.

    `per_client(optax.ema(0.9), n)` is the momentum of EF21-SGDM.  Stochastic gradients need it: if 1 % of the entries
    are sent, an entry of h_i and its noise stay for about 100 steps.

    Args:
        transformation: the transformation.
        n: number of clients.

    Returns:
        A transformation of gradients with a leading axis of n clients.

    >>> ema = per_client(optax.ema(0.5, debias=False), 2)
    >>> ema.update(jnp.array([[1.0], [3.0]]), ema.init(jnp.zeros(1)))[0].tolist()
    [[0.5], [1.5]]
    """
    check_count("per_client", "n", n)

    def init(params: Params) -> State:
        return State((), jax.vmap(transformation.init)(tree.repeat(params, n)))

    def update(grads: PyTree, state: State, params: Params | None = None, **extra: Any) -> tuple[PyTree, State]:
        _check(grads, n, None, params=params)
        grads, rows = jax.vmap(lambda grad, row: transformation.update(grad, row, params))(grads, state.clients)
        return grads, State((), rows)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def ef_bv_mean(compressor: Compressor, n: int, key: Key, *, lam: Any, nu: Any, axis_name: str = AXIS) -> Transformation:
    """Make `ef_bv` for use inside `pmap` or `shard_map`, with one client per device.

    Call `init` outside of `pmap` or `shard_map`: it makes the rows of all n clients, and `specs(state)` or
    `axes(state)` splits them.  Under `shard_map`, compute the gradient at `rounds.broadcast(params, axis_name)`.  At
    replicated params JAX would sum the gradient over the devices, and `update` refuses such a gradient.

    Args:
        compressor: C_i, which compresses the messages.
        n: number of clients, which is the number of devices.
        key: key of the run.
        lam: lam of `ef_bv`.
        nu: nu of `ef_bv`.
        axis_name: the device axis.

    Returns:
        A transformation of the gradient of this device, which has the shape of the params.
    """
    mean = ef_bv(compressor, n, key, lam=lam, nu=nu, axis_name=axis_name)

    def update(grad: PyTree, state: State, params: Params | None = None, **extra: Any) -> tuple[PyTree, State]:
        server, row = state
        bare = row.id.ndim == 0  # pmap removes the client axis, shard_map keeps it with length 1
        g, (server, rows) = mean.update(_rows(grad), State(server, _rows(row) if bare else row))
        return g, State(server, jax.tree.map(lambda leaf: leaf[0], rows) if bare else rows)

    return optax.GradientTransformationExtraArgs(mean.init, cast(Any, update))


def _rows(row: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], row)


def _over(function: Callable[..., Any], local: int) -> Callable[..., Any]:
    """`vmap`, or for one client the function itself: a selection then runs on leaves without a client axis."""
    if local > 1:
        return jax.vmap(function)
    return lambda *rows: _rows(function(*jax.tree.map(lambda leaf: leaf[0], rows)))


def _check(
    grads: PyTree, n: int, axis_name: str | None, *, like: PyTree | None = None, params: PyTree | None = None
) -> None:
    """Raise a ValueError unless gradients have one row for each client of this device.

    `like` has the shapes of the gradients, `params` those of one row.
    """
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
            f"grads must have a leading axis of {local} clients ({where}), as "
            f"jax.vmap(jax.grad(loss), (None, 0))(params, data) makes it; "
            f"got leaves of shapes {shapes}, allowed: {wanted}"
        )
    if axis_name is None:
        return
    checked = axis_name in _varies(jax.lax.axis_index(axis_name))
    if checked and not all(axis_name in _varies(leaf) for leaf in jax.tree.leaves(grads)):
        raise ValueError(
            f"the gradient is the same on all devices of {axis_name!r}: under shard_map it was summed already.  "
            "Take it at rounds.broadcast(params, axis_name)"
        )


def _varies(x: Array) -> frozenset[str]:
    """The device axes over which a value varies under `shard_map`.  The attribute depends on the JAX version."""
    kind = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def specs(state: PyTree, axis_name: str = AXIS) -> PyTree:
    """Return PartitionSpecs of an Optax state that contains states of this module: clients split, others replicated.

    Args:
        state: the Optax state.
        axis_name: the mesh axis of the clients.

    Returns:
        A prefix of the state, for `shard_map`.

    >>> from commjax.compressors import identity
    >>> specs(ef_bv(identity(), 2, jax.random.key(0), lam=1.0, nu=1.0).init(jnp.zeros(1)))
    State(server=P(), clients=P('clients',))
    """
    return _placed(state, State(P(), P(axis_name)), P())


def shardings(state: PyTree, mesh: Mesh, axis_name: str = AXIS) -> PyTree:
    """Return `specs` as `NamedSharding`s, for `jax.device_put(state, ...)` before a sharded jit."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(state, axis_name))


def axes(state: PyTree) -> PyTree:
    """Return the `in_axes` and `out_axes` of an Optax state for `pmap`: clients split, the rest replicated."""
    return _placed(state, State(None, 0), None)


def _placed(state: PyTree, ours: State, others: Any) -> PyTree:
    return jax.tree.map(
        lambda node: ours if isinstance(node, State) else others, state, is_leaf=lambda node: isinstance(node, State)
    )


def bits(state: PyTree) -> Array:
    """Return the number of bits that one client sent in the last step, as the mean over clients.

    Args:
        state: an Optax state that contains one or more states of this module, at any depth.

    Returns:
        The sum of their `bits`.  Raises a ValueError if there are none.
    """
    pairs = optax.tree.get_all_with_path(state, "bits")
    if not pairs:
        raise ValueError("the Optax state holds no compressed mean: no `bits` in it")
    return jnp.stack([jnp.asarray(value) for _, value in pairs]).sum(axis=0)
