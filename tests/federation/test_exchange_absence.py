"""Clients that do not answer or send numbers that are not finite: absent where that has a law, else an error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import ef_bv
from commjax.compressors import m_nice
from commjax.core import robust, runner
from commjax.federation import exchange
from commjax.federation.envelope import HEADER_BYTES, RefusedError, seal, unseal
from commjax.federation.exchange import AbsentError
from tests.federation.exchange_cases import BAD, DATA, DENSE, NICE, TOP, Federation, equal_bits, quadratics

pytestmark = pytest.mark.long

SILENT = m_nice(2, DENSE)


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
    downloads = exchange.downloads(contract, federation.server, federation.counted)
    uploads = federation.answers(downloads)  # all answer; the upload of client 1 is lost
    del uploads[1]
    federation.server, report = exchange.close(contract, federation.server, uploads)
    federation.counted |= {i: 1 for i in uploads}
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


def with_number(contract, sealed, number, loss=0.0):
    """An upload of a dense method with one number replaced, sealed anew"""
    header, payload = unseal(sealed, kind="up", run=exchange.fingerprint(contract), limit=10**6)
    return seal(header._replace(loss=loss), payload[:-8] + np.float64(number).tobytes())


def test_a_message_that_is_not_finite_or_absurd_is_refused_with_the_client_and_the_round():
    federation = Federation(quadratics(DENSE), DATA)
    federation.round()
    downloads = exchange.downloads(federation.contract, federation.server, federation.counted)
    uploads = federation.answers(downloads)
    for number in BAD:
        wrong = uploads | {2: with_number(federation.contract, uploads[2], number)}
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
                uploads | {2: with_number(federation.contract, uploads[2], 0.1, loss)},
            )
    large = uploads | {2: with_number(federation.contract, uploads[2], 1.3e154)}
    server, report = exchange.close(federation.contract, federation.server, large)
    assert report.absent == {} and np.isfinite(server.params).all()


def test_where_absence_has_a_law_a_message_that_is_not_finite_is_an_absent_one():
    contract = quadratics(SILENT)
    federation = Federation(contract, DATA)
    downloads = exchange.downloads(contract, federation.server, {})
    uploads = federation.answers(downloads)
    who = next(i for i in range(4) if len(uploads[i]) > HEADER_BYTES)
    damaged = uploads | {who: with_number(contract, uploads[who], np.nan)}
    del uploads[who]
    (found, report), (wanted, other) = (
        exchange.close(contract, federation.server, some) for some in (damaged, uploads)
    )
    equal_bits(found, wanted)
    assert set(report.absent) == set(other.absent) == {who} and "not finite" in report.absent[who]


def test_a_server_whose_params_do_not_stay_finite_stops_and_keeps_the_last_good_ones():
    contract = quadratics(DENSE)._replace(hparams=ef_bv.HParams(1e200, 0.4, 0.7))
    federation = Federation(contract, DATA)
    downloads = exchange.downloads(contract, federation.server, {})
    uploads = {i: with_number(contract, upload, 1e154) for i, upload in federation.answers(downloads).items()}
    before = jax.tree.map(np.array, federation.server)
    with pytest.raises(runner.DivergedError, match=r"params are not finite after round 0 with HParams\(gamma=1e\+200"):
        exchange.close(contract, federation.server, uploads)
    equal_bits(federation.server, before)


def test_a_robust_server_leaves_out_who_is_refused_or_absent():
    contract = quadratics(DENSE, reduce=robust.median())
    federation = Federation(contract, DATA)
    downloads = exchange.downloads(contract, federation.server, {})
    uploads = federation.answers(downloads)
    values = [np.frombuffer(uploads[i][HEADER_BYTES:]) for i in (1, 2)]
    wrong = {0: with_number(contract, uploads[0], np.nan), 1: uploads[1], 2: uploads[2]}
    server, report = exchange.close(contract, federation.server, wrong)
    assert set(report.absent) == {0, 3} and report.absent[3] == "no answer"
    gamma, lam, nu = contract.hparams
    np.testing.assert_allclose(server.shift, lam * np.median(values, axis=0), rtol=1e-13)
    np.testing.assert_allclose(
        server.params, contract.init(jnp.arange(4)).server.params - gamma * nu * np.median(values, axis=0), rtol=1e-13
    )
    assert exchange.fingerprint(contract) != exchange.fingerprint(quadratics(DENSE))
    with pytest.raises(AbsentError, match=r"client 0: .*not finite.*client 3: no answer"):
        exchange.close(contract, federation.server, {0: wrong[0]})
