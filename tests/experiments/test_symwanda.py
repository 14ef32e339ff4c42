"""The drivers of Chapter 6 on the model that comes with the package, at toy size."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from commjax.llm import embedded, perplexity, tokens
from commjax.pruning import scores
from commjax.pruning.recipe import Recipe, choose
from experiments import symwanda
from experiments.claims import symwanda as claims


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


def test_what_was_computed_is_not_computed_again(settings, monkeypatch):
    rows = symwanda.strategies(settings)
    monkeypatch.setattr(symwanda, "measured", lambda task, recipe: pytest.fail("computed twice"))
    assert symwanda.strategies(settings) == rows


def test_all_seeds_in_one_program_are_the_seeds_one_by_one(settings):
    task = symwanda.load(settings)
    recipe = Recipe(0.5, score=choose(scores.stoch_ria, beta=0.2))
    together = symwanda.over_seeds(task, recipe, 2)
    apart = [symwanda.measured(task, recipe._replace(seed=seed)) for seed in range(2)]
    np.testing.assert_allclose(together, apart, rtol=2e-3)  # a tie of float32 scores may fall otherwise
    assert together[0] != together[1]
    row = symwanda.beta(settings)[1]
    assert row["output"] == pytest.approx(np.mean(together)) and row["output_std"] == pytest.approx(
        np.std(together, ddof=1)
    )


def test_a_folder_needs_its_texts(settings):
    with pytest.raises(ValueError, match="model='somewhere'; allowed: topics, stories260K, or a folder with"):
        symwanda.load(dataclasses.replace(settings, model="somewhere"))


def test_claims_about_matrices_are_corrected_as_the_errata_say():
    assert [claims.special_case().errata, claims.grow_rule().errata] == ["W7", "W4"]


def test_patterns_that_do_not_fit_every_layer_are_left_out(settings, monkeypatch):
    monkeypatch.setattr(symwanda, "SCORES", {"Wanda": symwanda.SCORES["Wanda"]})
    rows = symwanda.patterns(settings)
    assert [row["name"] for row in rows] == ["Wanda, 2:4", "Wanda, 4:8"] and "layer" not in rows[0]
    shapes = {"q": {"kernel": (12, 4)}}
    task = symwanda.load(settings)
    odd = task._replace(model=task.model._replace(linear=("q",), block_shapes=shapes))
    monkeypatch.setattr(symwanda, "load", lambda settings: odd)
    monkeypatch.setattr(symwanda, "grid", lambda settings, recipes, label: [{"name": name} for name in recipes])
    monkeypatch.setattr(symwanda, "report", lambda settings, command, rows, about: rows)
    assert [row["name"] for row in symwanda.patterns(settings)] == ["Wanda, 2:4"]
