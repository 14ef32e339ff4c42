"""Scafflix between machines: the client step and the server step.

The download that opens a round contains the move of the round before.  A client finishes that round when it gets it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.algorithms.flix import own
from commjax.algorithms.scafflix.communication import Client, close, first_heads, keys_of, next_move, train, upload
from commjax.core import rounds, tree
from commjax.core.base import Exchange, Params, State
from commjax.core.local import Sample, ValueAndGrad


class Apart(NamedTuple):
    """What a remote server remembers.

    The server sends the move of the last round.  From it the clients compute xbar and their new h_i.

    Attributes:
        round: number of rounds so far.
        params: xbar.
        iterations: t, the number of local iterations so far.
        communications: number of communications so far.
        move: xbar - (previous xbar) of the last round; 0 before the first round.
    """

    round: Int[Array, ""]
    params: Params
    iterations: Int[Array, ""]
    communications: Int[Array, ""]
    move: Params


class Away(NamedTuple):
    """What a remote client remembers.

    Its h_i is that of the last round until the move of that round has arrived.

    Attributes:
        id: number of the client.
        drift: e_i at the end of the client's last round.
        shift: h_i, the control variate.
        optimum: x_i*, or None without personalization.
        params: xbar.
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
        away = Away(
            rows.id,
            tree.repeat(zeros, n),
            rows.shift,
            rows.optimum,
            tree.repeat(server.params, n),
            jnp.full(n, server.iterations),
        )
        return State(Apart(**server._asdict(), move=zeros), away)

    def client_step(round, hparams, server, client, data):
        keys = keys_of(round.run)
        last = first_heads(keys.coin, hparams.p, client.iterations)
        row = Client(client.id, None, client.shift, client.optimum)
        row, loss = train(value_and_grad, sample, keys, hparams, client.params, client.iterations, last, row, data)
        return client._replace(drift=row.drift, iterations=last + 1), round.send(upload(hparams, row)[0]), loss

    def commit(hparams, server, client):
        row = Client(client.id, client.drift, client.shift, client.optimum)
        closed = close(hparams, server.move, row)
        return client._replace(drift=closed.drift, shift=closed.shift, params=tree.add(client.params, server.move))

    def joined(key, hparams, server, ids, up):
        # The weights of `upload` are computed again instead of sent: all parties know alpha and gamma.
        def weight(id):
            alpha = own(hparams.alpha, id) if personal else 1.0
            return alpha**2 / own(hparams.gamma, id)

        move = next_move(*rounds.mean((up, jax.vmap(weight)(ids))))
        last = first_heads(keys_of(key).coin, hparams.p, server.iterations)
        params = tree.add(server.params, move)
        return Apart(server.round + 1, params, last + 1, server.communications + 1, move)

    def bits_down(server):
        return rounds.dense_bits(server.params)

    return Exchange(client_step, None, bits_down, ("move",), None, None, joined=joined, start=start, commit=commit)
