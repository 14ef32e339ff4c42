"""Models pruned in memory: counts, order of work, statistics, per-block sparsity, swaps."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import llm
from commjax.pruning import model as in_memory
from commjax.pruning import recipe as recipes
from commjax.pruning import regrow, scores, statistics
from commjax.pruning import sparsity as sparsities
from commjax.pruning.recipe import Recipe, choose
from tests.pruning import models
from tests.pruning.models import kernels

pytestmark = pytest.mark.slow

WANDA = Recipe(sparsity=0.5, score=choose(scores.wanda))
STOCHASTIC = Recipe(sparsity=0.5, score=choose(scores.stoch_ria, beta=0.5))


def test_every_layer_is_pruned_to_the_count_asked_for(tmp_path):
    model, params = llm.load(models.folder(tmp_path / "source", "llama"))
    pruned, layers = in_memory.prune(model, params, models.windows(), Recipe(sparsity=0.3))
    zeros = {key: (W == 0).sum(axis=0) for key, W in kernels(pruned, model).items()}
    assert all(np.all(zeros[key] == math.floor(len(W) * 0.3)) for key, W in kernels(params, model).items())
    assert [(layer.block, layer.name) for layer in layers] == list(zeros)
    pruned, _ = in_memory.prune(model, params, models.windows(), Recipe(pattern=(1, 4)))
    assert all(np.all((W.reshape(-1, 4, W.shape[1]) != 0).sum(axis=1) == 1) for W in kernels(pruned, model).values())


def test_a_block_is_calibrated_dense_behind_pruned_blocks(tmp_path):
    """Wanda's loop, the statistics and masks by NumPy."""
    model, params = llm.load(models.folder(tmp_path / "source"))
    windows = models.windows(5)
    pruned, layers = in_memory.prune(model, params, windows, WANDA, batch_size=2)
    h = model.embed(params.outer, jnp.asarray(windows))
    errors = {}
    for i, (dense, found) in enumerate(zip(params.blocks, pruned.blocks)):
        _, inputs = model.block(dense, h)
        for name in model.linear:
            x = np.asarray(inputs[name], np.float64).reshape(-1, inputs[name].shape[-1])
            W = np.asarray(dense[name]["kernel"], np.float64)
            S = np.abs(W) * np.sqrt(np.mean(np.sum(x.reshape(5, 12, -1) ** 2, axis=1), axis=0))[:, None]
            mask = np.argsort(np.argsort(S, axis=0), axis=0) >= len(W) // 2
            np.testing.assert_array_equal(np.asarray(found[name]["kernel"]), np.where(mask, W, 0))
            errors[i, name] = np.linalg.norm(x @ (W * ~mask)) / np.linalg.norm(x @ W)
        h, _ = model.block(found, h)
    np.testing.assert_allclose([layer.error for layer in layers], list(errors.values()), rtol=1e-5)
    assert min(errors.values()) > 0.05


def test_the_error_of_a_long_calibration_comes_from_1024_drawn_tokens_whatever_the_batches(tmp_path):
    model, params = llm.load(models.folder(tmp_path / "source", num_hidden_layers=1))
    windows = models.windows(100, 31)
    drawn = in_memory.drawn_tokens(3100)
    assert len(np.unique(drawn)) == 1024 and np.all(np.diff(drawn) > 0)
    positions = np.bincount(drawn % 31, minlength=31)
    assert positions.max() < 55 and positions.min() > 15  # 33 each; a stride of few steps would take some only
    entering = jax.jit(model.block)(params.blocks[0], model.embed(params.outer, jnp.asarray(windows)))[1]
    wanted = np.asarray(entering["mlp.down_proj"]).reshape(3100, -1)[drawn]
    for batch_size in (100, 30, 1):
        h = in_memory.embed(model, params.outer, windows, batch_size)
        found = in_memory.calibrate(model, params.blocks[0], h)["mlp.down_proj"]
        np.testing.assert_allclose(found.inputs, wanted, rtol=1e-5, atol=1e-5)
        assert int(found.stats.samples) == 100 and int(found.stats.tokens) == 3100


def test_norms_of_outputs_are_of_what_the_layer_gives_with_its_bias(tmp_path):
    model, params = llm.load(models.folder(tmp_path / "source", "opt", num_hidden_layers=1))
    block = params.blocks[0]
    bias = jnp.arange(24, dtype=jnp.float32) - 12
    block = block | {"fc1": block["fc1"] | {"bias": bias}}
    h = in_memory.embed(model, params.outer, models.windows(), 2)
    x = np.concatenate([np.asarray(jax.jit(model.block)(block, one)[1]["fc1"], np.float64) for one in h])
    y = x @ np.asarray(block["fc1"]["kernel"], np.float64) + np.asarray(bias, np.float64)
    stats = in_memory.calibrate(model, block, h, outputs=True)["fc1"].stats
    np.testing.assert_allclose(statistics.output_norm(stats), np.sqrt((y**2).sum(axis=(0, 1)) / 4), rtol=1e-5)
    dense = params._replace(blocks=(block,))
    pruned, _ = in_memory.prune(model, dense, models.windows(), Recipe(0.5, score=choose(scores.owanda), group="layer"))
    S = np.abs(np.asarray(block["fc1"]["kernel"], np.float64)) * np.sqrt((y**2).sum(axis=(0, 1)))
    assert np.array_equal(
        np.asarray(pruned.blocks[0]["fc1"]["kernel"] == 0), np.sort(S, axis=None)[S.size // 2 - 1] >= S
    )


def test_owl_gives_blocks_with_outliers_more_weights(tmp_path):
    model, params = llm.load(models.folder(tmp_path / "source"))
    q = params.blocks[1]["self_attn.q_proj"]["kernel"].at[:2].mul(100.0)
    loud = params.blocks[1] | {"self_attn.q_proj": {"kernel": q}}
    params = params._replace(blocks=(params.blocks[0], loud, params.blocks[2]))
    _, layers = in_memory.prune(model, params, models.windows(), WANDA._replace(spread=0.1, group="layer"))
    each = [np.mean([one.sparsity for one in layers if one.block == i]) for i in range(3)]
    assert each[1] < each[0] - 0.1 and each[1] < each[2] - 0.1 and np.mean(each) == pytest.approx(0.5, abs=0.005)


def test_regrowing_touches_only_the_layers_asked_for(tmp_path):
    model, params = llm.load(models.folder(tmp_path / "source", num_hidden_layers=1))
    plain, _ = in_memory.prune(model, params, models.windows(), WANDA)
    swap = WANDA._replace(regrow=choose(regrow.dsnot, threshold=0.0))
    for recipe, touched in ((swap, "self_attn."), (swap._replace(regrow_layers=("mlp.up",)), "mlp.up")):
        swapped, _ = in_memory.prune(model, params, models.windows(), recipe)
        a, b = kernels(plain, model), kernels(swapped, model)
        changed = {name for i, name in a if not np.array_equal(a[i, name], b[i, name])}
        assert changed and all(name.startswith(touched) for name in changed)
        assert all(np.array_equal((a[key] == 0).sum(axis=0), (b[key] == 0).sum(axis=0)) for key in a)


def test_with_a_pattern_dsnot_prunes_by_the_scores_of_the_mask(tmp_path, monkeypatch):
    model, params = llm.load(models.folder(tmp_path / "source", num_hidden_layers=1))
    given = []
    real = regrow.dsnot

    def dsnot(W, mask, stats, **options):
        given.append(options)
        return real(W, mask, stats, **options)

    monkeypatch.setattr(regrow, "dsnot", dsnot)
    in_memory.prune(model, params, models.windows(), Recipe(pattern=(2, 4), regrow=choose(regrow.dsnot)))
    in_memory.prune(model, params, models.windows(), WANDA._replace(regrow=choose(regrow.dsnot)))
    assert {one["pattern"] for one in given} == {(2, 4), None}
    assert all(("prune" in one) == (one["pattern"] is not None) for one in given)


def test_stochastic_scores_follow_the_seed(tmp_path):
    model, params = llm.load(models.folder(tmp_path / "source"))
    one, two, three = (
        kernels(in_memory.prune(model, params, models.windows(), STOCHASTIC._replace(seed=s))[0], model)
        for s in (0, 0, 1)
    )
    assert all(np.array_equal(one[key], two[key]) for key in one)
    assert all(not np.array_equal(one[key], three[key]) for key in one)


def test_all_blocks_share_one_program(tmp_path):
    model, params = llm.load(models.folder(tmp_path / "source", num_hidden_layers=4, vocab_size=63))
    programs: list[Any] = [in_memory._calibrate, in_memory.advance_once, in_memory.embed_once]
    before = [one._cache_size() for one in programs]
    in_memory.prune(model, params, models.windows(6), Recipe(sparsity=0.5), batch_size=3)
    in_memory.prune(model, params, models.windows(6), Recipe(sparsity=0.2), batch_size=3)
    assert [one._cache_size() for one in programs] == [count + 1 for count in before]


def test_owl_is_refused_up_front_only_where_no_outliers_could_bring_it_into_range(tmp_path):
    """Three blocks: the mean r of their scaled ratios is in 1/3..2/3, sparsities in s - 2 spread (1 - r)..s + 2 spread
    r."""
    model, _ = llm.load(models.folder(tmp_path / "source"))
    for sparsity in (0.07, 0.93):
        recipes.check(WANDA._replace(sparsity=sparsity, spread=0.1), model)
    for sparsity in (0.06, 0.94):
        with pytest.raises(ValueError, match=rf"spread=0\.1 with sparsity={sparsity} on 3 blocks"):
            recipes.check(WANDA._replace(sparsity=sparsity, spread=0.1), model)
    deep = model._replace(config=model.config._replace(num_hidden_layers=32))
    for sparsity in (0.85, 0.9):
        recipes.check(WANDA._replace(sparsity=sparsity, spread=0.08), deep)
    one = model._replace(config=model.config._replace(num_hidden_layers=1))
    recipes.check(WANDA._replace(sparsity=0.99, spread=0.4), one)  # one block has the mean
    with pytest.raises(ValueError, match=r"spread=-0\.1; allowed: finite, at least 0"):
        recipes.check(WANDA._replace(spread=-0.1), model)


def test_owl_at_nine_tenths_prunes_where_the_outliers_allow_it_and_counts_them_by_the_multiple(tmp_path, monkeypatch):
    """One quiet block of three: the two others keep more, and 0.9 + 2 spread / 3 fits."""
    model, params = llm.load(models.folder(tmp_path / "source"))
    asked = []

    def ratio(matrices, multiple):
        asked.append(multiple)
        return [0.1, 0.1, 0.0][(len(asked) - 1) % 3]

    monkeypatch.setattr(sparsities, "outlier_ratio", ratio)
    recipe = WANDA._replace(sparsity=0.9, spread=0.06, group="layer", outlier_multiple=3.0)
    _, layers = in_memory.prune(model, params, models.windows(), recipe)
    each = [np.mean([one.sparsity for one in layers if one.block == i]) for i in range(3)]
    np.testing.assert_allclose(each, [0.86, 0.86, 0.98], atol=0.004)
    assert asked == [3.0] * 3
    with pytest.raises(ValueError, match=r"gives sparsities from 0\.87 to 1\.05"):  # a loud block of three would do
        in_memory.prune(model, params, models.windows(), recipe._replace(spread=0.09, sparsity=0.93))
