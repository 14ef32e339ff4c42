"""What the tests of the exchange share: a federation in one process, contracts of all methods and of quadratics."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import ef_bv
from commjax.compressors import identity, m_nice, top_k, wire
from commjax.core import runner
from commjax.core.base import State
from commjax.core.rounds import federated
from commjax.federation import exchange
from commjax.federation.exchange import Contract
from commjax.problems import quadratic
from tests import registry

KEY = jax.random.key(7)


def rows(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def contract_of(name):
    case = registry.build(name)

    def init(ids):
        return case.algorithm.init(case.params, ids, **{k: rows(v, ids) for k, v in case.per_client.items()})

    return Contract(case.algorithm, case.hparams, init, len(case.ids), KEY, rounds=3), case.data


# No exchange of one download and one upload a round, and why:
REFUSED = {
    # A step is one iteration, and most iterations send nothing.  The rounds that do are those of "scafflix".
    "scafflix iterations",
    # Two downloads in a round: a newcomer needs xbar before it starts, and every member the move after it has sent.
    "scafflix cohort",
    # The cohort's solver asks for gradients and trial values several times a round, and a hub is a third party.
    "sppm-as",
    "sppm-as hubs",
    # The members exchange K times in a round.
    "fedprox-sppm-as",
    "fedavg-sppm-as",
    # Its masks and class distributions have no wire format of their own.
    "fedcr layers",
}
ONCE = [name for name in registry.NAMES if name not in REFUSED]
PRIVATE = ("ldp-fedp3", "ldp-fedp3 sent")


class Federation:
    """n clients and a server in one process; nothing but sealed bytes passes between them."""

    def __init__(self, contract, data, secret=None):
        self.contract, self.data = contract, data
        self.secret = secret or (lambda: None)
        self.memory = {i: exchange.first_memory(contract, i) for i in range(contract.n)}
        self.server = exchange.start(contract, jnp.arange(contract.n)).server
        self.counted = {}

    def answers(self, downloads, silent=()):
        uploads = {}
        for i, download in downloads.items():
            if i not in silent:
                data = rows(self.data, i)
                found = exchange.answer(self.contract, i, data, self.memory[i], download, self.secret())
                self.memory[i], uploads[i] = found
        return uploads

    def round(self, silent=()):
        downloads = exchange.downloads(self.contract, self.server, self.counted)
        uploads = self.answers(downloads, silent)
        number = int(self.server.round)
        self.server, report = exchange.close(self.contract, self.server, uploads)
        self.counted |= {i: number for i in uploads}
        return downloads, uploads, report

    def row(self, i):
        """As it is once the server's next download has been opened"""
        like = rows(exchange.start(self.contract, jnp.arange(self.contract.n)).clients, i)
        memory, commit = self.memory[i], self.contract.algorithm.exchange.commit
        if not memory.pending or self.counted.get(i, -1) != memory.pending_round:
            return wire.decode_tree(memory.row, like)
        row = jax.tree.map(jnp.asarray, wire.decode_tree(memory.pending, like))
        return row if commit is None else commit(self.contract.hparams, self.server, row)


def shared(apart, together):
    """The fields of the simulation's tuple that the one in two places has as well, of both"""
    has = lambda one, name: getattr(one, name, None) is not None  # noqa: E731
    names = [name for name in together._fields if has(apart, name) and has(together, name)]
    assert {"round", "params"} <= set(names) or "id" in names
    return [[getattr(one, name) for name in names] for one in (apart, together)]


def equal_bits(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


DATA = jax.tree.map(jnp.asarray, quadratic.random(3, 4, 30, mu=0.5, L=2.0))


TOP, NICE, DENSE = top_k(3), m_nice(2, top_k(3)), identity()


@cache
def quadratics(compressor, batch_fn=runner.full_batch, reduce=None):
    """One object for one compressor: what one test compiled serves the next"""
    algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor, reduce=reduce)
    start = jnp.linspace(-1.0, 1.0, 30)
    return Contract(algorithm, ef_bv.HParams(0.3, 0.4, 0.7), lambda ids: algorithm.init(start, ids), 4, KEY, batch_fn)


BAD = [float("nan"), float("inf"), -float("inf"), 1e300, -1.4e154]


class Server(NamedTuple):
    round: jax.Array
    params: jax.Array


class Client(NamedTuple):
    id: jax.Array


def odd(client_step, bits_down=64.0, advance=0):
    def init(ids):
        return State(Server(jnp.zeros((), jnp.int32), jnp.ones(())), Client(ids))

    def server_step(hparams, server, value):
        return server._replace(round=server.round + advance, params=value)

    algorithm = federated(lambda params, ids: init(ids), client_step, server_step, lambda server: bits_down)
    return Contract(algorithm, None, init, 2, KEY)
