"""What an exchange refuses: downloads of others, bad downloads, methods that do not send once a round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import ef_bv, fedavg
from commjax.compressors import top_k
from commjax.core import runner
from commjax.core.base import Message
from commjax.core.rounds import federated
from commjax.federation import exchange
from commjax.federation.envelope import HEADER_BYTES, Header, RefusedError, seal
from commjax.federation.exchange import AbsentError, Contract
from commjax.problems import quadratic
from tests.federation.exchange_cases import BAD, DATA, DENSE, KEY, TOP, Federation, contract_of, odd, quadratics, rows

pytestmark = pytest.mark.long


def test_downloads_and_uploads_of_others_are_refused():
    contract = quadratics(TOP)
    federation = Federation(contract, DATA)
    downloads = exchange.downloads(contract, federation.server, {})

    def answer(download, by=contract):
        return exchange.answer(by, 0, rows(DATA, 0), federation.memory[0], download)

    with pytest.raises(RefusedError, match="of another client: a download to client 1, this is client 0"):
        answer(downloads[1])
    for other in (contract._replace(run=1), contract._replace(key=jax.random.key(8)), quadratics(top_k(2))):
        with pytest.raises(RefusedError, match="of another run: "):
            answer(downloads[0], other)
    with pytest.raises(RefusedError, match="oversized"):
        answer(downloads[0] + b"\0")
    run = exchange.fingerprint(contract)
    with pytest.raises(RefusedError, match="malformed: "):
        answer(seal(Header("down", run, 0, 0), downloads[0][HEADER_BYTES:-8]))

    uploads = federation.answers(downloads)
    payload = uploads[0][HEADER_BYTES:]
    for wrong, reason in [
        (uploads[1], "client 0: of another client or round: from client 1 in round 0, not 0 in 0"),
        (seal(Header("up", run, 4, 0), payload), "of another client or round: from client 0 in round 4, not 0 in 0"),
        (seal(Header("up", run, 0, 0), payload + b"\0"), "client 0: oversized"),
        (seal(Header("up", run, 0, 0), payload[:-1]), "client 0: a field of 12 bits has 2 bytes, got 1"),
        (uploads[0][:-1] + b"\xff", "client 0: malformed: the checksum is wrong"),
    ]:
        with pytest.raises(AbsentError, match=reason):
            exchange.close(contract, federation.server, uploads | {0: wrong})


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
        exchange.exchange_of(contract._replace(hparams=fedavg.HParams(0.1)))
    with pytest.raises(ValueError, match=r"lam=-0.4; allowed: at least 0"):
        exchange.fingerprint(contract._replace(hparams=contract.hparams._replace(lam=-0.4)))
    with pytest.raises(TypeError, match=r"key must be one key, jax.random.key\(seed\), got int 3"):
        exchange.exchange_of(contract._replace(key=3))


def test_a_method_whose_downloads_have_other_bits_than_its_ledger_says_is_refused():
    with pytest.raises(ValueError, match=r"down=\('params',\) has 64 bits, but the algorithm's ledger says 12"):
        exchange.exchange_of(odd(lambda *_: None, 12.0))
    contract, _ = contract_of("sketched pruned")
    remote = contract.algorithm.exchange
    other = remote._replace(download=remote.download._replace(bits=lambda server, id: 641.0))
    contract = contract._replace(algorithm=contract.algorithm._replace(exchange=other))
    with pytest.raises(ValueError, match="the download to client 0 has 640 bits, but the ledger says 641"):
        exchange.downloads(contract, exchange.start(contract, jnp.arange(8)).server, {})


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


def test_contracts_whose_steps_or_batches_differ_are_of_different_runs():
    def identity_of(steps, loss=quadratic.loss, batch_fn=runner.full_batch):
        algorithm = fedavg.fedavg(jax.value_and_grad(loss), steps=steps)
        return exchange.fingerprint(
            Contract(algorithm, fedavg.HParams(0.1), lambda ids: algorithm.init(jnp.ones(2), ids), 2, KEY, batch_fn)
        )

    def doubled(x, data):
        return 2 * quadratic.loss(x, data)

    assert identity_of(3) == identity_of(3) and identity_of(3, batch_fn=runner.minibatches(2)) == identity_of(
        3, batch_fn=runner.minibatches(2)
    )
    different = [
        identity_of(3),
        identity_of(5),
        identity_of(3, doubled),
        *(identity_of(3, batch_fn=runner.minibatches(size)) for size in (2, 3)),
    ]
    assert len(set(different)) == 5
