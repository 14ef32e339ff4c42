"""A round in two places is the round of the simulation: the same bits in the state, the same bits in the ledger."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core import runner
from commjax.devices.mesh import client_mesh, shard_step
from commjax.federation import exchange
from commjax.federation.envelope import HEADER_BYTES, RefusedError, unseal
from tests.federation.exchange_cases import (
    DATA,
    KEY,
    NICE,
    ONCE,
    PRIVATE,
    REFUSED,
    TOP,
    Federation,
    contract_of,
    equal_bits,
    odd,
    quadratics,
    rows,
    shared,
)

pytestmark = pytest.mark.long

# Two programs for one formula: XLA adds up a product of all clients' rows in another order than one client's, and
# fuses a product and a sum in one of them only.
ROUNDED = (
    "ef-bv network",
    "ldp-fedp3 sent",
    "fedp3 attention",
    "scafflix",
    "i-scaffnew",
    "flix",
    "fedcr",
    "fedp3 released",
)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_that_are_no_exchange_of_one_message_a_round_are_refused(name):
    with pytest.raises(ValueError, match="must exchange once a round"):
        exchange.fingerprint(contract_of(name)[0])


def close(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ONCE)
def test_every_method_that_exchanges_once_runs_on_letters_and_pays_what_the_ledger_says(name):
    contract, data = contract_of(name)
    key_step, _ = jax.random.split(KEY)
    # A simulation's noise comes from the key of its round: a secret that is none.
    known = lambda: jax.random.fold_in(key_step, federation.server.round)  # noqa: E731
    federation = Federation(contract, data, known if name in PRIVATE else None)
    state, step = contract.init(jnp.arange(contract.n)), jax.jit(contract.algorithm.step)
    for _ in range(2):
        downloads, uploads, report = federation.round()
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
        weighed = [sum(len(one) - HEADER_BYTES for one in way.values()) for way in (uploads, downloads)]
        assert 8 * np.array(weighed) / contract.n == pytest.approx([report.bits_up, report.bits_down], rel=1e-12)
        assert report.header_bytes == HEADER_BYTES * (len(downloads) + len(uploads))


def test_the_trajectory_is_that_of_one_client_a_device_bit_for_bit():
    contract = quadratics(NICE)
    federation, state = Federation(contract, DATA), contract.init(jnp.arange(4))
    step = shard_step(contract.algorithm, client_mesh(4))
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
    state, _ = runner.run(KEY, contract.algorithm, contract.hparams, state, DATA, 3, batch_fn=half)
    np.testing.assert_allclose(federation.server.params, state.server.params, rtol=1e-12)


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
    # The secrets are not seeded: five standard errors of a deviation and of a mean, so that one run in a million fails.
    error = 5 / np.sqrt(np.size(moved))
    assert (
        np.std(moved) == pytest.approx(expected, rel=error / np.sqrt(2)) and np.abs(np.mean(moved)) < error * expected
    )


def test_a_private_client_answers_every_round_once_and_no_more_than_the_accountant_counts():
    contract, data = contract_of("ldp-fedp3")
    federation = Federation(contract, data)
    before = exchange.first_memory(contract, 0)
    downloads = exchange.downloads(contract, federation.server, {})
    memory, _ = exchange.answer(contract, 0, rows(data, 0), before, downloads[0])
    with pytest.raises(RefusedError, match=r"client 0 answers each of 3 rounds .* once, in order, not 0 after 0"):
        exchange.answer(contract, 0, rows(data, 0), memory, downloads[0])
    for _ in range(3):
        federation.round()
    with pytest.raises(RefusedError, match="not 3 after 2"):
        federation.round()
    with pytest.raises(ValueError, match="rounds must be given with a private method"):
        exchange.exchange_of(contract._replace(rounds=None))
    with pytest.raises(ValueError, match="batch_fn must be full_batch with a private method"):
        exchange.exchange_of(contract._replace(batch_fn=runner.minibatches(2)))
    with pytest.raises(ValueError, match="secret: this method is not private"):
        Federation(quadratics(TOP), DATA, lambda: KEY).round()
