"""What a run leaves behind: exact bits, files that come back, a table and a figure of the same numbers."""

import json

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from commjax.algorithms.ef_bv import HParams
from commjax.core import conventions
from commjax.core.records import Record, environment, plot_records

CONFIG = {
    "d": 112,
    "kept": 2.0,
    "hparams": HParams(0.1, jnp.asarray([1.0, 2.0]), np.float64(0.5)),
    "name": "comp",
}


def record(loss=(8.0, 4.0, 2.0, 1.0), bits_up=(10.0, 20.0, 30.0, 40.0), bits_down=(5.0,) * 4, **options):
    metrics = {"loss": np.array(loss), "bits_up": np.array(bits_up), "bits_down": np.array(bits_down)}
    return Record(dict(CONFIG), environment(), metrics, {"accuracy": np.array([0.5, 0.75])}, **options)


def test_bits_are_those_sent_before_each_loss_was_measured_and_include_the_first_exchange():
    assert record().bits_up().tolist() == [0.0, 10.0, 30.0, 60.0]
    assert record(bits_init=7.0).bits_up().tolist() == [7.0, 17.0, 37.0, 67.0]
    assert record(bits_init=7.0).bits_down().tolist() == [0.0, 5.0, 10.0, 15.0]


def test_bits_add_up_exactly_where_float32_would_be_far_off():
    rounds, per_round = 200_000, 4_000_001.0
    one = record(np.ones(rounds), np.full(rounds, np.float32(per_round)), np.full(rounds, np.float32(per_round)))
    exact = (rounds - 1) * int(per_round)
    assert int(one.bits_up()[-1]) == int(one.bits_down()[-1]) == exact
    narrow = np.cumsum(np.full(rounds, per_round, np.float32), dtype=np.float32)[-2]
    assert abs(int(narrow) - exact) > 10**6


@pytest.mark.parametrize("convention", conventions.LEGACY)
def test_other_conventions_charge_the_same_for_every_round_and_nothing_for_the_start(convention):
    found = record(bits_init=7.0).bits_up(convention)
    np.testing.assert_array_equal(found, conventions.legacy_bits(convention, 112, 2.0) * np.arange(4))
    assert found[1] > 0


def test_conventions_that_are_unknown_or_lack_their_settings_are_refused():
    with pytest.raises(ValueError, match=r"convention must be one of .*32k.*, got '33k'"):
        record().bits_up("33k")
    bare = Record({"d": 3}, {}, record().metrics)
    assert bare.bits_up()[1] == 10.0
    with pytest.raises(ValueError, match=r"the convention '32k' needs \['kept'\]"):
        bare.bits_up("32k")


def test_first_below_is_the_first_round_at_or_below_the_target():
    one = record()
    assert [one.first_below(target) for target in (9.0, 8.0, 4.0, 1.5, 1.0, 0.5)] == [0, 0, 1, 3, 3, None]
    assert one.first_below(1.0, floor=1.0) == 2 and one.first_below(0.0, floor=1.0) == 3
    assert record(loss=(3.0, np.nan, 1.0, 5.0)).first_below(2.0) == 2


@pytest.mark.parametrize("name", ["run", "gamma=0.5", "a.b/run.json"])
def test_a_saved_record_comes_back_and_names_with_dots_do_not_collide(tmp_path, name):
    one = record(bits_init=7.0)
    one.save(tmp_path / name)
    record(loss=(0.0,) * 4).save(tmp_path / "gamma=0.25")
    back = Record.load(tmp_path / name)
    for part in ("metrics", "evaluations"):
        found, wanted = getattr(back, part), getattr(one, part)
        assert found.keys() == wanted.keys()
        assert all(found[k].tobytes() == wanted[k].tobytes() and found[k].dtype == wanted[k].dtype for k in wanted)
    assert back.environment == one.environment and back.bits_init == 7.0
    assert back.config["hparams"] == {"gamma": 0.1, "lam": [1.0, 2.0], "nu": 0.5} and back.config["d"] == 112
    np.testing.assert_array_equal(back.bits_up("32k"), one.bits_up("32k"))


def test_the_settings_are_readable_json_and_the_numbers_are_plain_npz(tmp_path):
    one = Record(
        {"path": tmp_path, "half": jnp.asarray(0.5, jnp.bfloat16), "none": None, 3: (True, [np.int32(4)])},
        {},
        {},
    )
    one.save(tmp_path / "run")
    text = (tmp_path / "run.json").read_text()
    assert json.loads(text)["config"] == {"path": repr(tmp_path), "half": 0.5, "none": None, "3": [True, [4]]}
    assert "\n" in text
    record().save(tmp_path / "run")
    with np.load(tmp_path / "run.npz", allow_pickle=False) as arrays:
        assert arrays["metrics/loss"].tolist() == [8.0, 4.0, 2.0, 1.0]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.json", "run.npz"]


def test_the_environment_names_versions_and_device():
    found = environment()
    assert {"python", "jax", "numpy", "commjax"} <= found["versions"].keys()
    assert found["versions"]["jax"] == __import__("jax").__version__ and found["x64"] is True
    assert found["device"].startswith("cpu") and found["device"].endswith("x 8")


def test_the_table_shows_the_first_and_last_rounds_and_the_numbers_of_the_record():
    one = record(np.linspace(2, 1, 101), np.full(101, 10.0), np.full(101, 5.0))
    header, *lines = one.table(rows=5).splitlines()
    assert header.split() == ["round", "loss", "bits", "up", "bits", "down"]
    rows = np.array([[float(part) for part in line.split()] for line in lines])
    assert rows[:, 0].tolist() == [0, 25, 50, 75, 100]
    for t, loss, up, down in rows:
        assert (loss, up, down) == (
            one.metrics["loss"][int(t)],
            one.bits_up()[int(t)],
            one.bits_down()[int(t)],
        )
    assert "loss - floor" in one.table(floor=1.0) and float(one.table(floor=1.0).splitlines()[-1].split()[1]) == 0.0
    assert len(record().table().splitlines()) == 5 and len(one.table().splitlines()) == 9


def test_the_plot_is_a_png_and_leaves_pyplot_alone(tmp_path):
    backend, figures = plt.get_backend(), plt.get_fignums()
    record().plot(tmp_path / "one.png", floor=0.5, label="ours")
    content = (tmp_path / "one.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 5000
    assert (plt.get_backend(), plt.get_fignums()) == (backend, figures)


def test_the_plot_shows_the_numbers_of_the_records(tmp_path, monkeypatch):
    import matplotlib.figure

    seen = []
    savefig = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda self, *a, **k: (seen.append(self), savefig(self, *a, **k))[1],
    )
    one, two = record(bits_init=1000.0), record(loss=(1.0, 0.5, 0.25, 0.125))
    plot_records(tmp_path / "both.png", {"first": one, "second": two}, floor=0.1)
    one.plot(tmp_path / "plain.png")
    axes = seen[0].axes[0]
    for line, wanted in zip(axes.lines, (one, two), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), wanted.bits_up() / 1e3)
        np.testing.assert_array_equal(line.get_ydata(), wanted.metrics["loss"] - 0.1)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first", "second"]
    assert axes.get_yscale() == "log" and axes.get_ylabel() != "loss"
    assert seen[1].axes[0].get_legend() is None and seen[1].axes[0].get_ylabel() == "loss"


def test_the_record_of_a_sweep_counts_bits_along_rounds_and_gives_single_runs():
    shape = (2, 3, 4)
    loss, bits = np.arange(24.0).reshape(shape), 1 + np.arange(24.0).reshape(shape)
    swept = Record(
        dict(CONFIG),
        {},
        {"loss": loss, "bits_up": bits, "bits_down": bits},
        {"e": np.ones((2, 3, 1)), "round": np.arange(1.0)},
    )
    one = swept.one(1, 2)
    assert one.metrics["loss"].tolist() == [20.0, 21.0, 22.0, 23.0] and one.evaluations["e"].tolist() == [1.0]
    assert one.evaluations["round"].tolist() == [0.0] and swept.one(1).metrics["loss"][0] == 12.0
    np.testing.assert_array_equal(swept.bits_up()[1, 2], one.bits_up())
    np.testing.assert_array_equal(swept.bits_down()[1, 2], [0, 21, 43, 66])
    np.testing.assert_array_equal(swept.bits_up("32k")[0, 0], 64.0 * np.arange(4))
    for ask in (swept.table, lambda: swept.first_below(1.0), lambda: swept.plot("never.png")):
        with pytest.raises(ValueError, match=r"record of a sweep, of shape \(2, 3, 4\); take one\(h, s\)"):
            ask()
