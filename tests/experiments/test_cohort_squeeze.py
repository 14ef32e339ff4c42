"""The drivers of Chapter 5, at toy size, and their arithmetic."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core.records import Record
from experiments.bench import cohort_squeeze as bench
from experiments.cohort_squeeze import commands as cohort_squeeze
from experiments.cohort_squeeze import costs as cohort_squeeze_costs
from experiments.cohort_squeeze import grid as cohort_squeeze_grid
from experiments.cohort_squeeze import networks as cohort_squeeze_networks
from experiments.cohort_squeeze import runs as cohort_squeeze_runs
from experiments.cohort_squeeze import workers as cohort_squeeze_workers

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return cohort_squeeze.Settings(
        datasets=("breast_cancer",),
        clusters=4,
        per_cluster=3,
        gammas=(1.0, 100.0),
        most_local=3,
        rounds=12,
        localgd=(0.1,),
        seeds=2,
        cap=40,
        absolute=(1.0, 0.1),
        relative=(0.05,),
        out=tmp_path_factory.mktemp("cohort"),
        progress=False,
    )


def fake(distance, local_rounds):
    metrics = {"distance": np.asarray(distance, float), "local_rounds": np.asarray(local_rounds, float)}
    return Record({}, {}, metrics, {}, 0.0)


def test_costs_count_iterations_or_evaluations_and_a_miss_is_no_number():
    ours = fake([[[9, 4, 1], [9, 2, 1]], [[9, 8, 7], [9, 1, 1]]], np.full((2, 2, 3), 5))
    local = fake([[[9, 5, 2]]], np.ones((1, 1, 3)))
    grid = cohort_squeeze_grid.Grid(9.0, ours, local, [(1.0, 2), (10.0, 3)], [(0.1, 1)], 100)
    spent, plain = cohort_squeeze_costs.costs(grid, 2.0, 1.0, 0.0, "iterations")
    np.testing.assert_allclose(spent, [(2 * 2 + 1 * 2) / 2, np.nan])  # the second setting misses with one seed
    assert plain.tolist() == [2.0]
    spent, plain = cohort_squeeze_costs.costs(grid, 2.0, 0.1, 1.0, "evaluations")
    np.testing.assert_allclose(spent, [((0.5 + 1) * 2 + (0.5 + 1)) / 2, np.nan])
    np.testing.assert_allclose(plain, [2.2])
    # A cohort that is spread over hubs has the server in every aggregation.
    spread, plain = cohort_squeeze_costs.costs(grid, 2.0, 0.1, 1.0, "iterations", "spread")
    np.testing.assert_allclose(spread, [1.1 * (2 * 2 + 1 * 2) / 2, np.nan])
    np.testing.assert_allclose(plain, [2.2])
    # Both methods have the same cap.
    spent, plain = cohort_squeeze_costs.costs(grid._replace(cap=1.5), 2.0, 1.0, 0.0, "iterations")
    assert np.isnan(spent).all() and np.isnan(plain).all()


def test_runs_of_different_lengths_are_one_record_and_end_in_nothing():
    short, long = fake([[[9, 4]]], [[[1, 2]]]), fake([[[9, 5, 1]]], [[[3, 4, 5]]])
    record = cohort_squeeze_grid.together([short, long])
    np.testing.assert_array_equal(record.metrics["distance"], [[[9, 4, np.nan]], [[9, 5, 1]]])
    np.testing.assert_array_equal(cohort_squeeze_grid.rounds_to(record, 2.0), [[np.nan], [2.0]])


def test_the_cost_table_and_its_figure(settings):
    rows = cohort_squeeze.cost(settings)
    assert [row["target"] for row in rows] == ["1", "0.1", "0.05 |x0-x*|^2"]
    assert all(row["iterations"] <= row["evaluations"] for row in rows)  # an iteration takes one evaluation or more
    assert rows[0]["iterations"] <= rows[1]["iterations"]
    assert json.loads((settings.out / "cost_bfgs.json").read_text()) == rows
    assert (settings.out / "cost_bfgs.png").read_bytes().startswith(b"\x89PNG")
    again = cohort_squeeze.hierarchical(settings)  # priced from the same runs
    assert {row["c1"] for row in again} == {0.1, 0.05} and all(row["c2"] == 1.0 for row in again)
    assert (settings.out / "hierarchical_bfgs.png").read_bytes().startswith(b"\x89PNG")
    least = {(row["target"], row["c1"], row["hubs"]): row["iterations"] for row in again if "iterations" in row}
    assert all(least[t, c1, "one hub"] < cost for (t, c1, hubs), cost in least.items() if hubs == "spread")
    runs = [row for row in again if "ledger" in row]
    assert {(row["c1"], row["hubs"]) for row in runs} == {
        (c1, hubs) for c1 in (0.1, 0.05) for hubs in ("one hub", "spread")
    }
    for row in runs:  # with real hubs the ledger counts what the formula says
        assert row["ledger"] == pytest.approx(row["evaluations"], rel=1e-12)


def test_every_solver_reaches_the_target_and_newton_pays_for_its_hessians(settings):
    rows = {row["solver"]: row for row in cohort_squeeze.by_solver(dataclasses.replace(settings, absolute=(1.0,)))}
    assert set(rows) == {"bfgs", "cg", "lbfgs", "agd", "gd", "aicn", "LocalGD, tuned"}
    assert rows["aicn"]["iterations"] < rows["bfgs"]["iterations"]
    assert (
        rows["aicn"]["kilobits"] / rows["aicn"]["evaluations"]
        > 5 * rows["bfgs"]["kilobits"] / rows["bfgs"]["evaluations"]
    )
    # d = 30 features: 30 numbers and the value, of 4 of 12 clients, in float64
    assert rows["bfgs"]["kilobits"] >= rows["bfgs"]["evaluations"] * 64 * 31 / 3 / 1e3 * (1 - 1e-9)


def test_accuracy_costs(settings):
    rows = [row for row in cohort_squeeze.epsilon(settings) if row["c2"] == 0.0]
    for key in ("iterations", "evaluations", "localgd"):
        reached = [row[key] for row in rows if row[key] is not None]
        assert len(reached) >= 3 and reached == sorted(reached)
        missed = [row[key] is None for row in rows]
        assert missed == sorted(missed)  # what is too accurate once is so for all that is more accurate


def test_recommendations_are_compared_with_the_ledger(settings):
    rows = cohort_squeeze.recommended(dataclasses.replace(settings, seeds=1, rounds=20, out=settings.out / "advice"))
    assert [(row["accuracy"], row["c1"], row["c2"]) for row in rows] == [
        (accuracy, *pair) for accuracy in (0.1, 0.01) for pair in cohort_squeeze.COST_PAIRS
    ]
    assert all(0.3 * row["predicted"] <= row["measured"] <= 3 * row["predicted"] for row in rows)
    assert (settings.out / "advice" / "recommended.txt").read_text().count("\n") == 7


def test_stratified_sampling_settles_nearest_and_under_its_bound(settings):
    rows = {row["sampling"]: row for row in cohort_squeeze.compare_samplings(settings)}
    assert min(rows, key=lambda name: rows[name]["neighbourhood"]) == "stratified"
    assert all(row["neighbourhood"] <= row["bound"] for row in rows.values())


def test_any_gamma_runs_and_a_larger_one_settles_farther_away(settings):
    rows = cohort_squeeze.stepsizes(settings)
    assert all(row["finite"] for row in rows)
    assert rows[-1]["last"] > rows[3]["last"]  # gamma = 1e5 and 1


def test_gradient_methods_run_at_their_theoretical_stepsizes(settings):
    rows = {row["method"]: row for row in cohort_squeeze.baselines(dataclasses.replace(settings, rounds=4))}
    assert set(rows) == {"SPPM-SS", "MB-GD, stratified", "MB-LocalGD, stratified", "MB-GD, nice", "MB-LocalGD, nice"}
    assert (
        rows["MB-LocalGD, nice"]["stepsize"] < rows["MB-GD, nice"]["stepsize"] <= rows["MB-GD, stratified"]["stepsize"]
    )
    assert all(np.isfinite(row["settled"]) for row in rows.values())


def test_clusters_that_are_too_small_are_refused(settings):
    with pytest.raises(ValueError, match=r"per_cluster=500; allowed: at most \d+"):
        cohort_squeeze.problem("breast_cancer", dataclasses.replace(settings, per_cluster=500))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return cohort_squeeze_networks.Settings(
        task="digits",
        clients=6,
        rows=40,
        cohort=3,
        local=(1, 3),
        steps=(1, 4),
        rounds=6,
        tune_rounds=2,
        rates=(0.01,),
        stepsizes=(0.3,),
        targets=(0.2, 1.01),
        c1=(0.1, 1.0),
        seeds=2,
        out=tmp_path_factory.mktemp("networks"),
        progress=False,
    )


def test_networks_are_priced_by_their_rounds_and_a_target_that_is_missed_has_no_cost(tiny):
    rows = cohort_squeeze.networks(tiny)
    assert [(row["target"], row["c1"], row["c2"]) for row in rows[:3]] == [
        (0.2, 0.1, 1.0),
        (0.2, 1.0, 1.0),
        (0.2, 1.0, 0.0),
    ]
    ours, theirs = cohort_squeeze_networks.measure(tiny)
    for row in rows[:3]:
        best = min(
            (row["c1"] * K + row["c2"]) * cohort_squeeze_networks.rounds_to(records, 0.2).mean()
            for K, (_, _, records) in ours.items()
        )
        assert row["sppm"] == pytest.approx(best)
        needed = min(cohort_squeeze_networks.rounds_to(records, 0.2).mean() for _, _, records in theirs.values())
        assert row["localgd"] == pytest.approx((row["c1"] + row["c2"]) * needed)
    assert all(row["sppm"] is None and row["localgd"] is None for row in rows[3:])
    assert (tiny.out / "networks_digits_mlp.png").read_bytes().startswith(b"\x89PNG")
    # Adam evaluates the start and the end of each of the K iterations
    record = ours[3][2][0]
    assert set(record.metrics["local_rounds"]) == {4.0} and record.metrics["iterations"].max() == 3


def test_network_solvers_are_tuned_alike(tiny):
    some = ("FedAdam-Adam", "MimeLite-Adam", "Fed-LAMB")
    rows = cohort_squeeze.network_solvers(dataclasses.replace(tiny, rounds=2, seeds=1, workers=some))
    assert tuple(row["solver"] for row in rows) == some
    with pytest.raises(ValueError, match="workers has Nadam; allowed: FedSGD"):
        cohort_squeeze.network_solvers(dataclasses.replace(tiny, workers=("Nadam",)))
    assert all(0 <= row["train"] <= 100 for row in rows)
    # The server's rate is tuned over the clients' grid.
    assert set(rows[0]["rate"]) <= {0.01, 0.3} and rows[1]["rate"] in (0.01, 0.3)
    # MimeLite sends a model and a gradient with every aggregation, FedAdam a model.
    assert rows[1]["megabits"] / rows[0]["megabits"] == pytest.approx(2, rel=1e-3)


def test_the_workers_are_those_of_the_table():
    """Every solver that L2328, L4673 and L5138 name for networks, by the factory that `federated`'s docstring says."""
    calls_of: dict[str, list] = {}

    def watch(name):
        def factory(*arguments, **options):
            calls_of[current].append((name, options))

        return factory

    modules = (
        (cohort_squeeze_workers.federated, ("fed_opt", "fed_adam", "mime", "mime_lite", "fed_speed", "fed_lamb")),
        (cohort_squeeze_workers.adaptive, ("adam", "apollo", "oasis")),
    )
    with pytest.MonkeyPatch.context() as patch:
        for module, names in modules:
            for name in names:
                patch.setattr(module, name, watch(name))
        for current, worker in cohort_squeeze_workers.WORKERS.items():
            calls_of[current] = []
            worker.make((0.1, 0.2) if worker.two_rates else 0.1, None)
    assert {name: calls[0][0] for name, calls in calls_of.items()} == {
        "FedSGD": "fed_opt",
        "FedAdam": "fed_opt",
        "FedAdam-Adam": "fed_adam",
        "FedAdam-AdaGrad": "fed_adam",
        "Mime-Adam": "mime",
        "MimeLite-Adam": "mime_lite",
        "FedSpeed": "fed_speed",
        "Fed-LAMB": "fed_lamb",
        "Adam": "adam",
        "Apollo": "apollo",
        "OASIS": "oasis",
    }
    assert calls_of["FedAdam-Adam"][0][1]["local"].update.__qualname__.startswith("scale_by_adam")
    assert calls_of["FedAdam-AdaGrad"][0][1]["local"].update.__qualname__.startswith("scale_by_rss")
    kinds = {name: worker.kind.__name__ for name, worker in cohort_squeeze_workers.WORKERS.items()}
    assert kinds == {name: calls[0][0] for name, calls in calls_of.items()}


def test_both_sides_of_the_benchmark_do_the_same_work():
    settings = bench.Settings(
        dataset="breast_cancer", clusters=3, per_cluster=2, gammas=(1.0, 10.0), seeds=2, rounds=2, at_once=2
    )
    about = cohort_squeeze_runs.Settings(clusters=settings.clusters, per_cluster=settings.per_cluster)
    problem = cohort_squeeze_runs.problem(settings.dataset, about)
    pairs, keys = [(gamma, 40) for gamma in settings.gammas], jax.random.split(jax.random.key(0), settings.seeds)
    theirs = np.stack([bench.theirs(problem, settings, pairs, key)() for key in keys], axis=1)
    for devices in (1, 2):
        ours = bench.ours(problem, settings, pairs, keys, jnp.float64, devices)()
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_the_picture_of_the_clusters(settings):
    cohort_squeeze.clusters(settings)
    assert (settings.out / "clusters.png").read_bytes().startswith(b"\x89PNG")
