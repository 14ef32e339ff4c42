"""Scafflix in two places: who remembers what, and how a round is closed by the letter that opens the next."""

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
    """A server that is not where its clients are: it sends the move of the last round, from which they know xbar and close h_i."""

    round: Int[Array, ""]
    params: Params
    iterations: Int[Array, ""]
    communications: Int[Array, ""]
    move: Params  # xbar - (the xbar before), 0 at first


class Away(NamedTuple):
    """A client there: h_i is that of the last round until its move has come."""

    id: Int[Array, "*n"]
    drift: PyTree  # e_i with which the last round ended
    shift: PyTree
    optimum: PyTree
    params: Params  # xbar
    iterations: Int[Array, "*n"]


def exchange(value_and_grad: ValueAndGrad, sample: Sample, personal: bool) -> Exchange:
    """A round in two places: up e_i, down the move that they make, which opens the next round.

    A client replays the shared coins by itself.  With a cohort there is none: a newcomer is told xbar before, and the move after.
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
        def weight(id):  # as `upload` has it: all parties know alpha and gamma
            alpha = own(hparams.alpha, id) if personal else 1.0
            return alpha**2 / own(hparams.gamma, id)

        move = next_move(*rounds.mean((up, jax.vmap(weight)(ids))))
        last = first_heads(keys_of(key).coin, hparams.p, server.iterations)
        params = tree.add(server.params, move)
        return Apart(server.round + 1, params, last + 1, server.communications + 1, move)

    def bits_down(server):
        return rounds.dense_bits(server.params)

    return Exchange(client_step, None, bits_down, ("move",), None, None, joined=joined, start=start, commit=commit)
