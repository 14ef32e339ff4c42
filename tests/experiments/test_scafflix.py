"""The drivers of Chapter 3, at toy size, and their arithmetic."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core.records import Record
from commjax.data import stacked
from commjax.problems import logistic
from experiments import tables
from experiments.scafflix import commands as scafflix
from experiments.scafflix import condition as scafflix_condition
from experiments.scafflix import networks as scafflix_networks
from experiments.scafflix import runs as scafflix_runs

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return scafflix.Settings(
        datasets=("breast_cancer",),
        splits=("label", "quantity"),
        alphas=(0.1, 0.9),
        seeds=2,
        accuracy=1e-5,
        out=tmp_path_factory.mktemp("scafflix"),
        progress=False,
    )


@pytest.fixture(scope="module")
def accelerated(settings):
    return scafflix.double_acceleration(settings)


def test_the_loss_after_each_communication_is_read_off_where_a_communication_went_before():
    loss = np.array([[[9.0, 8.0, 7.0, 6.0, 5.0]]])
    bits = np.array([[[0.0, 64.0, 0.0, 64.0, 64.0]]])
    record = Record({}, {}, {"loss": loss, "bits_up": bits}, {}, 0.0)
    assert scafflix.communicated(record, 0, 0).tolist() == [9.0, 7.0, 5.0]
    assert tables.first(np.array([3.0, 2.0, 1.0]), 2.0) == 1.0 and np.isnan(tables.first(np.ones(2), 0.5))


def test_scafflix_needs_fewer_rounds_than_gd_and_fewer_for_smaller_alpha(accelerated, settings):
    assert [(row["split"], row["alpha"]) for row in accelerated] == [
        (split, alpha) for split in settings.splits for alpha in settings.alphas
    ]
    assert all(0 < row["ratio"] < 0.5 for row in accelerated)
    for split in settings.splits:
        small, large = (row for row in accelerated if row["split"] == split)
        assert small["gd"] < large["gd"] and small["scafflix"] < large["scafflix"]


def test_the_driver_leaves_a_table_a_figure_and_records(accelerated, settings):
    assert json.loads((settings.out / "double_acceleration.json").read_text()) == accelerated
    text = (settings.out / "double_acceleration.txt").read_text()
    assert "fewer rounds than GD in every row: True; fewer rounds for smaller alpha: True" in text
    assert (settings.out / "double_acceleration_label.png").read_bytes().startswith(b"\x89PNG")
    record = Record.load(settings.out / "breast_cancer_label_scafflix")
    assert [row["ratio"] for row in record.config["rounds"]] == [row["ratio"] for row in accelerated[:2]]
    assert record.metrics["loss"].shape[:2] == (2, 2) and set(np.unique(record.metrics["bits_up"])) == {0.0, 30 * 64}


def test_a_finished_command_is_not_run_twice(accelerated, settings, no_sweep):
    no_sweep()
    assert scafflix.double_acceleration(settings) == accelerated


def test_the_minimum_of_the_flix_objective_is_a_minimum(settings):
    split = scafflix.problem("breast_cancer", "quantity", settings)
    alpha = np.linspace(0, 1, settings.n)
    optimum = logistic.flix_optimum(split.dataset, split.rows, settings.mu, alpha, split.optimum)

    def objective(x):
        mixed = alpha[:, None] * x[None] + (1 - alpha)[:, None] * split.optimum
        return jnp.mean(jax.vmap(lambda model, data: logistic.loss(model, data, settings.mu))(mixed, split.data))

    value, slope = jax.value_and_grad(objective)(jnp.asarray(optimum.params))
    np.testing.assert_allclose(value, optimum.value, rtol=1e-12)
    assert np.linalg.norm(slope) < 1e-11
    plain = logistic.flix_optimum(split.dataset, split.rows, settings.mu, 1.0, split.optimum)
    np.testing.assert_allclose(plain.params, logistic.optimum(split.dataset, split.rows, settings.mu).params, atol=1e-9)
    with pytest.raises(ValueError, match="at least one above 0"):
        logistic.flix_optimum(split.dataset, split.rows, settings.mu, 0.0, split.optimum)


def test_every_split_uses_every_row_once(settings):
    dataset = scafflix_runs.load("breast_cancer")
    for split in scafflix_runs.SPLITS:
        rows = scafflix_runs.split_rows(dataset, split, 8, 0)
        assert sorted(np.concatenate(rows)) == list(range(len(dataset.labels))) and len(rows) == 8
    with pytest.raises(ValueError, match="split='other'; allowed: iid"):
        scafflix_runs.split_rows(dataset, "other", 8, 0)


def test_looser_local_optima_take_fewer_iterations_and_leave_a_larger_error(settings):
    rows = scafflix.inexact(settings)
    by_epsilon = [row for row in rows if row["kind"] == "epsilon"]
    assert np.all(np.diff([row["iterations_mean"] for row in by_epsilon]) < 0)
    assert by_epsilon[0]["distance"] < 1e-10 < by_epsilon[-1]["distance"]
    assert [row["iterations_max"] for row in rows if row["kind"] == "iterations"][:3] == [0, 1, 5]


def test_individual_stepsizes_need_fewer_rounds_where_clients_differ(settings):
    rows = scafflix.stepsizes(dataclasses.replace(settings, alphas=(0.5,)))
    assert rows[0]["individual"] < 0.8 * rows[0]["global"]


def test_rounds_fall_with_p_down_to_theory_and_iterations_explode_below_it(settings):
    rows = scafflix.probability(settings)
    above = [row["rounds"] for row in rows if row["p"] >= row["theory"] * (1 - 1e-9)]
    assert np.all(np.diff(above) > 0)
    assert rows[0]["iterations"] > 1.3 * rows[-1]["iterations"]


def test_rounds_grow_with_the_root_of_the_condition_number():
    kappas, results = [10.0, 100.0, 1000.0], []
    for kappa in kappas:
        case = scafflix_condition.quadratic_case(kappa, 4, 8, 0)
        results.append(scafflix_condition.rounds_to_accuracy(case, scafflix.Settings()))
    measured, ours, plain = np.array(results).T
    np.testing.assert_allclose(measured, kappas, rtol=1e-6)
    assert 0.38 < scafflix_condition.slope(kappas, ours) < 0.62 and 0.9 < scafflix_condition.slope(kappas, plain) < 1.1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return scafflix_networks.Settings(
        task="digits",
        clients=6,
        rows=40,
        cohort=3,
        rounds=4,
        batch=5,
        every=2,
        seeds=2,
        local_steps=10,
        stepsizes=(0.05, 1e4),
        out=tmp_path_factory.mktemp("networks"),
        progress=False,
    )


def test_networks_are_tuned_alike_and_compared_with_local_training(tiny):
    rows = {row["method"]: row for row in scafflix.generalisation(tiny)}
    assert list(rows) == ["Scafflix", "FLIX", "FedAvg", "local only"]
    assert rows["FedAvg"]["stepsize"] == 0.05  # the other one diverges, which is no error
    assert rows["local only"]["megabits"] == 0.0
    d = 8 * 9 + 8 + 8 * 16 * 9 + 16 + 4 * 16 * 10 + 10
    assert all(rows[name]["megabits"] == pytest.approx(4 * 0.5 * 32 * d / 1e6) for name in scafflix_networks.MAIN)
    record = Record.load(tiny.out / "networks" / "digits_Scafflix_0.05_1")
    assert record.evaluations["round"].tolist() == [0, 2, 4] and 0 <= record.evaluations["test"][-1] <= 1


def test_training_validation_and_test_rows_are_disjoint():
    task = scafflix_networks.load("digits", "small", 6, 40)
    for i in range(6):
        parts = [
            np.asarray(part.inputs[i])[np.asarray(part.weights[i]) > 0].reshape(-1, 64)
            for part in (task.train, task.validation, task.test)
        ]
        assert [len(part) for part in parts] == [24, 6, 10]
        rows = np.concatenate(parts)
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_all_baselines_are_in_the_table_and_every_knob_in_the_ablation(tiny):
    quick = dataclasses.replace(tiny, stepsizes=(0.05,), rounds=2)
    names = [row["method"] for row in scafflix.baselines(dataclasses.replace(quick, out=tiny.out / "table"))]
    assert names == [*scafflix_networks.METHODS, "local only"]
    rows = scafflix.ablations(dataclasses.replace(quick, out=tiny.out / "knobs"))
    assert [(row["knob"], row["value"]) for row in rows][5:7] == [("cohort", 1), ("cohort", 5)] and len(rows) == 10


@pytest.mark.parametrize("task", ["fashion", "shakespeare"])
def test_real_tasks_load(real_data, task):
    loaded = scafflix_networks.load(task, "small", 10, 50)
    assert len(loaded.train.weights) == 10 and np.allclose(np.sum(loaded.train.weights, axis=1), 1, atol=1e-5)
    assert isinstance(loaded.train, stacked.Examples)
