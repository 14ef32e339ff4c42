"""From folder to folder: streaming equals in memory, transformers reads the result, bad input stops before any work."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import commjax
from commjax import llm
from commjax.llm import checkpoints
from commjax.pruning import model as in_memory
from commjax.pruning import regrow, scores, stream
from commjax.pruning import sparsity as sparsities
from commjax.pruning.recipe import Recipe, choose, describe
from tests.llm.test_checkpoints import same
from tests.pruning import models
from tests.pruning.models import kernels

pytestmark = pytest.mark.long

WANDA = Recipe(sparsity=0.5, score=choose(scores.wanda))
RECIPES = {
    "ria": ("llama", "float32", Recipe(sparsity=0.4)),
    "wanda, layer, OWL": ("square", "bfloat16", WANDA._replace(sparsity=0.6, group="layer", spread=0.1)),
    "dsnot, 2:4": ("opt", "float32", Recipe(pattern=(2, 4), regrow=choose(regrow.dsnot, threshold=0.0))),
    "r2-dsnot": (
        "square",
        "float16",
        WANDA._replace(regrow=choose(regrow.r2_dsnot), regrow_layers=("mlp", "self_attn.")),
    ),
    "stochastic": ("square", "float32", Recipe(sparsity=0.5, score=choose(scores.stoch_ria, beta=0.5), seed=3)),
    "outputs": ("square", "bfloat16", Recipe(sparsity=0.5, score=choose(scores.symwanda), group="input")),
}


@pytest.mark.parametrize("name", RECIPES)
def test_streaming_is_in_memory_bit_for_bit(name, tmp_path):
    kind, dtype, recipe = RECIPES[name]
    source = models.folder(tmp_path / "source", kind, dtype)
    before = models.files(source)
    model, params = llm.load(source)
    wanted, layers = in_memory.prune(model, params, models.windows(), recipe, batch_size=2)
    found = stream.prune_folder(source, tmp_path / "out", models.windows(), recipe, batch_size=2, progress=False)
    again, streamed = llm.load(tmp_path / "out")
    assert again is model and same(streamed, wanted) and found == layers
    assert models.files(source) == before and sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert same(params.outer, streamed.outer)
    dense, pruned = kernels(params, model), kernels(streamed, model)
    assert all(np.all((pruned[key] == 0) | (pruned[key] == dense[key])) for key in dense)
    for layer in layers:
        assert layer.sparsity == np.mean(pruned[layer.block, layer.name] == 0)


def test_the_manifest_says_what_was_done(tmp_path):
    source = models.folder(tmp_path / "source", tie_word_embeddings=True)
    (source / "manifest.json").write_text("{}")  # of an earlier pruning
    recipe = Recipe(sparsity=0.25, score=choose(scores.ria, alpha=1.0, p=2.0, join=scores.harmonic), seed=5)
    layers = stream.prune_folder(source, tmp_path / "out", models.windows(), recipe, progress=False)
    manifest = stream.read_manifest(tmp_path / "out")
    assert manifest["recipe"]["score"] == {
        "name": "ria",
        "alpha": 1.0,
        "p": 2.0,
        "axes": ["in", "out"],
        "join": "harmonic",
        "sampling": None,
    }
    assert manifest["commjax"] == commjax.__version__
    assert (
        manifest["recipe"] == describe(recipe) | {"regrow_layers": ["self_attn."]}
        and manifest["sparsities"] == [0.25] * 3
    )
    assert manifest["recipe"]["seed"] == 5 and manifest["recipe"]["group"] == "output"
    assert manifest["calibration"]["windows"] == [4, 12] and len(manifest["calibration"]["digest"]) == 16
    assert stream.layers_of(manifest) == layers and len(layers) == 21
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"beside": "the weights"}'
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    index = json.loads((tmp_path / "out" / checkpoints.INDEX).read_text())
    stored = [one for path in (tmp_path / "out").glob("*.safetensors") for one in load_file(path).values()]
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in stored) and len(stored) == len(
        index["weight_map"]
    )


def test_a_default_is_part_of_the_recipe_and_a_lambda_is_not():
    given = Recipe(0.5, score=choose(scores.ria, alpha=0.5), regrow=choose(regrow.dsnot, cycles=50))
    left = Recipe(0.5, score=choose(scores.ria), regrow=choose(regrow.dsnot))
    assert describe(given) == describe(left) and describe(left)["regrow"]["threshold"] == 0.1
    assert "pattern" not in describe(left)["regrow"]  # the recipe has it
    assert describe(Recipe(0.5, score=choose(own_score, beta=2)))["score"]["name"].endswith("test_stream.own_score")
    assert describe(Recipe(0.5, score=choose(own_score, beta=2)))["score"]["beta"] == 2
    for choice in (choose(lambda: scores.ria()), choose(scores.ria, join=lambda w, u, v: w)):
        with pytest.raises(ValueError, match="has no name for the manifest; allowed: functions made by def"):
            describe(Recipe(0.5, score=choice))
    with pytest.raises(ValueError, match=r"ria with options \['gamma'\]: got an unexpected keyword argument 'gamma'"):
        describe(Recipe(0.5, score=choose(scores.ria, gamma=1)))


def own_score(**options):
    return scores.wanda()


def test_a_default_that_changed_since_a_run_was_killed_is_refused(tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_run", lambda *arguments: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "__version__", "9.9")
        with pytest.raises(ValueError, match=rf"commjax is {commjax.__version__} there, 9.9 here"):
            stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)

    def wanda(alpha=0.9):
        return scores.wanda(alpha)

    wanda.__qualname__, wanda.__module__ = "wanda", "commjax.pruning.scores"
    with pytest.raises(ValueError, match=r"recipe is .*'alpha': 1\.0.* there, .*'alpha': 0\.9.* here"):
        stream.prune_folder(
            source, tmp_path / "out", models.windows(), WANDA._replace(score=choose(wanda)), progress=False
        )


def test_owl_that_leaves_the_range_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    monkeypatch.setattr(sparsities, "outlier_ratio", lambda matrices, multiple: float(len(seen.append(0) or seen) == 1))
    seen = []
    with pytest.raises(ValueError, match=r"spread=0\.1 with sparsity=0\.1 gives sparsities from -0\.0333"):
        stream.prune_folder(
            source, tmp_path / "out", models.windows(), WANDA._replace(sparsity=0.1, spread=0.1), progress=False
        )
    assert [path.name for path in tmp_path.iterdir()] == ["source"] and len(seen) == 3


def test_arrays_in_a_recipe_are_known_by_their_digest():
    one, two = (
        describe(Recipe(score=choose(scores.general, X=jnp.ones((2, 3)), Y=np.full((3, 2), y)))) for y in (1.0, 2.0)
    )
    assert one["score"]["X"] == two["score"]["X"] and one["score"]["Y"] != two["score"]["Y"]


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_transformers_loads_the_output_as_it_is(kind, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = models.folder(tmp_path / "source", kind)
    stream.prune_folder(source, tmp_path / "out", models.windows(), Recipe(sparsity=0.5), progress=False)
    dense, pruned = (
        transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
        for path in (source, tmp_path / "out")
    )
    tokens = torch.tensor(models.windows(), dtype=torch.long)
    model, params = llm.load(tmp_path / "out")
    with torch.no_grad():
        found = pruned(tokens).logits.numpy()
        assert np.abs(found - dense(tokens).logits.numpy()).max() > 0.01
        # The dense model with our weights put in by hand: the very same bits.
        state = dense.state_dict()
        for i, block in enumerate(params.blocks):
            for name in model.linear:
                state[model.block_prefix.format(i) + name + ".weight"].copy_(
                    torch.tensor(np.asarray(block[name]["kernel"]).T)
                )
        np.testing.assert_array_equal(dense(tokens).logits.numpy(), found)
    np.testing.assert_allclose(llm.forward(model, params, jnp.asarray(models.windows())), found, atol=2e-5)


# Bad input: an error before any work.


def change_config(source, **changes):
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(source, change):
    """`change` sees every tensor of the first shard."""
    path = sorted(source.glob("*.safetensors"))[0]
    found = {name: np.array(one) for name, one in load_file(path).items()}
    change(found)
    save_file(found, path, {"format": "pt"})


def change_index(source, change):
    path = source / checkpoints.INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def outside(files):
    files["lm_head.weight"] = "../other.safetensors"


def poison(found):
    next(iter(found.values()))[0] = np.nan


SPOILED = {
    "unknown architecture": (lambda s: change_config(s, model_type="mamba", architectures=None), "model_type='mamba'"),
    "missing tensor": (lambda s: change_tensors(s, lambda found: found.popitem()), "is in .*, but no file has it"),
    "extra tensor": (lambda s: change_tensors(s, lambda found: found.update(odd=np.zeros(2, "f4"))), "'odd'"),
    "index outside": (lambda s: change_index(s, outside), "names the file '../other.safetensors'"),
    "other shapes": (
        lambda s: change_config(s, vocab_size=62),
        r"has shape \[61, 16\]; allowed by config.json: \[62, 16\]",
    ),
    "NaN": (lambda s: change_tensors(s, poison), "values that are NaN or infinite"),
    "no config": (lambda s: (s / "config.json").unlink(), "no .*config.json"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_bad_source_is_refused_before_any_work(name, tmp_path):
    spoil, message = SPOILED[name]
    source = models.folder(tmp_path / "source")
    spoil(source)
    before = models.files(source)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert models.files(source) == before and [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "recipe, message",
    [
        (Recipe(sparsity=1.0), "sparsity=1.0; allowed: 0 <= sparsity < 1"),
        (Recipe(sparsity=-0.1), "sparsity=-0.1; allowed: 0 <= sparsity < 1"),
        (Recipe(sparsity=math.nan), "sparsity=nan; allowed: 0 <= sparsity < 1"),
        (Recipe(), "sparsity=None and pattern=None; allowed: one of them"),
        (Recipe(sparsity=0.5, pattern=(2, 4)), "allowed: one of them"),
        (Recipe(pattern=(5, 4)), "self_attn.q_proj: n=5; allowed: 1 <= n <= m = 4"),
        (Recipe(pattern=(0, 4)), "n=0; allowed"),
        (Recipe(pattern=(2, 16)), "mlp.down_proj: m=16; allowed: a divisor of the 24 inputs"),
        (Recipe(pattern=(2, 4), group="layer"), "pattern=.* with group='layer'"),
        (Recipe(pattern=(2, 4), spread=0.1), "pattern=.* spread=0.1"),
        (Recipe(sparsity=0.05, spread=0.1), "spread=0.1 with sparsity=0.05 on 3 blocks"),
        (Recipe(sparsity=0.95, spread=0.1), "spread=0.1 with sparsity=0.95 on 3 blocks"),
        (Recipe(sparsity=0.5, spread=0.1, outlier_multiple=math.inf), "outlier_multiple=inf; allowed: finite, above 0"),
        (Recipe(sparsity=0.5, score=choose(scores.ria, p=0.5)), "p=0.5"),
        (
            Recipe(sparsity=0.5, score=choose(scores.general, X=jnp.ones((2, 7)), Y=jnp.ones((7, 2)))),
            "self_attn.q_proj: .*16",
        ),
        (Recipe(sparsity=0.5, regrow=choose(regrow.dsnot, cycles=0)), "self_attn.q_proj: cycles=0"),
        (Recipe(sparsity=0.5, regrow=choose(regrow.r2_dsnot, p=0.0)), "p=0.0"),
    ],
)
def test_a_bad_recipe_is_refused_before_any_work(recipe, message, tmp_path):
    source = models.folder(tmp_path / "source", "llama")
    with pytest.raises(ValueError, match=message):
        stream.prune_folder(source, tmp_path / "out", models.windows(), recipe, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    model, params = llm.load(source)
    with pytest.raises(ValueError, match=message):
        in_memory.prune(model, params, models.windows(), recipe)


@pytest.mark.parametrize(
    "windows, message",
    [
        (models.windows(5, 33), r"windows has shape \(5, 33\); allowed: .*max_position_embeddings=32"),
        (np.zeros((0, 4), np.int32), r"windows has shape \(0, 4\)"),
        (np.array([[61]], np.int32), "windows has tokens 61..61; allowed: 0..60"),
        (np.array([[-1, 3]], np.int32), "windows has tokens -1..3; allowed: 0..60"),
    ],
)
def test_bad_windows_are_refused_before_any_work(windows, message, tmp_path):
    source = models.folder(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        stream.prune_folder(source, tmp_path / "out", windows, WANDA, progress=False)
    with pytest.raises(ValueError, match="batch_size=0; allowed: at least 1"):
        stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, batch_size=0, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_output_folder_that_exists_is_refused(tmp_path):
    source = models.folder(tmp_path / "source")
    (tmp_path / "out").mkdir()
    for out in (tmp_path / "out", source):
        with pytest.raises(ValueError, match="exists; allowed: a new folder"):
            stream.prune_folder(source, out, models.windows(), WANDA, progress=False)
    assert not (tmp_path / "out.partial").exists() and not list((tmp_path / "out").iterdir())
