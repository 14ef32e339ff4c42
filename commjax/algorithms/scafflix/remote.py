"""Scafflix between machines: the client step and the server step.

The download at the start of a round is the move of the round before: the change of the server's model xbar.  With it a
client finishes that round.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.algorithms.fedavg import bits_down
from commjax.algorithms.flix import client_value
from commjax.algorithms.scafflix.communication import Client, Run, after_round, close, keys_of, next_move, upload
from commjax.core import rounds, tree
from commjax.core.base import Exchange, Key, Params, Round, State
from commjax.core.local import ClientResult, Sample, ValueAndGrad


class RemoteServer(NamedTuple):
    """What a remote server remembers.

    The server sends the move of the last round.  From it the clients compute xbar and their new control variates h_i.

    Attributes:
        round: number of rounds so far.
        params: xbar, the server's model.
        iterations: t, the number of local iterations so far.
        communications: number of communications so far.
        move: xbar - (previous xbar) of the last round; 0 before the first round.
    """

    round: Int[Array, ""]
    params: Params
    iterations: Int[Array, ""]
    communications: Int[Array, ""]
    move: Params


class RemoteClient(NamedTuple):
    """What a remote client remembers.

    Until the move of a round has arrived, h_i has the value from before that round.

    Attributes:
        id: number of the client.
        drift: e_i, the local change of the model, at the end of the client's last round.
        shift: h_i, the control variate.
        optimum: x_i*, or None without personalization.
        params: xbar, the server's model.
        iterations: t, the number of local iterations so far.
    """

    id: Int[Array, "*n"]
    drift: PyTree
    shift: PyTree
    optimum: PyTree
    params: Params
    iterations: Int[Array, "*n"]


def exchange(value_and_grad: ValueAndGrad, sample: Sample, personal: bool) -> Exchange:
    """The client step and the server step of Scafflix for remote clients.

    A client uploads (alpha_i / gamma_i) e_i.  The download of the next round is the move that these uploads make.  Each
    client replays the shared coins by itself.  All clients have to take part: a client that joins a cohort later would
    need the earlier xbar besides the move.

    Args:
        value_and_grad: (params, rows) -> (loss, gradient) of one client.
        sample: (key, data) -> rows of one client.
        personal: whether clients mix xbar with x_i*; otherwise alpha = 1.

    Returns:
        The exchange.
    """

    def start(state: State) -> State:
        server, rows = state
        n, zeros = len(rows.id), tree.zeros_like(server.params)
        clients = RemoteClient(
            id=rows.id,
            drift=tree.repeat(zeros, n),
            shift=rows.shift,
            optimum=rows.optimum,
            params=tree.repeat(server.params, n),
            iterations=jnp.full(n, server.iterations),
        )
        return State(RemoteServer(**server._asdict(), move=zeros), clients)

    def row_of(client: RemoteClient) -> Client:
        return Client(client.id, client.drift, client.shift, client.optimum)

    def client_step(round: Round, hparams: Any, server: RemoteServer, client: RemoteClient, data: Any) -> ClientResult:
        assert round.run is not None
        run, begin = Run(value_and_grad, sample, hparams, keys_of(round.run)), client.iterations
        last = run.last_iteration(begin)
        row, loss = run.train(client.params, row_of(client), data, begin=begin, last=last)
        return client._replace(drift=row.drift, iterations=last + 1), round.send(upload(hparams, row)[0]), loss

    def commit(hparams: Any, server: RemoteServer, client: RemoteClient) -> RemoteClient:
        """Finish the last round, when its move has arrived."""
        closed = close(hparams, server.move, row_of(client))
        return client._replace(drift=closed.drift, shift=closed.shift, params=tree.add(client.params, server.move))

    def server_step(key: Key, hparams: Any, server: RemoteServer, ids: Array, up: PyTree) -> RemoteServer:
        run = Run(value_and_grad, sample, hparams, keys_of(key))

        def weight(client: Array) -> Array:
            """The weight of `upload`, computed again instead of sent: all parties know alpha and gamma."""
            alpha = client_value(hparams.alpha, client) if personal else 1.0
            return alpha**2 / client_value(hparams.gamma, client)

        move = next_move(*rounds.mean((up, jax.vmap(weight)(ids))))
        after = after_round(server, move, run.last_iteration(server.iterations))
        return RemoteServer(**after._asdict(), move=move)

    return Exchange(
        client_step,
        server_step=None,
        bits_down=bits_down,
        down=("move",),
        compressor=None,
        cohort_size=None,
        joined=server_step,
        start=start,
        commit=commit,
    )
