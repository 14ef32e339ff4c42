"""The server's loop on a grid that never leaves the process: who is asked, waited for, counted and refused."""

import re
import sys
from itertools import count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import ef_bv
from commjax.compressors import m_nice, top_k
from commjax.core import runner
from commjax.federation import flower
from commjax.federation.envelope import HEADER_BYTES, seal, unseal
from commjax.federation.exchange import AbsentError, Contract
from commjax.problems import quadratic

pytestmark = pytest.mark.slow

DATA = jax.tree.map(jnp.asarray, quadratic.random(3, 4, 12, mu=0.5, L=2.0))
CONFIG = {"rounds": 3}


def contract_with(compressor):
    algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor)
    hparams = ef_bv.HParams(0.3, 0.4, 0.7)
    made = Contract(algorithm, hparams, lambda ids: algorithm.init(jnp.ones(12), ids), 4, jax.random.key(0))
    return lambda config: made


class Message:
    """What Flower's has, as far as it is used."""

    def __init__(self, content, node=None, kind=None, *, ttl=None, reply_to=None):
        self.content = None if isinstance(content, SimpleNamespace) else content
        self.error = content if isinstance(content, SimpleNamespace) else None
        self.node, self.kind = node, kind
        self.metadata = SimpleNamespace(reply_to_message_id=reply_to and reply_to.id)
        self.id = ""

    def has_error(self):
        return self.error is not None


class App:
    """ClientApp and ServerApp: keeps the functions by their names."""

    def __init__(self):
        self.functions = {}

    def query(self, name):
        return lambda function: self.functions.setdefault(f"query.{name}", function)

    def main(self):
        return lambda function: self.functions.setdefault("main", function)


FLWR = SimpleNamespace(
    Message=Message,
    ConfigRecord=dict,
    RecordDict=dict,
    ClientApp=App,
    ServerApp=App,
    Error=lambda code, reason: SimpleNamespace(code=code, reason=reason),
)


class Grid:
    """`ids`: node -> the client it says it is; `dead`: nodes that are silent; `change`: what happens to an upload."""

    def __init__(self, contract, ids, dead=(), change=lambda node, upload: upload):
        self.client = flower.client_app(contract, lambda config, id: jax.tree.map(lambda leaf: leaf[id], DATA))
        self.contexts = {node: self.context(id) for node, id in ids.items()}
        self.dead, self.change, self.sent, self.numbers = set(dead), change, {}, count()

    @staticmethod
    def context(id=0):
        return SimpleNamespace(run_config=CONFIG, run_id=5, node_config={"partition-id": id}, state={})

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        for message in messages:
            message.id = None if message.node in self.dead and message.node % 2 else f"{next(self.numbers)}"
            self.sent[message.id] = message
        return [message.id for message in messages]

    def pull_messages(self, ids):
        found = []
        for id in ids:
            message = self.sent.pop(id) if id in self.sent and self.sent[id].node not in self.dead else None
            if message is not None:
                upload = self.client.functions[message.kind](message, self.contexts[message.node])
                found.append(self.change(message.node, upload))
        return found


@pytest.fixture(autouse=True)
def no_flower(monkeypatch):
    monkeypatch.setattr(flower, "_flwr", lambda: FLWR)
    monkeypatch.setattr(flower, "_PAUSE", 0.0)


IDS = {10: 2, 11: 0, 12: 3, 13: 1}


def run(compressor, ids=IDS, timeout=5.0, before=lambda grid: None, **how):
    contract = contract_with(compressor)
    grid, seen = Grid(contract, ids, **how), []
    before(grid)
    app = flower.server_app(
        contract, rounds=lambda c: c["rounds"], timeout=lambda c: timeout, on_round=lambda *found: seen.append(found)
    )
    app.functions["main"](grid, Grid.context())
    return contract(CONFIG), seen


def test_a_run_on_the_grid_is_a_run(capsys):
    contract, seen = run(top_k(3))
    state = contract.init(jnp.arange(4))
    state, metrics = runner.run(contract.key, contract.algorithm, contract.hparams, state, DATA, 3)
    np.testing.assert_allclose(seen[-1][1].params, state.server.params, rtol=1e-12)
    assert [report.bits_up for _, _, report in seen] == metrics.bits_up.tolist()
    assert [config for config, _, _ in seen] == [CONFIG] * 3
    assert capsys.readouterr().out.startswith("round 1: Report(loss=")


@pytest.mark.parametrize("node,why", [(12, "no answer within 0.5 s"), (13, "the SuperLink did not take the message")])
def test_a_dead_node_is_absent_where_that_has_a_law_and_an_error_elsewhere(node, why):
    def deaf(contract):
        grid = Grid(contract, IDS)
        answer = grid.client.functions["query.round"]

        def once(message, context):
            if context is grid.contexts[node] and context.state:
                grid.dead.add(node)
            return answer(message, context)

        grid.client.functions["query.round"] = once
        return grid

    def go(compressor, seen):
        contract = contract_with(compressor)
        agreed = contract(CONFIG)._replace(run=5)
        flower.drive(FLWR, deaf(contract), agreed, 4, 0.5, lambda server, report: seen.append(report))

    seen = []
    go(m_nice(2, top_k(3)), seen)
    assert [sorted(report.absent) for report in seen] == [[], [], [IDS[node]], [IDS[node]]]
    assert seen[2].absent == {IDS[node]: why}
    with pytest.raises(AbsentError, match=f"round 2: client {IDS[node]}: {why}"):
        go(top_k(3), [])


def test_a_damaged_or_strange_reply_is_refused_and_the_reason_is_told():
    def damage(node, upload):
        if node == 11 and "commjax" in (upload.content or {}) and len(upload.content["commjax"]["message"]) > 44:
            upload.content["commjax"]["message"] = upload.content["commjax"]["message"][:-1] + b"\xff"
        return upload

    with pytest.raises(AbsentError, match="round 0: client 0: malformed: the checksum is wrong"):
        run(top_k(3), change=damage)

    def strange(node, upload):
        if node == 11 and len(upload.content["commjax"]["message"]) > 44:
            upload.content["commjax"] = {"message": 3.5}
        return upload

    with pytest.raises(AbsentError, match="round 0: client 0: malformed: 0 bytes, a header alone has 44"):
        run(top_k(3), change=strange)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
def test_a_client_whose_message_is_not_finite_is_refused_with_its_name_and_the_round(number):
    def poisoned(round):
        def change(node, upload):
            sealed = (upload.content or {}).get("commjax", {}).get("message", b"")
            if node == 12 and len(sealed) > HEADER_BYTES and int.from_bytes(sealed[16:20], "little") >= round:
                header, payload = unseal(sealed, kind="up", run=int.from_bytes(sealed[8:16], "little"), limit=10**4)
                upload.content["commjax"]["message"] = seal(header, np.float64(number).tobytes() + payload[8:])
            return upload

        return change

    with pytest.raises(AbsentError, match=r"round 1: client 3: the message has 1 of 12 numbers that are not finite"):
        run(top_k(3), change=poisoned(1))
    _, seen = run(m_nice(2, top_k(3)), change=poisoned(0))
    assert all(np.isfinite(server.params).all() for _, server, _ in seen) and len(seen) == 3
    assert {i for _, _, report in seen for i in report.absent} <= {3}


def test_a_client_refuses_with_a_reason_that_the_server_sees(monkeypatch):
    def other_header(header, payload):
        return seal(header._replace(client=header.client + 1) if header.kind == "down" else header, payload)

    monkeypatch.setattr("commjax.federation.server.seal", other_header)
    reason = "client 0: refused: of another client: a download to client 1, this is client 0"
    with pytest.raises(AbsentError, match=reason):
        run(top_k(3))


def test_every_client_has_one_supernode():
    with pytest.raises(ValueError, match="partition-id must be of one SuperNode, got 2 from nodes 3 and 4"):
        run(top_k(3), {1: 0, 2: 1, 3: 2, 4: 2})


@pytest.mark.parametrize("id", [4, -1, "x", 1.0, True, None])
def test_a_supernode_whose_number_is_none_says_so(id):
    reason = f'--node-config must have "partition-id=I", I an integer from 0 to 3, got {id!r}'
    with pytest.raises(
        AbsentError, match=re.escape(f"no SuperNode answers for clients [3]: {{4: {'refused: ' + reason!r}}}")
    ):
        run(top_k(3), {1: 0, 2: 1, 3: 2, 4: id})
    with pytest.raises(AbsentError, match=re.escape("clients [3]: {4: ")):
        run(top_k(3), {1: 0, 2: 1, 3: 2, 4: id}, timeout=1e9)  # all have answered: nobody is waited for


def test_a_supernode_without_a_number_says_so():
    def forget(grid):
        grid.contexts[12].node_config.clear()

    with pytest.raises(AbsentError, match=r"clients \[3\]: \{12: 'refused: --node-config must have .*got None"):
        run(top_k(3), before=forget)


def test_hellos_that_fail_or_are_damaged_do_not_count_and_do_not_end_the_run():
    def broken(node, upload):
        if node == 3:
            return Message(FLWR.Error(0, "out of memory"), reply_to=None if upload is None else Reply(upload))
        if node == 5 and upload.content is not None:
            upload.content["commjax"]["message"] = b"rubbish"
        return upload

    # Nodes 3, 5 and 7 (which the SuperLink does not take) are heard before any good one.
    _, seen = run(top_k(3), {3: 0, 5: 1, 7: 2, **{node + 10: id for node, id in IDS.items()}}, dead=(7,), change=broken)
    assert len(seen) == 3 and all(report.absent == {} for _, _, report in seen)
    with pytest.raises(AbsentError, match=r"clients \[1\]: \{5: 'malformed: 7 bytes, a header alone has 44'\}"):
        run(top_k(3), {2: 0, 5: 1, 4: 2, 6: 3}, change=broken)


class Reply:
    """What an error answers to."""

    def __init__(self, message):
        self.id = message.metadata.reply_to_message_id


def test_too_few_supernodes_are_an_error_after_a_bounded_time():
    with pytest.raises(AbsentError, match=r"3 of 4 SuperNodes are online after 0\.3 s"):
        run(top_k(3), {1: 0, 2: 1, 3: 2}, timeout=0.3)
    with pytest.raises(AbsentError, match=r"no SuperNode answers for clients \[3\]: \{2: 'no answer within 0\.3 s'\}"):
        run(top_k(3), {1: 0, 3: 1, 5: 2, 2: 3}, timeout=0.3, dead=(2,))


def test_without_flower_the_error_names_the_extra(monkeypatch):
    monkeypatch.undo()
    for name in ("flwr", "flwr.app"):  # also where it was imported already
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'commjax\[flower\]'"):
        flower.client_app(contract_with(top_k(1)), lambda config, id: None)
