"""Clients' rows in a folder: reopened as the last whole round left it; another run, damage and kills are found."""

from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import checkpoint, files
from commjax.core.checkpoint import CheckpointError
from commjax.devices import host_clients, host_storage
from tests.devices.host_clients_cases import HPARAMS, KEY, NICE, WIDE, nice_ef_bv, run_of

pytestmark = pytest.mark.slow


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
    put, calls = host_storage.put, count()

    def half(store, ids, rows):
        if next(calls) == 2:
            put(store, ids[:2], jax.tree.map(lambda leaf: leaf[:2], rows))
            raise KeyboardInterrupt
        put(store, ids, rows)

    monkeypatch.setattr(host_storage, "put", half)
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
        patch.setattr(host_storage, "put", killed)  # the server is written, and no row
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
        host_clients.run(key, algorithm, hparams, again, fetch, 2, size=4 if what == "size" else 5)
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
        "cut": good[:-1],
        "row": good[:-32],
        "empty": b"",
        "longer": good + b"\0",
        "header": good[:20],
        "nested": nested,
        "server": good[:-1],
        "bit": bytes(half),
        "dtype": good.replace(b"<f8", b"<i8"),
    }
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
    with files.writing(tmp_path / "rows" / "server.safetensors"):
        for use in (lambda: run_of(second, 1), lambda: host_clients.reopen(NICE, jnp.ones(4), 50, tmp_path / "rows")):
            with pytest.raises(CheckpointError, match="is being written by process"):
                use()
    equal(run_of(second, 2)[0], run_of(nice_ef_bv(50)[2], 5)[0])


def test_a_start_that_was_killed_is_started_again_and_other_files_are_not_touched(tmp_path, monkeypatch):
    def killed(*arguments):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(host_storage, "log", killed)
        with pytest.raises(SystemExit):
            host_clients.start(NICE, jnp.ones(4), 50, tmp_path / "rows")
    (tmp_path / "rows" / ".server.safetensors.commjax-lock").write_text("of a killed process")
    (tmp_path / "rows" / ".server.safetensors.0123abcd.commjax-partial").write_text("half")
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
