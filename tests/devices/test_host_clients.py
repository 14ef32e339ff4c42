"""A cohort of many clients: the trajectory of the whole simulation, in memory that does not grow with the number of
clients."""

import contextlib
import time
import tracemalloc
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors
from commjax.algorithms import ef_bv, fedavg, scafflix, scaffold
from commjax.core import runner
from commjax.devices import host_clients
from commjax.problems import quadratic
from tests.compressors.zoo import ZOO
from tests.devices.host_clients_cases import HPARAMS, KEY, nice_ef_bv, run_of
from tests.registry import PROBLEM, VALUE_AND_GRAD, D, N, start

pytestmark = pytest.mark.slow

DATA = jax.tree.map(np.asarray, PROBLEM)
M, ROUNDS = 3, 5


def fetch(ids):
    return jax.tree.map(lambda leaf: leaf[ids], DATA)


def nice_members(key, number, n, size):
    """The event of `compressors.m_nice`."""
    key_event, _ = jax.random.split(jax.random.fold_in(key, number))
    return np.flatnonzero(np.asarray(jax.random.permutation(key_event, n)) < size).astype(np.int32)


def own_members(key, number, n, size):
    """The cohort of `clients.federated`."""
    key_round = jax.random.fold_in(jax.random.fold_in(key, number), n)
    return np.flatnonzero(np.asarray(jax.random.permutation(key_round, n)) < size).astype(np.int32)


@pytest.mark.parametrize("inner", [compressors.identity(), compressors.comp(2, 5)], ids=lambda c: c.name)
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "files"])
def test_a_cohort_of_ef_bv_is_the_m_nice_compressor(inner, on_disk, tmp_path):
    joint = compressors.m_nice(M, inner)
    hparams = ef_bv.theoretical(joint.constants(D, N), quadratic.constants(PROBLEM))
    whole = ef_bv.ef_bv(VALUE_AND_GRAD, joint)
    state, step = whole.init(start(jnp.float64), jnp.arange(N)), jax.jit(whole.step)
    algorithm = ef_bv.ef_bv(VALUE_AND_GRAD, inner)
    many = host_clients.start(algorithm, start(jnp.float64), N, tmp_path / "rows" if on_disk else None)
    for _ in range(ROUNDS):
        state, metrics = step(KEY, hparams, state, DATA)
        many, found = host_clients.run(KEY, algorithm, hparams, many, fetch, 1, size=M, draw=nice_members)
        np.testing.assert_allclose(many.server.params, state.server.params, rtol=1e-12)
        np.testing.assert_allclose(many.server.shift, state.server.shift, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(many.rows.shift, state.clients.shift, rtol=1e-12, atol=1e-14)
        # h = mean_i h_i: what gathering rows alone would break
        np.testing.assert_allclose(many.server.shift, many.rows.shift.mean(axis=0), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found.bits_up, [metrics.bits_up], rtol=1e-14)
        np.testing.assert_allclose(found.bits_down, [M / N * metrics.bits_down], rtol=1e-14)
    assert isinstance(many.rows.shift, np.memmap) == on_disk and many.server.round == ROUNDS


@pytest.mark.parametrize(
    "algorithm, hparams",
    [
        (scaffold.scaffold(VALUE_AND_GRAD, steps=3, cohort=M), scaffold.HParams(0.2)),
        (fedavg.fedavg(VALUE_AND_GRAD, steps=3, cohort=M), fedavg.HParams(0.2)),
    ],
    ids=["scaffold", "fedavg"],
)
def test_a_method_with_cohorts_of_its_own_has_the_trajectory_of_its_simulation(algorithm, hparams):
    state, step = algorithm.init(start(jnp.float64), jnp.arange(N)), jax.jit(algorithm.step)
    many = host_clients.start(algorithm, start(jnp.float64), N)
    for _ in range(ROUNDS):
        state, metrics = step(KEY, hparams, state, DATA)
        many, found = host_clients.run(KEY, algorithm, hparams, many, fetch, 1, draw=own_members)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), many.server, state.server)
        rows = state.clients._replace(id=())
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), many.rows, rows)
        for one, other in zip(found, metrics, strict=True):
            np.testing.assert_allclose(one, [other], rtol=1e-12)


def test_runs_can_be_cut_and_depend_on_the_key_and_the_round_only():
    def after(*lengths, key=KEY):
        algorithm, hparams, many = nice_ef_bv(50)
        losses = []
        for length in lengths:
            many, metrics = host_clients.run(
                key, algorithm, hparams, many, lambda ids: ids[:, None] * np.ones(4), length, size=5
            )
            losses += metrics.loss.tolist()
        return np.asarray(many.server.params), many.rows.shift, losses

    whole, cut, other = after(6), after(2, 4), after(6, key=jax.random.key(5))
    for one, two in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(whole[0], other[0]) and len(whole[2]) == 6
    np.testing.assert_array_equal(after(0)[1], 0)


def test_only_members_are_fetched_and_written():
    algorithm, hparams, many = nice_ef_bv(1000)
    asked = []

    def fetch(ids):
        asked.append(ids)
        return np.ones((len(ids), 4)) * (1 + ids[:, None])

    many, _ = host_clients.run(KEY, algorithm, hparams, many, fetch, 3, size=7)
    assert [len(ids) for ids in asked] == [7, 7, 7] and all(np.all(np.diff(ids) > 0) for ids in asked)
    written = np.flatnonzero(many.rows.shift.any(axis=1))
    np.testing.assert_array_equal(written, np.unique(np.concatenate(asked)))


@pytest.mark.parametrize("ids", [[-1, 2, 3], [2, 2, 3], [1, 2, 10], [1, 2], [[1, 2, 3]], [1.0, 2.0, 3.0]], ids=str)
def test_a_cohort_that_is_not_some_of_the_clients_is_refused_and_nothing_is_written(ids):
    algorithm, hparams, many = nice_ef_bv(10)
    with pytest.raises(ValueError, match=r"draw returned \[.*; allowed: 3 different client numbers from 0 to 9"):
        host_clients.run(
            KEY, algorithm, hparams, many, lambda ids: np.ones((3, 4)), 1, size=3, draw=lambda *_: np.array(ids)
        )
    assert not many.rows.shift.any() and many.server.round == 0


def test_the_memory_of_a_compiled_round_does_not_depend_on_the_number_of_clients():
    def bytes_of(n):
        algorithm, hparams, many = nice_ef_bv(n, d=100)
        ids = np.arange(10, dtype=np.int32)
        rows = jax.tree.map(lambda leaf: leaf[ids], many.rows)._replace(id=ids)
        step = host_clients.cohort_step(algorithm, n, 10)
        used = step.lower(KEY, hparams, many.server, rows, np.ones((10, 100))).compile().memory_analysis()
        return used.argument_size_in_bytes, used.output_size_in_bytes, used.temp_size_in_bytes

    assert bytes_of(20) == bytes_of(100_000)


def test_rows_on_disk_take_room_only_where_they_were_written(tmp_path):
    algorithm, hparams, _ = nice_ef_bv(2)
    many = host_clients.start(algorithm, jnp.ones(500), 20_000, tmp_path / "rows")
    many, _ = host_clients.run(KEY, algorithm, hparams, many, lambda ids: np.ones((len(ids), 500)), 2, size=10)
    many.rows.shift.flush()
    (file,) = tmp_path.glob("rows/*.npy")
    assert file.stat().st_size > 20_000 * 500 * 8 and file.stat().st_blocks * 512 < file.stat().st_size / 50


def test_every_client_is_as_likely_as_any_other_and_none_comes_twice():
    counts = np.zeros(20)
    for number in range(4000):
        ids = host_clients.members(KEY, number, 20, 5)
        assert len(np.unique(ids)) == 5 and ids.dtype == np.int32
        counts[ids] += 1
    expected = 4000 * 5 / 20
    assert ((counts - expected) ** 2 / expected).sum() * 19 / 15 < 43.8  # chi-square of 19 degrees, 0.1 %
    large = host_clients.members(KEY, 0, 100_000, 100)
    assert len(np.unique(large)) == 100 and large.max() > 50_000 and np.all(np.diff(large) > 0)
    np.testing.assert_array_equal(large, host_clients.members(KEY, 0, 100_000, 100))
    assert not np.array_equal(large, host_clients.members(KEY, 1, 100_000, 100))


def test_a_row_that_is_not_zero_is_every_client_s_start():
    algorithm = ef_bv.ef_bv(VALUE_AND_GRAD, compressors.identity())
    many = host_clients.start(algorithm, start(jnp.float64), 4, shift=start(jnp.float64))
    np.testing.assert_array_equal(many.rows.shift, np.tile(start(jnp.float64), (4, 1)))
    np.testing.assert_array_equal(many.server.shift, start(jnp.float64))


def test_methods_whose_theory_has_no_cohort_are_refused():
    many = nice_ef_bv(10)[2]
    with pytest.raises(ValueError, match="it does not exchange once a round"):
        host_clients.run(KEY, scafflix.scafflix(VALUE_AND_GRAD), None, many, fetch, 1, size=2)
    with pytest.raises(ValueError, match="neither cohorts of its own nor a compressor"):
        host_clients.run(KEY, scaffold.scaffold(VALUE_AND_GRAD, steps=1), None, many, fetch, 1, size=2)


def test_a_size_that_does_not_fit_is_refused():
    algorithm, hparams, many = nice_ef_bv(10)
    for size in (None, 0, 11):
        with pytest.raises(ValueError, match=f"size must be between 1 and the number of clients n = 10, got {size}"):
            host_clients.run(KEY, algorithm, hparams, many, fetch, 1, size=size)
    with pytest.raises(ValueError, match="size=4, but the algorithm was built with cohort=3"):
        host_clients.run(KEY, fedavg.fedavg(VALUE_AND_GRAD, steps=1, cohort=3), None, many, fetch, 1, size=4)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        host_clients.start(algorithm, jnp.ones(2), 0)


def test_joint_compressors_are_refused_as_a_cohort_s_and_independent_ones_are_not():
    for name, compressor in ZOO.items():
        algorithm = ef_bv.ef_bv(VALUE_AND_GRAD, compressor)
        many = host_clients.start(algorithm, jnp.ones(12), 5)
        joint = "nice" in name or "perm" in name
        refused = pytest.raises(ValueError, match=r"joins the clients .*allowed: one that is independent over clients")
        with refused if joint else contextlib.nullcontext():
            host_clients.run(KEY, algorithm, ef_bv.HParams(0.1, 1.0, 1.0), many, fetch, 0, size=2)


def test_batches_may_change_their_length_from_round_to_round_and_run_to_run(tmp_path):
    algorithm = ef_bv.ef_bv(
        lambda x, data: (jnp.mean((x[None] - data) ** 2), x - jnp.mean(data, axis=0)), compressors.top_k(2)
    )
    lengths = count(2)

    def fetch(ids):
        return np.ones((len(ids), next(lengths), 4))

    many = host_clients.start(algorithm, jnp.ones(4), 50, tmp_path / "rows")
    for _ in range(2):
        host_clients.run(KEY, algorithm, HPARAMS, many, fetch, 2, size=5)
        many = host_clients.reopen(algorithm, jnp.ones(4), 50, tmp_path / "rows")
    assert many.server.round == 4


def test_time_and_memory_of_a_round_on_the_host_do_not_depend_on_the_number_of_clients():
    def peak(n):
        many = run_of(nice_ef_bv(n)[2], 1)[0]  # compiled
        tracemalloc.start()
        seconds = []
        for _ in range(4):  # the fastest: a collection of garbage, or another process, may fall into one of them
            began = time.thread_time()
            many = run_of(many, 3)[0]
            seconds.append(time.thread_time() - began)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used, min(seconds)

    small, large = peak(20_000), peak(2_000_000)
    assert large[0] < small[0] + 100_000  # one byte a client would be 2 MB
    assert large[1] < 5 * small[1] + 0.1


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
def test_a_message_that_is_not_finite_stops_the_run_with_its_client_and_the_last_good_round(number):
    wanted, _ = run_of(nice_ef_bv(50)[2], 2)
    asked = count()

    def spoiled(ids):
        rows = ids[:, None] * np.ones(4)
        if next(asked) == 2:
            rows[3] = number
        return rows

    with pytest.raises(
        host_clients.StoppedError, match=r"round 2: DivergedError: round 2: the messages .* of clients \[\d+\] are not"
    ) as stopped:
        run_of(nice_ef_bv(50)[2], 5, spoiled)
    found = stopped.value.federation
    assert isinstance(stopped.value.__cause__, runner.DivergedError) and int(found.server.round) == 2
    assert str(host_clients.members(KEY, 2, 50, 5)[3]) in str(stopped.value)
    np.testing.assert_array_equal(found.server.params, wanted.server.params)
    np.testing.assert_array_equal(found.rows.shift, wanted.rows.shift)


def test_a_server_step_that_forgets_the_round_does_not_stop_the_count():
    algorithm = fedavg.fedavg(VALUE_AND_GRAD, steps=1, cohort=2)
    exchange = algorithm.exchange._replace(
        server_step=lambda hparams, server, value: server._replace(round=server.round + 2)
    )
    many = host_clients.start(algorithm, start(jnp.float64), N)
    many, _ = host_clients.run(KEY, algorithm._replace(exchange=exchange), fedavg.HParams(0.1), many, fetch, 3)
    assert int(many.server.round) == 3
