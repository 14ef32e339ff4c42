"""The drivers of Chapter 4 at toy size, their arithmetic, the benchmark and the claims."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedp3 as algorithms
from commjax.algorithms.fedp3 import layers, local_pruning, plans
from commjax.core.records import Record
from commjax.core.runner import DivergedError
from experiments.bench import fedp3 as bench
from experiments.fedp3 import commands as fedp3
from experiments.fedp3 import counts
from experiments.fedp3 import runs as fedp3_runs
from experiments.fedp3 import task as fedp3_task
from experiments.fedp3.task import Run, Settings
from experiments.scorecard.claims import fedp3 as claims

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(
        width=8,
        splits=("class",),
        clients=4,
        cohort=2,
        rounds=4,
        steps=2,
        batch=8,
        held=20,
        seeds=2,
        every=2,
        out=tmp_path_factory.mktemp("fedp3"),
        progress=False,
    )


@pytest.fixture(scope="module")
def overlap(settings):
    return fedp3.layer_overlap(settings)


def test_layer_overlap_has_a_row_a_method_and_its_bits(overlap, settings):
    assert [row["name"] for row in overlap] == ["FedAvg", "OPU3", "OPU2", "LowerB"]
    ups = [row["up"] for row in overlap]
    assert max(ups) == ups[0] and min(ups) == ups[-1] and overlap[0]["down"] > overlap[1]["down"]
    assert overlap[0]["up"] == overlap[0]["down"] == 32 * (64 * 8 + 3 * 8 * 8 + 8 * 10)
    assert all(0 <= row["accuracy"] <= 100 for row in overlap)
    stem = settings.out / "layers_digits_mlp"
    assert json.loads(stem.with_suffix(".json").read_text()) == overlap
    assert stem.with_suffix(".png").stat().st_size > 5000 and "LowerB" in stem.with_suffix(".txt").read_text()


def test_a_command_that_is_given_again_goes_on_from_its_files(overlap, settings):
    label = settings.out / "runs" / "digits_class_mlp_fedp3_3_0.9_fixed_simple_0"
    before = Record.load(label)
    run = Run("OPU3", counts=(3,))
    again = fedp3_runs.train(run, settings, "class", 0)
    np.testing.assert_array_equal(again.metrics["loss"], before.metrics["loss"])
    longer = fedp3_runs.train(run, replace(settings, rounds=6), "class", 0)
    np.testing.assert_array_equal(longer.metrics["loss"][:4], before.metrics["loss"])
    assert longer.evaluations["round"].tolist() == [0, 2, 4, 6]


def test_some_rows_are_the_first_of_all_in_the_order_of_the_draw(settings):
    whole, some = (fedp3_task.load(fedp3_task.data_of(replace(settings, rows=rows)), "class") for rows in (0, 300))
    count, every = ({int((part.weights > 0).sum()) for part in (task.train, task.test)} for task in (some, whole))
    assert sum(count) == 300 and sum(every) == 1797 - settings.held
    np.testing.assert_array_equal(some.held.inputs, whole.held.inputs)


def test_every_method_and_option_trains(settings):
    one = replace(settings, rounds=1, every=1, seeds=1)
    runs = [
        Run("FedProx", "fedprox", keep=1.0),
        Run("Ditto", "ditto", keep=1.0),
        Run("FedCR", "fedcr", keep=1.0),
        Run("a", keep=1.0, local="fjord"),
        Run("h", keep=1.0, local="heterofl", low=0.5),
        Run("b", counts=(1, 2), local="uniform", aggregate="attention"),
        Run("c", counts=(2,), local="ordered", aggregate="weighted"),
        Run("OPU", "fedcr_layers", counts=(3,), keep=0.5),
    ]
    rows = fedp3_runs.measure(runs, one, local_only=True)
    assert [row["name"] for row in rows] == [*(run.name for run in runs), "local only"]
    assert all(np.isfinite(row["accuracy"]) for row in rows) and rows[-1]["up"] == 0
    own = {row["name"]: row["local"] for row in rows}
    assert all(np.isfinite(own[name]) == (name in "abch") for name in own)
    bits = {row["name"]: row["up"] for row in rows}
    assert bits["OPU"] < bits["FedCR"] and next(row["up expected"] for row in rows if row["name"] == "OPU") > 0
    assert bits["h"] < bits["a"] == rows[0]["up"]  # submodels of one width travel alone, FjORD's may be whole
    assert len({run.label() for run in runs}) == len(runs)


@pytest.mark.long
def test_resnet_trains_without_a_block(settings):
    one = replace(settings, model="resnet", rounds=1, every=1, steps=1)
    record = fedp3_runs.train(Run("-B2 (part)", variant="-B2 (part)"), one, "class", 0)
    assert np.isfinite(record.metrics["loss"]).all()


@pytest.fixture
def pretended(monkeypatch):
    """Runs that cost nothing: the accuracy is the keep ratio."""
    seen = []

    def train(run, settings, split, seed):
        seen.append((run, split, seed))
        metrics = {"loss": np.ones(2), "bits_up": np.full(2, 10.0), "bits_down": np.full(2, 20.0)}
        return Record({"clients": 4, "cohort": 2}, {}, metrics, {"test": np.array([0.0, run.keep])}, 0.0)

    load = fedp3_task.load
    monkeypatch.setattr(fedp3_runs, "train", train)
    monkeypatch.setattr(fedp3_runs, "alone", lambda settings, split, seed: 0.5)
    monkeypatch.setattr(fedp3_runs, "load", lambda one, split: None if one.task == "fashion" else load(one, split))
    return seen


@pytest.mark.parametrize(
    "command, names",
    [
        ("ratio", ["keep 1", "keep 0.9", "keep 0.7", "keep 0.5"]),
        ("local", [f"{kind}, keep {keep:g}" for keep in (0.9, 0.7) for kind in ("Fixed", "Uniform", "Ordered")]),
        (
            "aggregation",
            [f"{kind}, {how}" for kind in ("OPU1-2-3", "OPU2-3") for how in ("simple", "weighted", "attention")],
        ),
    ],
)
def test_commands_ask_for_the_runs_of_their_figure(pretended, settings, tmp_path, command, names):
    both = replace(settings, splits=("class", "dirichlet"), task="fashion", out=tmp_path)
    rows = fedp3.COMMANDS[command](both)
    assert [(row["split"], row["name"]) for row in rows] == [(s, name) for s in both.splits for name in names]
    assert len(pretended) == len(names) * 2 * 2 and len({run.label() for run, _, _ in pretended}) == len(names)
    assert all(row["accuracy"] == 100 * run.keep for row, (run, _, _) in zip(rows, pretended[::2]))
    assert all(row["up"] == 20 and row["down"] == 40 and row["std"] == 0 for row in rows)  # of a client that takes part
    text = (tmp_path / f"{command}_fashion_mlp.txt").read_text()
    assert (command == "local") == ("81.75" in text) and (tmp_path / f"{command}_fashion_mlp.png").is_file()


def test_the_resnet_command_wants_a_resnet(pretended, settings, tmp_path):
    with pytest.raises(ValueError, match="model='mlp'; allowed: 'resnet'"):
        fedp3.resnet_blocks(settings)
    rows = fedp3.resnet_blocks(replace(settings, model="resnet", out=tmp_path))
    assert [row["name"] for row in rows] == ["Full", "-B2-B3 (full)", "-B2 (part)", "-B3 (part)"]


def test_counts_are_the_thesis_s_and_need_no_training(settings):
    rows = {(row["network"], row["keep"]): row for row in counts.parameter_counts(settings)}
    assert rows["CIFAR10", 0.5]["total"] == 2_804_544 and rows["EMNIST-L", 0.9]["total"] == 2_910_208
    assert round(rows["CIFAR10", 0.5]["deployed spread"], 2) == 57.93
    assert rows["CIFAR10", 0.9]["kbit up"][0] == 32 * 15104 / 1000
    text = (settings.out / "counts.txt").read_text()
    assert "OPU3 80 % of the layers, 75.09 % of the params" in text and "OPU3 100 % of the layers" in text


@pytest.mark.parametrize("split", ["class", "dirichlet"])
def test_clients_have_their_classes_70_to_30_and_the_server_s_rows_are_nobody_s(settings, split):
    task = fedp3_task.load(fedp3_task.data_of(settings), split)
    counts = [(np.asarray(part.weights) > 0).sum(axis=1) for part in (task.train, task.test)]
    assert counts[0].sum() + counts[1].sum() + 20 == 1797
    np.testing.assert_allclose(counts[1] / (counts[0] + counts[1]), 0.3, atol=0.02)
    if split == "class":
        assert all(len(np.unique(row)) == 5 for row in np.asarray(task.train.targets))
    assert counts[0].min() >= settings.batch and float(task.held.weights.sum()) == pytest.approx(1)


def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match="split='iid'; allowed: 'class', 'dirichlet'"):
        fedp3_task.load(fedp3_task.data_of(settings), "iid")
    with pytest.raises(ValueError, match="batch=400, but client"):
        fedp3_task.load(fedp3_task.data_of(replace(settings, batch=400)), "class")


def test_models_have_the_layers_that_plans_need(settings):
    for model, depth in (("mlp", 5), ("cnn", 5), ("resnet", 18)):
        task = fedp3_task.load(fedp3_task.data_of(replace(settings, model=model)), "class")
        assert len(task.layers.names) == depth
        assert fedp3_task.plan_of(Run("x", counts=(3,)), task.layers, 6, 0).trained.sum(axis=1).tolist() == [4] * 6
    table = fedp3_task.module_of(replace(settings, model="table"))
    assert (table.width, table.hidden, table.side) == (64, 1024, 32)


def test_expected_shares_are_means_over_plans():
    sizes = np.array([5, 7, 11, 3])
    names = layers.Layers(tuple("abcd"), (0, 1, 2, 3))
    drawn = plans.uplink_sizes(plans.opu(names, 20000, 2), sizes).mean() / sizes.sum()
    assert counts.expected_share(sizes, 2) == pytest.approx(drawn, rel=0.01)


def test_expected_bits_are_means_over_plans(settings):
    task = fedp3_task.load(fedp3_task.data_of(settings), "class")
    params = task.problem.init(jax.random.key(0), task.train.inputs[0, :1])
    for run in (Run("x", counts=(1, 3), keep=0.6), Run("y", counts=(2,), keep=0.5, local="ordered", low=0.5)):
        found = fedp3_task.expected_bits(run, task.layers, params, 4)
        plan, pruning = fedp3_task.plan_of(run, task.layers, 4000, 1), fedp3_task.local_pruning(run, 4000)
        drawn = algorithms.ledger(plan, params, local_pruning=pruning)
        for way in ("up", "down"):
            assert found[way] == pytest.approx(drawn[way].mean(), rel=0.02)
    widths = fedp3_task.expected_bits(Run("h", keep=1.0, local="heterofl", low=0.5), task.layers, params, 10)
    assert widths["up"] == widths["down"] < 0.9 * 32 * (64 * 8 + 3 * 8 * 8 + 8 * 10)


@pytest.mark.parametrize(
    "run",
    [
        Run("x", counts=(2,), keep=0.9),
        Run("y", counts=(3,), keep=0.7, local="uniform", low=0.7),
        Run("z", counts=(3,), keep=0.6),
        Run("w", counts=(3,), keep=0.7, local="ordered", low=0.5),
        Run("a", counts=(1, 2, 3), keep=0.9, aggregate="weighted"),
        Run("all", keep=1.0),
    ],
    ids=lambda run: run.name,
)
def test_a_program_serves_the_plans_of_all_seeds_and_of_runs_that_are_alike(settings, run):
    names = layers.Layers(tuple("abcde"), (0, 1, 2, 3, 4))
    program = fedp3_task.program_of(run, settings)
    shared = fedp3_task.program_plan(program, settings, names, 6)
    ours = fedp3_task.local_pruning(program, 6, settings)
    for seed in range(settings.seeds):
        plan = fedp3_task.plan_of(run, names, 6, seed)
        found = layers.assigned(shared, plan, local_pruning.low_numbers(ours, shared, plan), jnp.arange(6))
        np.testing.assert_array_equal(found.trained, plan.trained)
        np.testing.assert_array_equal(layers.ratios(shared)[found.ratio], plan.keep)
        wanted = fedp3_task.local_pruning(run, 6)
        assert ours._replace(low=0) == wanted._replace(low=0)
        np.testing.assert_array_equal(local_pruning.lows(ours, shared)[found.low], np.full(6, wanted.low))


def test_plans_and_bits_differ_between_seeds(overlap):
    rows = {row["name"]: row for row in overlap}
    assert rows["FedAvg"]["up std"] == 0 < rows["OPU2"]["up std"]
    assert all(np.isfinite(row["local"]) for row in overlap)
    assert rows["LowerB"]["up expected"] == pytest.approx(32 * ((64 * 8 + 3 * 8 * 8) / 4 + 8 * 10))


def test_the_thesis_s_other_partitions_can_be_chosen(settings):
    more = fedp3_task.data_of(replace(settings, classes=3, concentration=0.3))
    task = fedp3_task.load(more, "class")
    assert all(len(np.unique(row)) == 3 for row in np.asarray(task.train.targets))
    shares = [
        np.asarray(fedp3_task.load(one, "dirichlet").train.weights > 0).sum(axis=1)
        for one in (more, fedp3_task.data_of(settings))
    ]
    assert shares[0].tolist() != shares[1].tolist()


def test_a_split_that_cannot_be_made_is_refused_before_anything_is_trained(pretended, settings):
    with pytest.raises(ValueError, match="a client had fewer than minimum"):
        fedp3.layer_overlap(replace(settings, splits=("class", "dirichlet"), clients=20, batch=55))
    assert not pretended


def test_a_run_that_diverges_is_nan_in_its_table(pretended, settings, tmp_path, monkeypatch):
    made = fedp3_runs.train

    def train(run, settings, split, seed):
        if run.keep == 0.7 and seed:
            raise DivergedError("the loss is not finite in round 5")
        return made(run, settings, split, seed)

    monkeypatch.setattr(fedp3_runs, "train", train)
    rows = fedp3.ratio(replace(settings, task="fashion", out=tmp_path))
    assert [np.isnan(row["accuracy"]) for row in rows] == [False, False, True, False]
    assert np.isnan(rows[2]["up"]) and "nan" in (tmp_path / "ratio_fashion_mlp.txt").read_text()


def test_all_tables_are_one_file(pretended, settings, tmp_path):
    fedp3.all_tables(replace(settings, out=tmp_path, task="fashion", splits=("class",)))
    text = (tmp_path / "fedp3.md").read_text()
    assert text.count("```") == 14 and "## ratio --trained 1 --others masked" in text and "## baselines" in text


@pytest.mark.long
def test_the_benchmark_measures_every_method():
    tiny = bench.Settings(clients=4, steps=1, batch=2, repeats=1, width=2, hidden=4, image=(16, 16, 1), more=True)
    (table,) = bench.tables(tiny)
    assert len(table.seconds) == 6 and len(table.ratios) == 5 and {"LowerB", "FedAvg"} <= set(table.seconds)


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.__name__)
def test_claims_hold(claim):
    found = claim()
    assert found.verdict in ("reproduced", "corrected") and jnp.zeros(()).dtype == jnp.float64
