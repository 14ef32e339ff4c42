"""A round in two places is the round of the simulation: the same bits in the state, the same bits in the ledger."""

import re
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import ef_bv, fedavg
from commjax.compressors import comp, identity, leafwise, m_nice, perm_k, rand_k, rounded, scaled, top_k, vectors
from commjax.core import robust, runner
from commjax.core.base import Message, State
from commjax.core.rounds import federated
from commjax.devices import parallel
from commjax.federation import exchange, fingerprint
from commjax.federation.envelope import HEADER_BYTES, Header, RefusedError, seal, unseal
from commjax.federation.exchange import AbsentError, Contract
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


# No exchange of one letter and one reply a round, and why:
REFUSED = {
    # Its rounds that communicate are those of "scafflix", which has an exchange; here a step is one iteration, and most send nothing.
    "scafflix iterations",
    # A newcomer needs xbar before it starts, and every member the move after it has sent (it closes h_i): two letters in a round.
    "scafflix cohort",
    # The cohort's solver asks for gradients and trial values several times a round, and a hub is a third party.
    "sppm-as", "sppm-as hubs",
    # The members exchange K times in a round.
    "fedprox-sppm-as", "fedavg-sppm-as",
    # Its masks and class distributions have no wire format of their own.
    "fedcr layers",
}  # fmt: skip
ONCE = [name for name in registry.NAMES if name not in REFUSED]
PRIVATE = ("ldp-fedp3", "ldp-fedp3 sent")
# Two programs for one formula: XLA adds up a product of all clients' rows in another order than one client's, and fuses a product and a
# sum in one of them only.
ROUNDED = (
    "ef-bv network", "ldp-fedp3 sent", "fedp3 attention", "scafflix", "i-scaffnew", "flix", "fedcr",
    "fedp3 released",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_that_are_no_exchange_of_one_message_a_round_are_refused(name):
    with pytest.raises(ValueError, match="must exchange once a round"):
        exchange.fingerprint(contract_of(name)[0])


class Federation:
    """n clients and a server in one process; nothing but sealed bytes passes between them."""

    def __init__(self, contract, data, secret=None):
        self.contract, self.data = contract, data
        self.secret = secret or (lambda: None)
        self.memory = {i: exchange.first_memory(contract, i) for i in range(contract.n)}
        self.server = exchange.start(contract, jnp.arange(contract.n)).server
        self.counted = {}

    def answers(self, letters, silent=()):
        replies = {}
        for i, letter in letters.items():
            if i not in silent:
                own = rows(self.data, i)
                found = exchange.answer(self.contract, i, own, self.memory[i], letter, self.secret())
                self.memory[i], replies[i] = found
        return replies

    def round(self, silent=()):
        letters = exchange.letters(self.contract, self.server, self.counted)
        replies = self.answers(letters, silent)
        number = int(self.server.round)
        self.server, report = exchange.close(self.contract, self.server, replies)
        self.counted |= {i: number for i in replies}
        return letters, replies, report

    def row(self, i):
        """As it is once the server's next letter has been opened"""
        like = rows(exchange.start(self.contract, jnp.arange(self.contract.n)).clients, i)
        memory, commit = self.memory[i], self.contract.algorithm.exchange.commit
        if not memory.pending or self.counted.get(i, -1) != memory.pending_round:
            return exchange.wire.decode_tree(memory.row, like)
        row = jax.tree.map(jnp.asarray, exchange.wire.decode_tree(memory.pending, like))
        return row if commit is None else commit(self.contract.hparams, self.server, row)


def shared(apart, together):
    """The fields of the simulation's tuple that the one in two places has as well, of both"""
    has = lambda one, name: getattr(one, name, None) is not None  # noqa: E731
    names = [name for name in together._fields if has(apart, name) and has(together, name)]
    assert {"round", "params"} <= set(names) or "id" in names
    return [[getattr(one, name) for name in names] for one in (apart, together)]


def close(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def equal_bits(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", ONCE)
def test_every_method_that_exchanges_once_runs_on_letters_and_pays_what_the_ledger_says(name):
    contract, data = contract_of(name)
    key_step, _ = jax.random.split(KEY)
    # A simulation's noise comes from the key of its round: a secret that is none.
    known = lambda: jax.random.fold_in(key_step, federation.server.round)  # noqa: E731
    federation = Federation(contract, data, known if name in PRIVATE else None)
    state, step = contract.init(jnp.arange(contract.n)), jax.jit(contract.algorithm.step)
    for _ in range(2):
        letters, replies, report = federation.round()
        state, metrics = step(key_step, contract.hparams, state, data)
        equal = close if name in ROUNDED else equal_bits
        equal(*shared(federation.server, state.server))
        for i in range(contract.n):
            equal(*shared(federation.row(i), rows(state.clients, i)))
        if name == "fedp3 attention":  # the server's own, where it is not where the clients are
            equal(federation.server.logits, state.clients.logits)
        assert report.bits_up == pytest.approx(float(metrics.bits_up), rel=1e-12)
        assert report.bits_down == pytest.approx(float(metrics.bits_down), rel=1e-12)
        told = np.nan if name in PRIVATE else float(metrics.loss)
        assert report.loss == pytest.approx(told, rel=1e-10, nan_ok=True) and report.absent == {}
        weighed = [sum(len(one) - HEADER_BYTES for one in way.values()) for way in (replies, letters)]
        assert 8 * np.array(weighed) / contract.n == pytest.approx([report.bits_up, report.bits_down], rel=1e-12)
        assert report.header_bytes == HEADER_BYTES * (len(letters) + len(replies))


DATA = jax.tree.map(jnp.asarray, quadratic.random(3, 4, 30, mu=0.5, L=2.0))


TOP, NICE, DENSE = top_k(3), m_nice(2, top_k(3)), identity()
SILENT = m_nice(2, DENSE)


@cache
def quadratics(compressor, batch_fn=runner.full_batch, reduce=None):
    """One object for one compressor: what one test compiled serves the next"""
    algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor, reduce=reduce)
    start = jnp.linspace(-1.0, 1.0, 30)
    return Contract(algorithm, ef_bv.HParams(0.3, 0.4, 0.7), lambda ids: algorithm.init(start, ids), 4, KEY, batch_fn)


def test_the_trajectory_is_that_of_one_client_a_device_bit_for_bit():
    contract = quadratics(NICE)
    federation, state = Federation(contract, DATA), contract.init(jnp.arange(4))
    step = parallel.shard_step(contract.algorithm, parallel.client_mesh(4))
    for _ in range(4):
        _, _, report = federation.round()
        state, metrics = step(jax.random.split(KEY)[0], contract.hparams, state, DATA)
        equal_bits(federation.server, state.server)
        for i in range(4):
            equal_bits(federation.row(i), rows(state.clients, i))
        assert (report.bits_up, report.bits_down) == (float(metrics.bits_up), float(metrics.bits_down))


def test_minibatches_are_drawn_as_in_a_run():
    def half(key, ids, data):
        keys = jax.vmap(lambda id: jax.random.fold_in(key, id))(ids)
        weight = jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)
        return data._replace(H=data.H * weight[:, None, None])

    contract = quadratics(TOP, half)
    federation = Federation(contract, DATA)
    for _ in range(3):
        federation.round()
    state = contract.init(jnp.arange(4))
    state, _ = runner.run(KEY, contract.algorithm, contract.hparams, state, DATA, 3, half)
    np.testing.assert_allclose(federation.server.params, state.server.params, rtol=1e-12)


def mean_is_kept(federation):
    mean = np.mean([federation.row(i).shift for i in range(4)], axis=0)
    np.testing.assert_allclose(federation.server.shift, mean, rtol=1e-13, atol=1e-15)


def test_where_absence_has_a_law_the_run_goes_on_and_the_shifts_still_average():
    federation = Federation(quadratics(NICE), DATA)
    for silent in [(), (3,), (3,), (0, 1), (), ()]:
        _, _, report = federation.round(silent)
        assert set(report.absent) == set(silent) and set(report.absent.values()) <= {"no answer"}
        mean_is_kept(federation)


def test_where_absence_has_no_law_it_is_an_error_that_says_who_and_why():
    federation = Federation(quadratics(TOP), DATA)
    federation.round()
    with pytest.raises(AbsentError, match=r"round 1: client 2: no answer\.  top-3 has no theory .*m_nice has"):
        federation.round(silent=(2,))
    with pytest.raises(AbsentError, match="client 0: lost on the way; client 1: no answer"):
        exchange.close(federation.contract, federation.server, {}, {0: "lost on the way"})


def test_nobody_at_all_is_an_error_even_where_absence_has_a_law():
    federation = Federation(quadratics(NICE), DATA)
    with pytest.raises(AbsentError, match="client 3: no answer"):
        federation.round(silent=(0, 1, 2, 3))


def test_a_reply_that_came_too_late_is_forgotten_by_the_client_as_well():
    contract = quadratics(NICE)
    federation = Federation(contract, DATA)
    federation.round()
    letters = exchange.letters(contract, federation.server, federation.counted)
    replies = federation.answers(letters)  # all answer; the reply of client 1 is lost
    del replies[1]
    federation.server, report = exchange.close(contract, federation.server, replies)
    federation.counted |= {i: 1 for i in replies}
    assert set(report.absent) == {1}
    mean_is_kept(federation)
    for _ in range(3):
        federation.round()
        mean_is_kept(federation)


def test_a_client_that_lost_its_state_is_refused():
    federation = Federation(quadratics(NICE), DATA)
    federation.round()
    federation.memory[1] = exchange.first_memory(federation.contract, 1)
    with pytest.raises(RefusedError, match="client 1 was counted in round 0, but remembers none: its state is lost"):
        federation.round()


def test_letters_and_replies_of_others_are_refused():
    contract = quadratics(TOP)
    federation = Federation(contract, DATA)
    letters = exchange.letters(contract, federation.server, {})
    answer = lambda letter, by=contract: exchange.answer(by, 0, rows(DATA, 0), federation.memory[0], letter)  # noqa: E731
    with pytest.raises(RefusedError, match="foreign: a download to client 1, this is client 0"):
        answer(letters[1])
    for other in (contract._replace(run=1), contract._replace(key=jax.random.key(8)), quadratics(top_k(2))):
        with pytest.raises(RefusedError, match="foreign: a message of run"):
            answer(letters[0], other)
    with pytest.raises(RefusedError, match="oversized"):
        answer(letters[0] + b"\0")
    run = exchange.fingerprint(contract)
    with pytest.raises(RefusedError, match="malformed: "):
        answer(seal(Header("down", run, 0, 0), letters[0][HEADER_BYTES:-8]))

    replies = federation.answers(letters)
    payload = replies[0][HEADER_BYTES:]
    for wrong, reason in [
        (replies[1], "client 0: foreign: from client 1 in round 0, not 0 in 0"),
        (seal(Header("up", run, 4, 0), payload), "foreign: from client 0 in round 4, not 0 in 0"),
        (seal(Header("up", run, 0, 0), payload + b"\0"), "client 0: oversized"),
        (seal(Header("up", run, 0, 0), payload[:-1]), "client 0: a field of 12 bits has 2 bytes, got 1"),
        (replies[0][:-1] + b"\xff", "client 0: malformed: the checksum is wrong"),
    ]:
        with pytest.raises(AbsentError, match=reason):
            exchange.close(contract, federation.server, replies | {0: wrong})


def with_number(contract, sealed, number, loss=0.0):
    """A reply of a dense method with one number replaced, sealed anew"""
    header, payload = unseal(sealed, kind="up", run=exchange.fingerprint(contract), limit=10**6)
    return seal(header._replace(loss=loss), payload[:-8] + np.float64(number).tobytes())


BAD = [float("nan"), float("inf"), -float("inf"), 1e300, -1.4e154]


def test_a_message_that_is_not_finite_or_absurd_is_refused_with_the_client_and_the_round():
    federation = Federation(quadratics(DENSE), DATA)
    federation.round()
    letters = exchange.letters(federation.contract, federation.server, federation.counted)
    replies = federation.answers(letters)
    for number in BAD:
        wrong = replies | {2: with_number(federation.contract, replies[2], number)}
        message = (
            rf"round 1: client 2: the message has 1 of 30 numbers .* such as {re.escape(str(number))}; .*1.34e\+154"
        )
        with pytest.raises(AbsentError, match=message):
            exchange.close(federation.contract, federation.server, wrong)
    for loss in (float("nan"), float("inf")):
        with pytest.raises(AbsentError, match=f"round 1: client 2: the loss it reports is {loss}; allowed: finite"):
            exchange.close(
                federation.contract,
                federation.server,
                replies | {2: with_number(federation.contract, replies[2], 0.1, loss)},
            )
    large = replies | {2: with_number(federation.contract, replies[2], 1.3e154)}
    server, report = exchange.close(federation.contract, federation.server, large)
    assert report.absent == {} and np.isfinite(server.params).all()


def test_where_absence_has_a_law_a_message_that_is_not_finite_is_an_absent_one():
    contract = quadratics(SILENT)
    federation = Federation(contract, DATA)
    letters = exchange.letters(contract, federation.server, {})
    replies = federation.answers(letters)
    who = next(i for i in range(4) if len(replies[i]) > HEADER_BYTES)
    damaged = replies | {who: with_number(contract, replies[who], np.nan)}
    del replies[who]
    (found, report), (wanted, other) = (
        exchange.close(contract, federation.server, some) for some in (damaged, replies)
    )
    equal_bits(found, wanted)
    assert set(report.absent) == set(other.absent) == {who} and "not finite" in report.absent[who]


def test_a_server_whose_params_do_not_stay_finite_stops_and_keeps_the_last_good_ones():
    contract = quadratics(DENSE)._replace(hparams=ef_bv.HParams(1e200, 0.4, 0.7))
    federation = Federation(contract, DATA)
    letters = exchange.letters(contract, federation.server, {})
    replies = {i: with_number(contract, reply, 1e154) for i, reply in federation.answers(letters).items()}
    before = jax.tree.map(np.array, federation.server)
    with pytest.raises(runner.DivergedError, match=r"params are not finite after round 0 with HParams\(gamma=1e\+200"):
        exchange.close(contract, federation.server, replies)
    equal_bits(federation.server, before)


def test_a_robust_server_leaves_out_who_is_refused_or_absent():
    contract = quadratics(DENSE, reduce=robust.median())
    federation = Federation(contract, DATA)
    letters = exchange.letters(contract, federation.server, {})
    replies = federation.answers(letters)
    values = [np.frombuffer(replies[i][HEADER_BYTES:]) for i in (1, 2)]
    wrong = {0: with_number(contract, replies[0], np.nan), 1: replies[1], 2: replies[2]}
    server, report = exchange.close(contract, federation.server, wrong)
    assert set(report.absent) == {0, 3} and report.absent[3] == "no answer"
    gamma, lam, nu = contract.hparams
    np.testing.assert_allclose(server.shift, lam * np.median(values, axis=0), rtol=1e-13)
    np.testing.assert_allclose(server.params, contract.init(jnp.arange(4)).server.params - gamma * nu * np.median(values, axis=0), rtol=1e-13)  # fmt: skip
    assert exchange.fingerprint(contract) != exchange.fingerprint(quadratics(DENSE))
    with pytest.raises(AbsentError, match=r"client 0: .*not finite.*client 3: no answer"):
        exchange.close(contract, federation.server, {0: wrong[0]})


def test_a_download_that_is_not_finite_or_of_an_impossible_round_is_refused_by_the_client():
    contract = quadratics(DENSE)
    run, memory = exchange.fingerprint(contract), exchange.first_memory(contract, 0)
    params = np.linspace(-1.0, 1.0, 30)

    def answered(params, round=0):
        return exchange.answer(
            contract, 0, rows(DATA, 0), memory, seal(Header("down", run, round, 0), params.tobytes())
        )

    for number in BAD:
        with pytest.raises(
            RefusedError, match="the download of round 0 to client 0 has 1 of 30 numbers that are not finite"
        ):
            answered(np.where(np.arange(30) == 4, number, params))
    for round in (2**31, 2**32 - 1):
        with pytest.raises(RefusedError, match=f"client 0 was asked for round {round}; allowed: 0 to 2147483647"):
            answered(params, round)
    assert answered(params, 2**31 - 1)[0].pending_round == 2**31 - 1


@pytest.mark.parametrize("step", [0, 2])
def test_the_core_counts_the_rounds_whatever_a_server_step_does(step):
    def client_step(round, hparams, server, client, data):
        return client, round.send(server.params + data + jax.random.uniform(round.key, ())), data

    contract = odd(client_step, advance=step)
    federation = Federation(contract, jnp.ones(2))
    state, (after, _) = contract.init(jnp.arange(2)), (None, None)
    seen = []
    for number in range(3):
        assert int(federation.server.round) == int(state.server.round) == number
        federation.round()
        state, _ = contract.algorithm.step(jax.random.split(KEY)[0], None, state, jnp.ones(2))
        np.testing.assert_allclose(federation.server.params, state.server.params, rtol=1e-14)
        seen.append(float(state.server.params))
    assert len(set(np.diff([1.0, *seen]))) == 3  # new randomness in every round
    after, _ = runner.run(KEY, contract.algorithm, None, contract.init(jnp.arange(2)), jnp.ones(2), 3)
    assert int(after.server.round) == 3 and float(after.server.params) == pytest.approx(seen[-1], rel=1e-14)


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


def test_a_method_that_does_not_keep_to_the_one_way_up_is_refused():
    def speaks_otherwise(round, hparams, server, client, data):
        return client, Message(data, jnp.zeros(())), data

    def twice(round, hparams, server, client, data):
        return client, round.send(round.send(data).value), data

    def changes_it(round, hparams, server, client, data):
        return client, round.send(data)._replace(value=data), data

    for step, times in ((speaks_otherwise, 0), (twice, 2), (changes_it, 1)):
        with pytest.raises(ValueError, match=f"must return what one round.send gave it, it called it {times} times"):
            Federation(odd(step), jnp.ones(2)).round()


def test_a_contract_with_hparams_or_a_key_that_the_method_does_not_take_is_refused():
    contract = quadratics(TOP)
    with pytest.raises(TypeError, match=r"hparams must be ef_bv.HParams\(gamma, lam, nu\), got fedavg.HParams"):
        exchange.halves(contract._replace(hparams=fedavg.HParams(0.1)))
    with pytest.raises(ValueError, match=r"lam=-0.4; allowed: at least 0"):
        exchange.fingerprint(contract._replace(hparams=contract.hparams._replace(lam=-0.4)))
    with pytest.raises(TypeError, match=r"key must be one key, jax.random.key\(seed\), got int 3"):
        exchange.halves(contract._replace(key=3))


def test_a_method_whose_letters_have_another_price_than_its_ledger_says_is_refused():
    with pytest.raises(ValueError, match=r"down=\('params',\) has 64 bits, but the algorithm's ledger says 12"):
        exchange.halves(odd(lambda *_: None, 12.0))
    contract, _ = contract_of("sketched pruned")
    halves = contract.algorithm.exchange
    dear = halves._replace(letter=halves.letter._replace(bits=lambda server, id: 641.0))
    contract = contract._replace(algorithm=contract.algorithm._replace(exchange=dear))
    with pytest.raises(ValueError, match="the download to client 0 has 640 bits, but the ledger says 641"):
        exchange.letters(contract, exchange.start(contract, jnp.arange(8)).server, {})


def test_a_client_cannot_read_what_was_not_sent_to_it():
    def peeks(round, hparams, server, client, data):
        return client, round.send(data + server.shift), data

    algorithm = federated(
        ef_bv.gd(jax.value_and_grad(quadratic.loss)).init,
        peeks,
        lambda *_: None,
        lambda server: 64.0 * server.params.size,
    )
    contract = Contract(algorithm, None, lambda ids: algorithm.init(jnp.ones(2), ids), 2, KEY)
    with pytest.raises(TypeError, match="None"):
        Federation(contract, jnp.ones((2, 2))).round()


def test_what_the_server_knows_does_not_determine_the_noise_and_no_loss_is_sent():
    contract, data = contract_of("ldp-fedp3")
    one, two = Federation(contract, data), Federation(contract, data)
    first, second = one.round(), two.round()
    assert first[0] == second[0]  # all that the server said and knows
    for i in range(contract.n):
        assert first[1][i][:HEADER_BYTES][:-4] == second[1][i][:HEADER_BYTES][:-4]  # all but the checksum
        assert np.isnan(unseal(first[1][i], kind="up", run=exchange.fingerprint(contract), limit=99)[0].loss)
        assert first[1][i][HEADER_BYTES:] != second[1][i][HEADER_BYTES:]
    assert np.isnan(first[2].loss)
    # The noise has the deviation that the method says: gamma z C / (q m) on the coordinates that a client sends.
    quiet = contract._replace(
        hparams=contract.hparams._replace(clip=1e-12, noise=1e12 * contract.hparams.noise, rate=1.0)
    )
    gamma, clip, z, q = (float(value) for value in quiet.hparams)
    moved = []
    for _ in range(8):
        federation = Federation(quiet, data)
        federation.round()
        moved.append(np.asarray(federation.server.params - contract.init(jnp.arange(8)).server.params))
    expected = gamma * z * clip / (q * 6)
    assert np.std(moved) == pytest.approx(expected, rel=0.25) and np.abs(np.mean(moved)) < 0.25 * expected


def test_a_private_client_answers_every_round_once_and_no_more_than_the_accountant_counts():
    contract, data = contract_of("ldp-fedp3")
    federation = Federation(contract, data)
    before = exchange.first_memory(contract, 0)
    letters = exchange.letters(contract, federation.server, {})
    memory, _ = exchange.answer(contract, 0, rows(data, 0), before, letters[0])
    with pytest.raises(RefusedError, match=r"client 0 answers each of 3 rounds .* once, in order, not 0 after 0"):
        exchange.answer(contract, 0, rows(data, 0), memory, letters[0])
    for _ in range(3):
        federation.round()
    with pytest.raises(RefusedError, match="not 3 after 2"):
        federation.round()
    with pytest.raises(ValueError, match="rounds must be given with a private method"):
        exchange.halves(contract._replace(rounds=None))
    with pytest.raises(ValueError, match="batch_fn must be full_batch with a private method"):
        exchange.halves(contract._replace(batch_fn=runner.minibatches(2)))
    with pytest.raises(ValueError, match="secret: this method is not private"):
        Federation(quadratics(TOP), DATA, lambda: KEY).round()


def test_contracts_whose_halves_or_batches_differ_are_foreign():
    def made(steps, loss=quadratic.loss, batch_fn=runner.full_batch):
        algorithm = fedavg.fedavg(jax.value_and_grad(loss), steps=steps)
        return exchange.fingerprint(
            Contract(algorithm, fedavg.HParams(0.1), lambda ids: algorithm.init(jnp.ones(2), ids), 2, KEY, batch_fn)
        )

    def doubled(x, data):
        return 2 * quadratic.loss(x, data)

    assert made(3) == made(3) and made(3, batch_fn=runner.minibatches(2)) == made(3, batch_fn=runner.minibatches(2))
    different = [made(3), made(5), made(3, doubled), *(made(3, batch_fn=runner.minibatches(size)) for size in (2, 3))]
    assert len(set(different)) == 5


def test_a_digest_of_functions_sees_what_they_close_over():
    def of(value, default=1):
        def inner(x, y=default):
            return inner if value is None else x + y

        return inner

    same = [of(2), of((1, {"b": 2, "a": np.ones(2)})), of(None), partial(of(2), y=3), of(top_k(2)), jax.jit(of(2))]
    again = [of(2), of((1, {"a": np.ones(2), "b": 2})), of(None), partial(of(2), y=3), of(top_k(2)), jax.jit(of(2))]
    found = [fingerprint.digest(one) for one in same]
    assert found == [fingerprint.digest(one) for one in again] and len(set(found)) == 6
    others = [of(3), of((1, {"b": 2, "a": np.zeros(2)})), of(2, 2), partial(of(2), y=4), of(top_k(3)), jax.jit(of(3))]
    assert not set(found) & {fingerprint.digest(one) for one in others}
    bare = eval("lambda x: x + 1", {})  # no source
    assert fingerprint.digest(bare) == fingerprint.digest(eval("lambda x: x + 1", {}))
    assert fingerprint.digest(bare) != fingerprint.digest(eval("lambda x: x * 2 + x", {}))
    assert fingerprint.digest(top_k(2).compress) != fingerprint.digest(comp(2, 3).compress)


LARGE = 2**24 + 1  # parameters: 32 times as many bits are no float32
LENGTHS = [
    (identity(), 4 * LARGE),
    (top_k(2**22 + 1), 4 * (2**22 + 1) + -(-LARGE // 8)),  # more than a quarter: a bitmap
    (rand_k(2**23 + 1), 4 * (2**23 + 1)),
    (scaled(0.5, identity()), 4 * LARGE),
    (rounded(identity(), jnp.bfloat16), 2 * LARGE),
    (leafwise(identity()), 4 * LARGE),
    (m_nice(1, identity()), 4 * LARGE),
]


@pytest.mark.parametrize("compressor, size", LENGTHS, ids=lambda one: getattr(one, "name", None))
def test_lengths_are_exact_integers_where_bits_are_no_float32(compressor, size):
    like = jax.ShapeDtypeStruct((LARGE,), np.float32)
    assert vectors.payload_bytes(compressor, KEY, like, 0, 1) == size
    assert isinstance(vectors.payload_bytes(compressor, KEY, like, 0, 1), int)
    assert int(np.float32(32 * LARGE)) != 32 * LARGE  # the ledger, where it is float32


@pytest.mark.parametrize("compressor", [perm_k(), m_nice(2, top_k(3)), comp(2, 5), leafwise(m_nice(2, perm_k())), leafwise(top_k(2))])  # fmt: skip
def test_the_length_of_a_message_is_that_of_its_bytes(compressor):
    x = {"a": jnp.arange(8.0, dtype=jnp.float32), "b": jnp.ones((3, 1), jnp.float32)}
    for number in range(4):
        key = jax.random.fold_in(KEY, number)
        for i in range(3):
            data = compressor.encode(key, x, i, 3)
            assert compressor.length(key, x, i, 3) == len(data)
            # What a compressor of one's own, without `length`, falls back to.
            assert vectors.payload_bytes(compressor._replace(length=None), key, x, i, 3) == len(data)


def test_an_honest_message_of_more_than_2_24_parameters_is_accepted():
    with jax.enable_x64(False):
        algorithm = ef_bv.gd(lambda x, data: (jnp.sum(x * data), jnp.full_like(x, data)))
        start = jnp.zeros(LARGE, jnp.float32)
        contract = Contract(algorithm, ef_bv.HParams(0.5, 1.0, 1.0), lambda ids: algorithm.init(start, ids), 1, KEY)
        server = contract.init(jnp.arange(1)).server
        payload = np.ones(LARGE, np.float32).tobytes()
        reply = seal(Header("up", exchange.fingerprint(contract), 0, 0), payload)
        server, report = exchange.close(contract, server, {0: reply})
        assert report.bits_up == report.bits_down == 32 * LARGE and np.unique(server.params).tolist() == [-0.5]
        with pytest.raises(AbsentError, match="client 0: oversized: "):
            exchange.close(contract, server._replace(round=server.round - 1), {0: reply + b"\0"})
