"""The drivers of Chapter 5, at toy size, and their arithmetic."""

import dataclasses
import json

import numpy as np
import pytest

from commjax.records import Record
from experiments import cohort_squeeze


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return cohort_squeeze.Settings(
        datasets=("breast_cancer",), clusters=4, per_cluster=3, gammas=(1.0, 100.0), most_local=4, rounds=12, localgd=(0.1,), seeds=2,
        absolute=(1.0, 0.1), relative=(0.05,), out=tmp_path_factory.mktemp("cohort"), progress=False,
    )  # fmt: skip


def fake(distance, local_rounds):
    metrics = {"distance": np.asarray(distance, float), "local_rounds": np.asarray(local_rounds, float)}
    return Record({}, {}, metrics, {}, 0.0)


def test_costs_count_iterations_or_evaluations_and_a_miss_is_no_number():
    ours = fake([[[9, 4, 1], [9, 2, 1]], [[9, 8, 7], [9, 1, 1]]], np.full((2, 2, 3), 5))
    local = fake([[[9, 5, 2]]], np.ones((1, 1, 3)))
    grid = cohort_squeeze.Grid(9.0, ours, local, [(1.0, 2), (10.0, 3)], [(0.1, 1)])
    spent, plain = cohort_squeeze.costs(grid, 2.0, 1.0, 0.0, "iterations")
    np.testing.assert_allclose(spent, [(2 * 2 + 1 * 2) / 2, np.nan])  # the second setting misses with one seed
    assert plain.tolist() == [2.0]
    spent, plain = cohort_squeeze.costs(grid, 2.0, 0.1, 1.0, "evaluations")
    np.testing.assert_allclose(spent, [((0.5 + 1) * 2 + (0.5 + 1)) / 2, np.nan])
    np.testing.assert_allclose(plain, [2.2])


def test_the_cost_table_and_its_figure(settings):
    rows = cohort_squeeze.cost(settings)
    assert [row["target"] for row in rows] == ["1", "0.1", "0.05 |x0-x*|^2"]
    assert all(row["iterations"] <= row["evaluations"] for row in rows)  # an iteration takes one evaluation or more
    assert rows[0]["iterations"] <= rows[1]["iterations"]
    assert json.loads((settings.out / "cost_bfgs.json").read_text()) == rows
    assert (settings.out / "cost_bfgs.png").read_bytes().startswith(b"\x89PNG")
    again = cohort_squeeze.hierarchical(settings)  # priced from the same runs
    assert {row["c1"] for row in again} == {0.1, 0.05} and all(row["c2"] == 1.0 for row in again)


def test_stratified_sampling_settles_nearest_and_under_its_bound(settings):
    rows = {row["sampling"]: row for row in cohort_squeeze.samplings(settings)}
    assert min(rows, key=lambda name: rows[name]["neighbourhood"]) == "stratified"
    assert all(row["neighbourhood"] <= row["bound"] for row in rows.values())


def test_any_gamma_runs_and_a_larger_one_settles_farther_away(settings):
    rows = cohort_squeeze.stepsizes(settings)
    assert all(row["finite"] for row in rows)
    assert rows[-1]["last"] > rows[3]["last"]  # gamma = 1e5 and 1


def test_clusters_that_are_too_small_are_refused(settings):
    with pytest.raises(ValueError, match=r"per_cluster=500; allowed: at most \d+"):
        cohort_squeeze.problem("breast_cancer", dataclasses.replace(settings, per_cluster=500))
