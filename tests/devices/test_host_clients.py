"""A cohort of many clients: the trajectory of the whole simulation, in memory that does not grow with the number of clients."""

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
from commjax.core import checkpoint, runner
from commjax.core.checkpoint import CheckpointError
from commjax.devices import host_clients
from commjax.problems import quadratic
from tests.compressors.zoo import ZOO
from tests.registry import PROBLEM, VALUE_AND_GRAD, D, N, start

KEY = jax.random.key(4)
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
        many, found = host_clients.run(KEY, algorithm, hparams, many, fetch, 1, M, draw=nice_members)
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


NICE = ef_bv.ef_bv(lambda x, data: (jnp.sum((x - data) ** 2), 2 * (x - data)), compressors.top_k(2))


def nice_ef_bv(n, d=4):
    return NICE, ef_bv.HParams(0.01, 0.1, 0.5), host_clients.start(NICE, jnp.ones(d), n)


def test_runs_can_be_cut_and_depend_on_the_key_and_the_round_only():
    def after(*lengths, key=KEY):
        algorithm, hparams, many = nice_ef_bv(50)
        losses = []
        for length in lengths:
            many, metrics = host_clients.run(
                key, algorithm, hparams, many, lambda ids: ids[:, None] * np.ones(4), length, 5
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

    many, _ = host_clients.run(KEY, algorithm, hparams, many, fetch, 3, 7)
    assert [len(ids) for ids in asked] == [7, 7, 7] and all(np.all(np.diff(ids) > 0) for ids in asked)
    written = np.flatnonzero(many.rows.shift.any(axis=1))
    np.testing.assert_array_equal(written, np.unique(np.concatenate(asked)))


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
    many, _ = host_clients.run(KEY, algorithm, hparams, many, lambda ids: np.ones((len(ids), 500)), 2, 10)
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
        host_clients.run(KEY, scafflix.scafflix(VALUE_AND_GRAD), None, many, fetch, 1, 2)
    with pytest.raises(ValueError, match="neither cohorts of its own nor a compressor"):
        host_clients.run(KEY, scaffold.scaffold(VALUE_AND_GRAD, steps=1), None, many, fetch, 1, 2)


def test_a_size_that_does_not_fit_is_refused():
    algorithm, hparams, many = nice_ef_bv(10)
    for size in (None, 0, 11):
        with pytest.raises(ValueError, match=f"size must be between 1 and the number of clients n = 10, got {size}"):
            host_clients.run(KEY, algorithm, hparams, many, fetch, 1, size)
    with pytest.raises(ValueError, match="size=4, but the algorithm was built with cohort=3"):
        host_clients.run(KEY, fedavg.fedavg(VALUE_AND_GRAD, steps=1, cohort=3), None, many, fetch, 1, 4)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        host_clients.start(algorithm, jnp.ones(2), 0)


def test_joint_compressors_are_refused_as_a_cohort_s_and_independent_ones_are_not():
    for name, compressor in ZOO.items():
        algorithm = ef_bv.ef_bv(VALUE_AND_GRAD, compressor)
        many = host_clients.start(algorithm, jnp.ones(12), 5)
        joint = "nice" in name or "perm" in name
        refused = pytest.raises(ValueError, match=r"joins the clients .*allowed: one that is independent over clients")
        with refused if joint else contextlib.nullcontext():
            host_clients.run(KEY, algorithm, ef_bv.HParams(0.1, 1.0, 1.0), many, fetch, 0, 2)


def run_of(many, rounds, fetch=lambda ids: ids[:, None] * np.ones(4)):
    return host_clients.run(KEY, NICE, ef_bv.HParams(0.01, 0.1, 0.5), many, fetch, rounds, 5)


def test_an_error_of_a_fetch_leaves_a_federation_to_go_on_from(tmp_path):
    wanted, metrics = run_of(nice_ef_bv(50)[2], 6)
    for many in (nice_ef_bv(50)[2], host_clients.start(NICE, jnp.ones(4), 50, tmp_path / "rows")):
        asked = count()

        def fetch(ids, asked=asked):
            if next(asked) == 4:
                raise OSError("the disk is gone")
            return ids[:, None] * np.ones(4)

        with pytest.raises(host_clients.StoppedError, match="round 4: OSError: the disk is gone") as stopped:
            run_of(many, 6, fetch)
        assert stopped.value.federation.server.round == 4
        np.testing.assert_array_equal(stopped.value.metrics.loss, metrics.loss[:4])
        found, rest = run_of(stopped.value.federation, 2)
        equal(found, wanted)
        np.testing.assert_array_equal(rest.loss, metrics.loss[4:])


def equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, (found.server, found.rows), (wanted.server, wanted.rows))


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "files"])
def test_an_interrupt_while_rows_are_written_is_made_good(on_disk, monkeypatch, tmp_path):
    wanted, _ = run_of(nice_ef_bv(50)[2], 5)
    many = host_clients.start(NICE, jnp.ones(4), 50, tmp_path / "rows" if on_disk else None)
    put, calls = host_clients._put, count()

    def half(store, ids, rows):
        if next(calls) == 2:
            put(store, ids[:2], jax.tree.map(lambda leaf: leaf[:2], rows))
            raise KeyboardInterrupt
        put(store, ids, rows)

    monkeypatch.setattr(host_clients, "_put", half)
    with pytest.raises(host_clients.StoppedError, match="round 3: KeyboardInterrupt") as stopped:
        run_of(many, 5)
    equal(run_of(stopped.value.federation, 2)[0], wanted)


def test_a_folder_is_reopened_as_the_last_whole_round_left_it(monkeypatch, tmp_path):
    wanted, _ = run_of(nice_ef_bv(50)[2], 5)
    folder = tmp_path / "rows"
    many = host_clients.start(NICE, jnp.ones(4), 50, folder)
    with pytest.raises(ValueError, match=r"folder: .*rows is not empty; allowed: a new one .*see reopen"):
        host_clients.start(NICE, jnp.ones(4), 50, folder)
    many, _ = run_of(many, 2)
    equal(host_clients.reopen(NICE, jnp.ones(4), 50, folder), many)

    def killed(store, ids, rows):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(host_clients, "_put", killed)  # the server is written, and no row
        with pytest.raises(SystemExit):
            run_of(many, 1)
    again = host_clients.reopen(NICE, jnp.ones(4), 50, folder)
    assert again.server.round == 3
    equal(run_of(again, 2)[0], wanted)
    with pytest.raises(CheckpointError, match="n is 50 there, 51 here"):
        host_clients.reopen(NICE, jnp.ones(4), 51, folder)
    with pytest.raises(CheckpointError, match=r"float64\[4\] there, float64\[5\] here"):
        host_clients.reopen(NICE, jnp.ones(5), 50, folder)
    np.save(next(folder.glob("*.npy")), np.zeros((50, 3)))
    with pytest.raises(ValueError, match=r"is float64\[50, 3\], expected float64\[50, 4\]"):
        host_clients.reopen(NICE, jnp.ones(4), 50, folder)


def on_disk(folder, rounds=2):
    return run_of(host_clients.start(NICE, jnp.ones(4), 50, folder), rounds)[0]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


HPARAMS, WIDE = ef_bv.HParams(0.01, 0.1, 0.5), lambda ids: ids[:, None] * np.ones(4)
OTHER = {  # of equal structure
    "key": ((jax.random.key(5), NICE, HPARAMS), WIDE),
    "hparams": ((KEY, NICE, HPARAMS._replace(gamma=0.02)), WIDE),
    "program": (
        (
            KEY,
            ef_bv.ef_bv(lambda x, data: (jnp.sum((x - data) ** 4), 4 * (x - data) ** 3), compressors.top_k(2)),
            HPARAMS,
        ),
        WIDE,
    ),
    "batch": ((KEY, NICE, HPARAMS), lambda ids: np.ones((len(ids), 4), np.float32)),
}


@pytest.mark.parametrize("what", [*OTHER, "size"])
def test_a_reopened_folder_refuses_another_run_by_name_and_stays_as_it_is(tmp_path, what):
    on_disk(tmp_path / "rows")
    before = files_of(tmp_path / "rows")
    again = host_clients.reopen(NICE, jnp.ones(4), 50, tmp_path / "rows")
    (key, algorithm, hparams), fetch = OTHER.get(what, ((KEY, NICE, HPARAMS), WIDE))
    name = "program" if what == "size" else what
    with pytest.raises(
        CheckpointError, match=f"server.safetensors belongs to another run: {name} is .* there, .* here"
    ):
        host_clients.run(key, algorithm, hparams, again, fetch, 2, 4 if what == "size" else 5)
    assert files_of(tmp_path / "rows") == before
    equal(run_of(again, 3)[0], run_of(nice_ef_bv(50)[2], 5)[0])


def test_reopen_itself_refuses_another_start_and_another_compressor(tmp_path):
    on_disk(tmp_path / "rows")
    with pytest.raises(CheckpointError, match=r"compressor is top-2 there, top-3 here"):
        other = ef_bv.ef_bv(lambda x, data: (jnp.sum((x - data) ** 2), 2 * (x - data)), compressors.top_k(3))
        host_clients.reopen(other, jnp.ones(4), 50, tmp_path / "rows")
    for more in ({"shift": jnp.ones(4)}, {}):
        with pytest.raises(CheckpointError, match="belongs to another run: start is"):
            host_clients.reopen(NICE, jnp.ones(4) * (1 if more else 2), 50, tmp_path / "rows", **more)
    with pytest.raises(CheckpointError, match=r"nowhere/server.safetensors does not exist"):
        host_clients.reopen(NICE, jnp.ones(4), 50, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_batches_may_change_their_length_from_round_to_round_and_run_to_run(tmp_path):
    algorithm = ef_bv.ef_bv(
        lambda x, data: (jnp.mean((x[None] - data) ** 2), x - jnp.mean(data, axis=0)), compressors.top_k(2)
    )
    lengths = count(2)

    def fetch(ids):
        return np.ones((len(ids), next(lengths), 4))

    many = host_clients.start(algorithm, jnp.ones(4), 50, tmp_path / "rows")
    for _ in range(2):
        host_clients.run(KEY, algorithm, HPARAMS, many, fetch, 2, 5)
        many = host_clients.reopen(algorithm, jnp.ones(4), 50, tmp_path / "rows")
    assert many.server.round == 4


@pytest.mark.parametrize(
    "change", ["cut", "row", "empty", "longer", "header", "nested", "server", "bit", "gone", "dtype"]
)
def test_a_damaged_file_is_refused_by_name_and_not_mended(tmp_path, change):
    on_disk(tmp_path / "rows")
    (file,) = (tmp_path / "rows").glob("*.npy")
    if change in ("server", "bit"):
        file = tmp_path / "rows" / "server.safetensors"
    good = file.read_bytes()
    half = bytearray(good)
    half[-5] ^= 4
    nested = good[:10] + b"(" * 118 + good[128:]
    bad = {
        "cut": good[:-1], "row": good[:-32], "empty": b"", "longer": good + b"\0", "header": good[:20], "nested": nested,
        "server": good[:-1], "bit": bytes(half), "dtype": good.replace(b"<f8", b"<i8"),
    }  # fmt: skip
    file.unlink() if change == "gone" else file.write_bytes(bad[change])
    before = files_of(tmp_path / "rows")
    with pytest.raises(CheckpointError, match=file.name):
        host_clients.reopen(NICE, jnp.ones(4), 50, tmp_path / "rows")
    assert files_of(tmp_path / "rows") == before


@pytest.mark.parametrize(
    "log", [{}, {"ids": [50.0]}, {"ids": [-1.0]}, {"ids": [0.5]}, {"ids": [np.nan]}, {"ids": [[1.0]]}]
)
def test_a_log_that_does_not_fit_is_refused(tmp_path, log):
    many = on_disk(tmp_path / "rows")
    path = tmp_path / "rows" / "server.safetensors"
    identity = checkpoint.load_all(path, many.server)[2]
    log = {name: np.array(values) for name, values in log.items()}
    for rows in ({}, {"rows 0": np.zeros((1, 4))}, {"rows 0": np.zeros((1, 3))}, {"rows 0": np.zeros((2, 4))}):
        checkpoint.save(path, many.server, {**log, **rows}, identity)
        with pytest.raises(CheckpointError, match=r"server.safetensors has no rows of the last cohort that fit 50"):
            host_clients.reopen(NICE, jnp.ones(4), 50, tmp_path / "rows")


def test_a_federation_that_is_no_longer_that_of_its_folder_is_refused(tmp_path):
    first = on_disk(tmp_path / "rows")
    second, _ = run_of(host_clients.reopen(NICE, jnp.ones(4), 50, tmp_path / "rows"), 1)
    with pytest.raises(
        CheckpointError, match=r"has another server, in round 3, than the federation, in round 2; allowed"
    ):
        run_of(first, 1)
    with checkpoint.writing(tmp_path / "rows" / "server.safetensors"):
        for use in (lambda: run_of(second, 1), lambda: host_clients.reopen(NICE, jnp.ones(4), 50, tmp_path / "rows")):
            with pytest.raises(CheckpointError, match="is being written by process"):
                use()
    equal(run_of(second, 2)[0], run_of(nice_ef_bv(50)[2], 5)[0])


def test_a_start_that_was_killed_is_started_again_and_other_files_are_not_touched(tmp_path, monkeypatch):
    def killed(*arguments):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(host_clients, "_log", killed)
        with pytest.raises(SystemExit):
            host_clients.start(NICE, jnp.ones(4), 50, tmp_path / "rows")
    (tmp_path / "rows" / ".server.safetensors.lock").write_text("of a killed process")
    (tmp_path / "rows" / ".server.safetensors.0123abcd").write_text("half")
    equal(on_disk(tmp_path / "rows", 5), run_of(nice_ef_bv(50)[2], 5)[0])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="mine is not empty"):
        host_clients.start(NICE, jnp.ones(4), 50, tmp_path / "mine")
    assert files_of(tmp_path / "mine") == {"notes": b"mine"}


def test_leaves_whose_names_look_alike_in_a_file_system_have_files_of_their_own(tmp_path):
    params = {"a.b": jnp.ones(2, jnp.bfloat16), "a_b": jnp.zeros(3)}
    algorithm = ef_bv.ef_bv(lambda x, data: (jnp.zeros(()), x), compressors.identity())
    many = host_clients.start(algorithm, params, 4, tmp_path / "rows", shift=params)
    assert [leaf.tolist() for leaf in jax.tree.leaves(many.rows)] == [[[1.0, 1.0]] * 4, [[0.0] * 3] * 4]
    assert len(list((tmp_path / "rows").glob("*.npy"))) == 2
    again = host_clients.reopen(algorithm, params, 4, tmp_path / "rows", shift=params)
    assert jax.tree.map(lambda leaf: leaf.dtype, again.rows) == jax.tree.map(lambda leaf: leaf.dtype, many.rows)
    equal(again, many)


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

    with pytest.raises(host_clients.StoppedError, match=r"round 2: DivergedError: round 2: the messages .* of clients \[\d+\] are not") as stopped:  # fmt: skip
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
