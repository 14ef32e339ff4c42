"""The drivers of Chapter 6 on the model that comes with the package, at toy size."""

import dataclasses
import json
import warnings

import jax
import numpy as np
import pytest

from commjax import llm
from commjax.llm import embedded, perplexity, tokens
from commjax.pruning import scores, zeroshot
from commjax.pruning.recipe import Recipe, choose
from experiments.scorecard.claims import symwanda as claims
from experiments.symwanda import commands as symwanda
from experiments.symwanda import task as symwanda_task
from experiments.symwanda import zeroshot as symwanda_zeroshot
from tests.pruning import models

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return symwanda.Settings(
        samples=2,
        most=4,
        sparsities=(0.5,),
        betas=(0.2,),
        seeds=2,
        out=tmp_path_factory.mktemp("symwanda"),
        progress=False,
    )


def test_the_embedded_model_is_as_good_as_its_record_says_on_text_that_it_has_not_seen():
    model, params = embedded.load()
    about = json.loads((embedded.FOLDER / "training.json").read_text())
    assert about["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params)) <= 1_500_000
    windows = tokens.evaluation_windows(embedded.corpus().held_out.tolist(), about["window"])[:40]
    found = perplexity.nats_per_token(perplexity.losses(model, params.outer, params.blocks, windows))
    # Other versions of Python have slightly other texts, and 40 windows are a part.
    assert abs(found - about["held_out_nats"]) < 0.15 < about["held_out_nats"] < 0.5 * np.log(128)


def test_training_and_held_out_topics_are_apart():
    train, held_out = embedded.corpus()
    decode = embedded.tokenizer().decode
    longest = max(decode(held_out.tolist()).split("\n\n"), key=len)
    assert len(longest) > 200 and longest not in decode(train.tolist())


def test_pruning_half_of_the_weights_costs_and_every_group_is_measured(settings, monkeypatch):
    some = {name: symwanda.SCORES[name] for name in ("Wanda", "SymWanda", "RIA, alpha = 0.5")}
    monkeypatch.setattr(symwanda, "SCORES", some)
    rows = symwanda.methods(settings)
    assert [row["name"].rsplit(",", 1)[0] for row in rows] == list(some)
    dense = symwanda.dense(settings)
    assert all(dense < row[group] < 128 for row in rows for group in symwanda.GROUPS)
    assert (settings.out / "methods_topics.png").read_bytes().startswith(b"\x89PNG")
    assert f"dense {dense:.3f}" in (settings.out / "methods_topics.txt").read_text()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Every driver on a random model of one shape of layer: settings and the recipes that were measured."""
    model, params = llm.load(models.folder(tmp_path / "model", num_hidden_layers=2))
    task = symwanda_task.Task(model, params, models.windows(2), models.windows(2)[:, ::-1].copy())
    for module in (symwanda, symwanda_task, symwanda_zeroshot):
        monkeypatch.setattr(module, "load", lambda settings: task)
    seen, real = [], symwanda.measured
    monkeypatch.setattr(symwanda, "measured", lambda task, recipe: seen.append(recipe) or real(task, recipe))
    return symwanda.Settings(out=tmp_path, progress=False), seen


def test_the_table_of_alpha_has_both_sides(tiny):
    settings, seen = tiny
    rows = {row["name"]: row for row in symwanda.alpha(settings)}
    assert len(rows) == 16 and all(np.isfinite(row[group]) for row in rows.values() for group in symwanda.GROUPS)
    assert rows["Wanda, alpha = 1"] != rows["RIA in, alpha = 1"] != rows["RIA out, alpha = 1"]
    sides = {recipe.score.options.get("axes") for recipe in seen if recipe is not None}
    assert sides == {None, ("in",), ("out",), ("in", "out")}
    # Within an output the norm of the output is a constant, so the out side alone is Wanda.
    assert rows["RIA out, alpha = 1"]["output"] == pytest.approx(rows["Wanda, alpha = 1"]["output"], rel=1e-5)


def test_the_table_of_norms_goes_from_0_to_infinity(tiny):
    rows = {row["name"]: row for row in symwanda.norms(tiny[0])}
    assert list(rows) == ["p = 0", "p = 1", "p = 2", "p = 3", "p = 4", "p = inf"]
    # Dense weights: counts are the same everywhere, so p = 0 is Wanda (T68).
    wanda = symwanda.grid(tiny[0], {"Wanda": Recipe(0.5, score=symwanda.SCORES["Wanda"])}, "")[0]
    assert rows["p = 0"]["layer"] == pytest.approx(wanda["layer"], rel=1e-5) != rows["p = 1"]["layer"]


def test_the_ablation_changes_one_option_at_a_time_from_each_bases_best(tiny):
    settings, seen = tiny
    rows = {row["name"]: row for row in symwanda.ablation(settings)}
    assert len(rows) == 30 and {recipe.regrow_layers for recipe in seen if recipe is not None} == {("self_attn.",)}
    best = {recipe.score.function: recipe.regrow.options for recipe in reversed(seen) if recipe is not None}
    assert best[scores.wanda] == {"cycles": 50, "relative_grow": False, "relative_prune": True, "gamma_prune": 1e-3}
    assert best[scores.ria] == {"cycles": 50, "relative_grow": True, "relative_prune": False, "gamma_prune": 1e-4}
    for base in ("Wanda", "RIA"):  # W5: the printed regulariser changes nothing
        for name in ("p = 1", "p = inf", "gamma_prune = 0", "gamma_prune = 1e-4", "gamma_prune = 1e-3"):
            assert rows[f"{base}, {name}"]["output"] == rows[f"{base}, best"]["output"]


def test_fine_tuning_says_how_many_swaps_and_in_which_layers(tiny):
    settings, seen = tiny
    rows = symwanda.fine_tuning(dataclasses.replace(settings, cycles=(3, 1)))
    assert len(rows) == 3 * (1 + 2 * 2 * 2)
    assert [row["name"] for row in rows[9:12]] == [
        "Wanda",
        "Wanda + DSnoT, 3, attention",
        "Wanda + R^2-DSnoT, 3, attention",
    ]
    found = {(one.regrow.options["cycles"], one.regrow_layers) for one in seen if one is not None and one.regrow}
    assert found == {(3, ("self_attn.",)), (1, ("self_attn.",)), (3, ("",)), (1, ("",))}


LINES = {
    "arc_easy": {"question": "Why?", "choices": ["So.", "Not so."], "label": 1},
    "openbookqa": {"question": "The sun is", "choices": ["hot", "cold"], "label": 0},
    "hellaswag": {"ctx": "A man: he", "endings": ["runs.", "is ripping.", "x", "y"], "label": 3},
    "boolq": {"question": "is it", "passage": "It is.", "label": True},
    "rte": {"premise": "It rains.", "hypothesis": "It is wet.", "label": "not_entailment"},
    "winogrande": {"sentence": "Sarah saw Ann, so _ ran .", "option1": "Sarah", "option2": "Ann", "answer": "2"},
}


@pytest.mark.extra
@pytest.mark.long
def test_zero_shot_is_the_accuracy_of_our_own_reader_on_every_task(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    (tmp_path / "zeroshot").mkdir()
    monkeypatch.setenv("COMMJAX_DATA", str(tmp_path))
    for name, line in LINES.items():
        (tmp_path / "zeroshot" / f"{symwanda_zeroshot.TASKS[name]['file']}.jsonl").write_text(
            f"{json.dumps(line)}\n" * 3
        )
    settings = symwanda.Settings(samples=2, limit=2, tasks=tuple(LINES), out=tmp_path, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # others' deprecations
        rows = symwanda_zeroshot.zero_shot(settings)
    assert [row["name"] for row in rows] == ["dense", "magnitude, 50 %", "Wanda, 50 %", "RIA, 50 %"]
    score = zeroshot.scorer(*embedded.load(), embedded.tokenizer())
    for name, found in rows[0]["tasks"].items():
        reader = getattr(zeroshot, name.removesuffix("_easy"))
        path = tmp_path / "zeroshot" / f"{symwanda_zeroshot.TASKS[name]['file']}.jsonl"
        wanted = zeroshot.accuracy(score, zeroshot.read(path, reader, limit=2))
        assert (found["acc"], found["count"]) == (wanted.acc, 2)


def test_tasks_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match="tasks='piqa'; allowed: arc_easy, arc_challenge"):
        symwanda_zeroshot.config("piqa", tmp_path, None)
    with pytest.raises(
        ValueError, match=r"no rte_val\.jsonl\(\.xz\) in .*; allowed: COMMJAX_DATA with a folder zeroshot"
    ):
        symwanda_zeroshot.config("rte", tmp_path, None)


def test_the_figures_of_the_readme_on_stories260k(real_data, monkeypatch):
    monkeypatch.setenv("COMMJAX_DATA", str(real_data))
    claims.stories.cache_clear()
    rows, dense = claims.stories()
    wanda, ria = rows["Wanda"], rows["RIA, alpha = 0.5"]
    found = [dense, wanda["output"], wanda["layer"], ria["output"], ria["layer"]]
    np.testing.assert_allclose(found, [4.396, 5.351, 5.540, 5.384, 5.378], atol=2e-3)
    assert claims.stories_ranking().errata == "W17" and claims.stories_groups().verdict == "reproduced"


def test_what_was_computed_is_not_computed_again(tiny, monkeypatch):
    settings, _ = tiny
    rows = symwanda.strategies(settings)
    monkeypatch.setattr(symwanda, "measured", lambda task, recipe: pytest.fail("computed twice"))
    assert symwanda.strategies(settings) == rows


def test_all_seeds_in_one_vmap_are_the_seeds_one_by_one(tiny):
    settings = dataclasses.replace(tiny[0], betas=(0.2,), seeds=2)
    task = symwanda.load(settings)
    recipe = Recipe(0.5, score=choose(scores.stoch_ria, beta=0.2))
    for group in symwanda.GROUPS:
        together = symwanda.over_seeds(task, recipe._replace(group=group), 2)
        apart = [symwanda.measured(task, recipe._replace(seed=seed, group=group)) for seed in range(2)]
        np.testing.assert_allclose(together, apart, rtol=1e-5)
        assert together[0] != together[1]
    together = symwanda.over_seeds(task, recipe, 2)
    row = symwanda.beta(settings)[1]
    assert row["output"] == pytest.approx(np.mean(together)) and row["output_std"] == pytest.approx(
        np.std(together, ddof=1)
    )


def test_a_folder_needs_its_texts(settings):
    with pytest.raises(ValueError, match="model='somewhere'; allowed: topics, stories260K, or a folder with"):
        symwanda.load(dataclasses.replace(settings, model="somewhere"))


def test_claims_about_matrices_are_corrected_as_the_errata_say():
    assert [claims.special_case().errata, claims.grow_rule().errata] == ["W7", "W4"]


def test_patterns_that_do_not_fit_every_layer_are_left_out(tiny, monkeypatch):
    settings, _ = tiny
    monkeypatch.setattr(symwanda, "SCORES", {"Wanda": symwanda.SCORES["Wanda"]})
    monkeypatch.setattr(symwanda, "over_seeds", lambda task, recipe, seeds: [20.0, 22.0])
    rows = symwanda.patterns(settings)
    assert [row["name"] for row in rows] == ["Wanda, 2:4", "Wanda, 4:8", "stochRIA, 2:4", "stochRIA, 4:8"]
    assert "layer" not in rows[0] and (rows[2]["output"], rows[2]["output_std"]) == (21.0, 2**0.5)
    shapes = {"q": {"kernel": (12, 4)}}
    task = symwanda.load(settings)
    odd = task._replace(model=task.model._replace(linear=("q",), block_shapes=shapes))
    monkeypatch.setattr(symwanda, "load", lambda settings: odd)
    monkeypatch.setattr(symwanda, "grid", lambda settings, recipes, label: [{"name": name} for name in recipes])
    monkeypatch.setattr(symwanda, "drawn", lambda settings, name, recipe: {"name": name})
    monkeypatch.setattr(symwanda, "report", lambda settings, command, rows, about: rows)
    assert [row["name"] for row in symwanda.patterns(settings)] == ["Wanda, 2:4", "stochRIA, 2:4"]
