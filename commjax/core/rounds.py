"""One round: `exchange_round` computes it, and `federated` makes an `Algorithm` of a client step and a server step.

The verbs over the client axis are in `commjax.core.communication`, the cohort is in `commjax.core.cohorts`, the keys
are in `commjax.core.round_keys`.  Their names can also be used from here, as `rounds.mean`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from commjax.core.base import (
    Algorithm,
    Axis,
    AxisName,
    ClientStep,
    Codec,
    Compressor,
    Exchange,
    InitFn,
    Key,
    Message,
    Metrics,
    Over,
    Reducer,
    ServerStep,
    Spec,
    State,
    ValueAndGrad,
)
from commjax.core.checks import checked_init
from commjax.core.cohorts import Members, check_cohort, cohort, cohort_members
from commjax.core.communication import (
    acceptable,
    bits_of,
    broadcast,
    count,
    dense_bits,
    gathered,
    largest,
    mean,
    mean_bits,
    plain_name,
    real,
    reduced,
)
from commjax.core.round_keys import RoundKeys, keys, message_of, round_of

__all__ = [
    "Axis",
    "Members",
    "RoundKeys",
    "RoundResult",
    "acceptable",
    "bits_of",
    "broadcast",
    "check_cohort",
    "check_rows",
    "cohort",
    "cohort_members",
    "count",
    "dense_bits",
    "evaluated",
    "exchange_round",
    "federated",
    "gathered",
    "keys",
    "largest",
    "mean",
    "mean_bits",
    "message_of",
    "next_round",
    "one_by_one",
    "plain_name",
    "real",
    "reduced",
    "round_of",
    "server_round",
]


def next_round(before: Any, after: Any) -> Any:
    """Set the round number of a new server state.

    Every key of a round comes from the round number.  The core therefore counts rounds itself and overwrites what a
    method's `server_step` did to the number.

    Args:
        before: server state at the beginning of the round.
        after: server state at its end.

    Returns:
        `after` with `round = before.round + 1`.
    """
    return after._replace(round=before.round + 1)


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `jax.vmap(function)`, but the clients are computed one after another.

    This saves memory.  On a CPU, a round of convolutional networks takes 0.75 to 0.95 of its time under `jax.vmap`
    (docs/results/speed.md), but a round of 1,000 small clients (logistic regression, d = 112) four times as long.
    Therefore `jax.vmap` is the default of the methods, on every platform.

    Args:
        function: function of one client's rows.

    Returns:
        The function of rows with a leading client axis.

    >>> one_by_one(lambda x, y: x + y)(jnp.arange(3), jnp.ones(3, int)).tolist()
    [1, 2, 3]
    """
    return lambda *rows: jax.lax.map(lambda row: function(*row), rows)


def evaluated(value_and_grad: ValueAndGrad, params: PyTree, data: PyTree) -> tuple[Array, PyTree]:
    """Compute one client's loss and gradient, and check that the function returns both.

    Args:
        value_and_grad: (params, data) -> (loss, gradient like params).
        params: the model.
        data: one client's data.

    Returns:
        (loss, gradient).  Raises a TypeError if `value_and_grad` returns something else.

    >>> evaluated(jax.grad(lambda x, data: x**2), jnp.ones(()), ())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: value_and_grad(params, data) must return (loss, gradients like params): pass ...
    """
    result = value_and_grad(params, data)
    pair = isinstance(result, tuple) and len(result) == 2 and jax.tree.structure(result[0]) == jax.tree.structure(0)
    if not pair or jnp.ndim(result[0]) or jax.tree.structure(result[1]) != jax.tree.structure(params):
        raise TypeError(
            "value_and_grad(params, data) must return (loss, gradients like params): pass jax.value_and_grad(loss), "
            "not loss or jax.grad(loss)"
        )
    return result


def check_rows(data: PyTree, n: int) -> None:
    """Raise a ValueError unless every leaf of `data` has a leading axis of length n."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if jnp.shape(leaf)[:1] != (n,):
            raise ValueError(
                f"data{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; allowed: a leading axis of {n}, one "
                "row for each client"
            )


def server_round(
    exchange: Exchange,
    hparams: Any,
    server: Any,
    values: PyTree,
    losses: Shaped[Array, "n"],
    *,
    axis_name: AxisName = None,
    weights: Shaped[Array, "n"] | None = None,
) -> tuple[Any, Array]:
    """Do the server's part of a round: reduce the messages, take the server step, count the round.

    Args:
        exchange: client step and server step of the method; `server_step` must not be None.
        hparams: hyperparameters of the method.
        server: server state at the beginning of the round.
        values: the messages as the server sees them, with a leading axis of clients.
        losses: one for each message.
        axis_name: the device axis; None if there is none.
        weights: weights of `mean`.

    Returns:
        The server state of the next round, and the mean loss.
    """
    assert exchange.server_step is not None
    value, loss = reduced(exchange.reduce, values, losses, axis_name, weights)
    return next_round(server, exchange.server_step(hparams, server, value)), loss


class RoundResult(NamedTuple):
    """What `exchange_round` returns.

    Attributes:
        state: the state of the next round.
        metrics: the loss is the mean over the members of the cohort; bits are means over all n clients.
        values: the messages as the server sees them, one row for each client that this device worked on.
        losses: one for each of these clients.
    """

    state: State
    metrics: Metrics
    values: PyTree
    losses: Shaped[Array, "m"]


def exchange_round(
    exchange: Exchange,
    key: Key,
    hparams: Any,
    state: State,
    batch: PyTree,
    *,
    axis_name: AxisName = None,
    over: Over = jax.vmap,
    population: int | None = None,
) -> RoundResult:
    """Compute one round of a method that communicates once a round.

        client_i, m_i, loss_i  <-  client_step(round, hparams, server, client_i, data_i)     for i in the cohort
        server                 <-  server_step(hparams, server, reduce_i m_i)

    m_i is the message of client i, and reduce_i is the mean over the cohort or `exchange.reduce`.

    Args:
        exchange: client step and server step of the method; `server_step` must not be None.
        key: key of the run.
        hparams: hyperparameters of the method.
        state: the state at the beginning of the round, with the rows of this device.
        batch: data of the round, one row for each row of `state.clients`.
        axis_name: the device axis; None if there is none.
        over: maps a function of one client over the client axis: `jax.vmap` or `one_by_one`.
        population: number of all clients, if the rows are those of a cohort that the caller has drawn.  None: the rows
            are those of all clients, and the cohort is drawn here.

    Returns:
        The next state, the metrics, the messages and the losses.
    """
    server, clients = state
    drawn = population is not None
    n = population if drawn else count(clients.id, axis_name)
    size = len(clients.id) if drawn else exchange.cohort_size or n
    derived = keys(key, server.round, n)
    members = Members() if drawn else cohort(derived.cohort, clients.id, size, axis_name)
    received = broadcast(server, axis_name)

    def client_round(client: Any, data: PyTree) -> tuple[Any, Message, Array]:
        round = round_of(exchange, derived.shared, client.id, n, run=key)
        return exchange.client_step(round, hparams, received, client, data)

    rows, message, losses = over(client_round)(members.take(clients), members.take(batch))
    after, loss = server_round(
        exchange, hparams, server, message.value, losses, axis_name=axis_name, weights=members.weights
    )
    bits = mean_bits(message.bits, axis_name, members.weights)
    bits_down = jnp.asarray(size / n * exchange.bits_down(server), bits.dtype)
    metrics = Metrics(loss, size / n * bits, bits_down)
    return RoundResult(State(after, members.put(clients, rows)), metrics, message.value, losses)


def federated(
    init: InitFn,
    client_step: ClientStep,
    server_step: ServerStep,
    bits_down: Callable[[Any], float],
    cohort_size: int | None = None,
    over: Over = jax.vmap,
    *,
    compressor: Compressor | None = None,
    down: tuple[str, ...] = ("params",),
    private: bool = False,
    download: Codec | None = None,
    upload: Codec | None = None,
    reduce: Reducer | None = None,
    spec: Spec | None = None,
) -> Algorithm:
    """Make an `Algorithm` of a client step and a server step that communicate once a round.

        client_i, m_i, loss_i  <-  client_step(round, hparams, server, client_i, data_i)     for all i in parallel
        server                 <-  server_step(hparams, server, mean_i m_i)

    With `cohort_size` m, m clients drawn at random take part in a round.  The messages and the loss are averaged over
    them, bits over all n clients.  A method whose clients read only the fields `down` and send only by `round.send`
    also runs with remote clients (`commjax.federation.flower`).

    Args:
        init: (params, ids, **per_client) -> State.
        client_step: (round, hparams, server, client, data) -> (client, message, loss) for one client, without a client
            axis.  `round` is a `Round`; the message must be the result of `round.send(x)`, which is C(x), or x itself
            without a `compressor`.
        server_step: (hparams, server, mean of the messages) -> server.  It need not change `server.round`: the core
            sets it to the next one.
        bits_down: (server) -> number of bits that a client receives.
        cohort_size: number of clients in a round; None is all of them.
        over: maps a function of one client over the client axis: `jax.vmap` or `one_by_one`.
        compressor: compressor of the uploads; None sends them uncompressed.
        down: names of the fields of `server` that a client may read, besides `round`.
        private: whether the method draws its noise from `round.client_key`, which must then be a secret of the client.
        download: codec of the downloads, if they are not all fields of `down` for every client.
        upload: codec of the uploads, if they have neither the compressor's encoding nor the structure of `down`.
        reduce: a robust reducer (`commjax.core.robust`); None is the mean.
        spec: the types and values that the method accepts, for `commjax.core.checks`.

    Returns:
        The algorithm.  Its `step` has the clients of one device on a leading axis, and devices on the axis `axis_name`.
    """
    check_cohort(cohort_size)
    if reduce is not None and compressor is not None and compressor.absence:
        raise ValueError(
            f"reduce={reduce.name}: under {compressor.name} clients that are not drawn send 0, and {reduce.name} would "
            "take these for messages; allowed: a compressor with which every client sends, or reduce=None"
        )
    exchange = Exchange(
        client_step,
        server_step,
        bits_down,
        down=down,
        compressor=compressor,
        cohort_size=cohort_size,
        private=private,
        download=download,
        upload=upload,
        reduce=reduce,
    )

    def step(
        key: Key, hparams: Any, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        check_rows(batch, len(state.clients.id))
        result = exchange_round(exchange, key, hparams, state, batch, axis_name=axis_name, over=over)
        return result.state, result.metrics

    return Algorithm(checked_init(init), step, exchange, spec)
