"""The drivers of Chapter 2, at toy size, and their arithmetic."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core import checkpoint
from commjax.core.records import Record
from experiments.ef_bv import commands as ef_bv
from experiments.ef_bv import runs as ef_bv_runs
from experiments.ef_bv import table as ef_bv_table
from experiments.scorecard.claims import ef_bv as claims

pytestmark = pytest.mark.long

TINY = ef_bv.Settings(datasets=("breast_cancer",), n=12, rounds=12, chunk=4, progress=False)


@pytest.fixture
def settings(tmp_path):
    return dataclasses.replace(TINY, out=tmp_path)


def fake_record(loss_a, loss_b, bits=40.0):
    loss = np.array([[loss_a], [loss_b]], float)
    config = {"floor": 1.0, "predicted": 0.5, "d": 10, "kept": 1}
    return Record(config, {}, {"loss": loss, "bits_up": np.full_like(loss, bits), "bits_down": loss * 0}, {}, 320.0)


def test_bits_to_targets_counts_what_was_sent_before_the_target_was_reached():
    record = fake_record([11, 6, 3, 2], [11, 9, 6, 3])
    rows = ef_bv.bits_to_targets(record, (0.5, 0.2, 0.1, 0.05))
    assert [row["fraction"] for row in rows] == [0.5, 0.2, 0.1]  # nobody reaches 0.05
    assert [row["rounds"] for row in rows] == [[1, 2], [2, 3], [3, None]]
    assert [row["bits"] for row in rows] == [[40.0, 80.0], [80.0, 120.0], [120.0, np.inf]]
    assert [row["ratio"] for row in rows] == [0.5, 80 / 120, 0.0]


def test_a_target_that_only_ef21_reaches_counts_against_ef_bv():
    (row,) = ef_bv.bits_to_targets(fake_record([11, 9, 6, 3], [11, 6, 3, 2]), (0.1,))
    assert row["bits"] == [np.inf, 120.0] and row["ratio"] == np.inf


def test_the_main_figure_has_a_panel_a_setting_and_leaves_records(settings):
    records = ef_bv.main_figure(settings)
    assert set(records) == {("breast_cancer", k, xi) for k, xi in ef_bv.Settings.pairs}
    names = {path.name for path in settings.out.iterdir()}
    assert {
        "main_figure.png",
        "main_figure.txt",
        "breast_cancer_k1_xi1.json",
        "breast_cancer_k1_xi1.npz",
    } <= names
    loaded = Record.load(settings.out / "breast_cancer_k1_xi1")
    assert loaded.metrics["loss"].shape == (2, 1, settings.rounds)
    # d = 30: one float32, a position of 5 bits in a byte; and 30 float32 at the start.
    assert np.all(loaded.metrics["bits_up"] == 40) and loaded.bits_init == 30 * 32
    # Both methods start at the same point, and descend.
    loss = loaded.metrics["loss"][:, 0]
    assert loss[0, 0] == pytest.approx(np.log(2)) and loss[1, 0] == pytest.approx(np.log(2))
    assert np.all(np.diff(loss[:, [0, -1]]) < 0)


def test_a_killed_experiment_goes_on_from_its_checkpoint_with_the_same_result(settings, monkeypatch):
    problem = ef_bv.problem("breast_cancer", settings)
    whole = ef_bv.compare(problem, 1, settings, "whole")
    saves = []

    def stop_after_two(path, *args):
        save(path, *args)
        saves.append(path)
        if len(saves) == 2:
            raise KeyboardInterrupt

    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        ef_bv.compare(problem, 1, settings, "killed")
    monkeypatch.setattr(checkpoint, "save", save)
    resumed = ef_bv.compare(problem, 1, settings, "killed")
    assert np.array_equal(whole.metrics["loss"], resumed.metrics["loss"])


def test_the_nonconvex_figure_reports_the_squared_gradient(settings):
    records = ef_bv.nonconvex(settings)
    record = records["breast_cancer", 1, 1]
    problem = ef_bv.problem("breast_cancer", settings, nonconvex=True)
    sq_grad = record.metrics["sq_grad"]
    assert sq_grad.shape == (2, 1, settings.rounds) and np.all(sq_grad > 0)
    assert record.config["start"] == "normal"  # and it can be said
    zero = ef_bv.compare(problem, 1, dataclasses.replace(settings, start="zero"), "zero", nonconvex=True)
    assert zero.config["start"] == "zero" and zero.metrics["loss"][0, 0, 0] == pytest.approx(np.log(2))
    assert (settings.out / "nonconvex.png").exists()
    state = ef_bv_runs.ef_bv.ef_bv(problem.value_and_grad, ef_bv_runs.compressors.identity()).init(
        jnp.zeros(problem.d), jnp.arange(12)
    )
    grads = np.stack([problem.value_and_grad(jnp.zeros(problem.d), row(problem.data, i))[1] for i in range(12)])
    measured = ef_bv_runs.squared_gradient(problem.value_and_grad, state, problem.data)
    assert float(measured) == pytest.approx(np.sum(grads.mean(axis=0) ** 2))


def row(data, i):
    return type(data)(*(leaf[i] for leaf in data))


def test_ablations_and_stepsizes_draw_their_figures(settings, monkeypatch):
    settings = dataclasses.replace(settings, rounds=6, chunk=6)
    real, runs = ef_bv.compare, []

    def first_only(problem, k, settings, label, *, k_top=None):
        """The curves of the first run for all of them, each with its own prediction: eleven programs would prove no
        more."""
        runs.append(runs[0] if runs else real(problem, k, settings, label, k_top=k_top))
        compressor = ef_bv_runs.compressors.rounded(ef_bv_runs.compressors.comp(k, k_top or problem.d // 2))
        predicted = ef_bv_runs.predicted_ratio(compressor.constants(problem.d, len(problem.data.labels)))
        assert len(runs) > 1 or predicted == runs[0].config["predicted"]
        return dataclasses.replace(runs[0], config={**runs[0].config, "predicted": predicted})

    with monkeypatch.context() as patch:
        patch.setattr(ef_bv, "compare", first_only)
        rows = ef_bv.ablate_k(settings)
        by_clients = ef_bv.ablate_n(settings)
    assert [r["value"] for r in rows] == [1, 3, 7, 15, 22, 30]
    assert rows[0]["predicted"] == pytest.approx(1)  # k' = k: one method
    assert [r["value"] for r in by_clients] == [10, 30, 100, 300, 569] and len(runs) == 11
    predicted = [r["predicted"] for r in by_clients]
    assert predicted == sorted(predicted, reverse=True)
    record = ef_bv.stepsizes(settings)
    assert record.metrics["loss"].shape == (22, 1, 6)
    assert {"ablate_k.png", "ablate_n.png", "stepsizes.png"} <= {path.name for path in settings.out.iterdir()}


def test_a_data_set_that_the_table_does_not_have_is_named():
    with pytest.raises(
        ValueError, match=r"datasets: \['mushroom'\] are not in the printed table; allowed: \['mushrooms'"
    ):
        ef_bv_table.cells(("mushroom",), read_data=False)


def test_a_claim_whose_measurement_is_off_differs_and_cites_no_erratum(monkeypatch):
    functions = (claims.bits_are_not_free, claims.table_cells)
    assert [function().verdict for function in functions] == ["corrected"] * 2
    monkeypatch.setattr(ef_bv_table.Cell, "verdict", "ok")
    monkeypatch.setattr(claims.compressors, "comp", lambda k, k_top: claims.compressors.rand_k(k))
    assert [(function().verdict, function().errata) for function in functions] == [("differs", "")] * 2


def test_the_table_finds_exactly_the_wrong_cells_that_need_no_data():
    cells = ef_bv_table.cells(("mushrooms", "phishing", "a9a", "w8a"), read_data=False)
    wrong = {(c.dataset, c.k, c.xi, c.quantity) for c in cells if c.verdict == "differs"}
    assert wrong == {
        ("mushrooms", 1, 2, "lambda EF21"),
        ("phishing", 2, 1, "r"),
        ("a9a", 2, 1, "omega_ran"),
    }
    assert sum(c.corrected is not None for c in cells) == 108 and len(cells) == 132


@pytest.mark.long
def test_the_stepsizes_of_the_table_re_derive_from_the_data(real_data):
    cells = [c for c in ef_bv_table.cells(("mushrooms", "a9a"), read_data=True) if c.quantity.startswith("gamma")]
    wrong = {(c.dataset, c.k, c.xi, c.quantity) for c in cells if c.verdict != "ok"}
    assert wrong == {("a9a", 1, 2, "gamma EF21")}  # E4(d)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "k", "xi"),
    [(name, k, xi) for name in ("mushrooms", "phishing") for k, xi in ef_bv.Settings.pairs] + [("a9a", 2, 1)],
)
def test_ef_bv_needs_fewer_bits_than_ef21_on_real_data(name, k, xi, real_data, tmp_path):
    settings = dataclasses.replace(ef_bv.Settings(), rounds=250, out=tmp_path, progress=False)
    record = ef_bv.compare(ef_bv.problem(name, settings, xi), k, settings, "run")
    rows = ef_bv.bits_to_targets(record, (0.99, 0.98, 0.97))
    assert all(target["ratio"] < 1 for target in rows)  # also where EF21 does not arrive
    both = [target["ratio"] for target in rows if np.isfinite(target["bits"]).all()]
    assert len(both) >= 2
    assert both[-1] == pytest.approx(record.config["predicted"], rel=0.1)


def test_a_command_that_is_given_again_runs_no_finished_panel_twice(settings, no_sweep):
    before = ef_bv.main_figure(settings)
    no_sweep()
    again = ef_bv.main_figure(settings)
    for name, record in before.items():
        np.testing.assert_array_equal(record.metrics["loss"], again[name].metrics["loss"])
