"""The contract that a streaming pruner relies on: blocks of one shape, and what enters their layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import llm
from commjax.integrations import flax as cj_flax
from commjax.llm import base, config, layers, llama, opt
from tests.llm import tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["llama biases", "llama head_dim", "opt pre-norm", "opt post-norm", "opt bare"])
def test_inputs_are_what_enters_each_layer(case, tmp_path, monkeypatch):
    model, params = llm.load(tiny.golden(tmp_path, case))
    entered = []
    real = layers.linear

    def spy(layer, x):
        entered.append((layer, x))
        return real(layer, x)

    monkeypatch.setattr(layers, "linear", spy)
    h = model.embed(params.outer, jnp.asarray(tiny.tokens(case)))
    entered.clear()
    _, inputs = model.block(params.blocks[0], h)
    assert tuple(inputs) == model.linear and len(entered) == len(model.linear)
    for name, given in inputs.items():
        (wanted,) = [x for layer, x in entered if layer is params.blocks[0][name]]
        np.testing.assert_array_equal(given, wanted)
        assert given.shape[-1] == params.blocks[0][name]["kernel"].shape[0]


@pytest.mark.parametrize("case", ["llama biases", "opt pre-norm"])
def test_inputs_that_nobody_reads_cost_nothing(case, tmp_path):
    model, params = llm.load(tiny.golden(tmp_path, case))
    h = model.embed(params.outer, jnp.asarray(tiny.tokens(case)))
    compiled = jax.jit(lambda p, h: model.block(p, h)[0]).lower(params.blocks[0], h).compile()
    assert jax.tree.leaves(compiled.out_info)[0].shape == h.shape and len(jax.tree.leaves(compiled.out_info)) == 1


@pytest.mark.parametrize("case", ["llama grouped queries", "opt pre-norm"])
def test_the_future_does_not_reach_the_past(case, tmp_path):
    model, params = llm.load(tiny.golden(tmp_path, case))
    tokens = tiny.tokens(case)
    other = tokens.copy()
    other[:, 10:] = (other[:, 10:] + 1) % 29
    first, second = (base.forward(model, params, jnp.asarray(one)) for one in (tokens, other))
    np.testing.assert_array_equal(first[:, :10], second[:, :10])
    assert np.abs(np.asarray(first - second))[:, 10:].max(axis=(0, 2)).min() > 1e-3


def test_opt_has_as_many_positions_as_its_table(tmp_path):
    model, params = llm.load(tiny.golden(tmp_path, "opt pre-norm"))
    assert base.forward(model, params, jnp.ones((1, 24), jnp.int32)).shape == (1, 24, 29)
    with pytest.raises(ValueError, match=r"tokens has 25 positions; allowed: max_position_embeddings=24"):
        base.forward(model, params, jnp.ones((1, 25), jnp.int32))


def test_each_architecture_takes_its_own_config():
    for module, kind in ((llama, "opt"), (opt, "llama")):
        with pytest.raises(ValueError, match=rf"config.architecture='{kind}'; allowed: '"):
            module.model(config.from_json({"model_type": kind}))


def test_one_config_has_one_model():
    """So that jit finds what it compiled."""
    first, second = (llm.model(config.from_json(tiny.CASES["llama tied"])) for _ in range(2))
    assert first is second and first.block is second.block


@pytest.mark.parametrize("case", ["llama biases", "opt projections"])
def test_random_weights_are_as_transformers_begins(case):
    model = llm.model(config.from_json(tiny.CASES[case])._replace(intermediate_size=4000))
    params = llm.init(jax.random.key(0), model, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")} and len(params.blocks) == 2
    assert jax.tree.map(jnp.shape, params.outer) == model.outer_shapes
    large = params.blocks[0]["mlp.up_proj" if "llama" in case else "fc1"]["kernel"].astype(jnp.float32)
    assert abs(float(large.std()) - 0.02) < 2e-4 and abs(float(large.mean())) < 2e-4
    for block in params.blocks:
        for layer in block.values():
            assert all(jnp.all(leaf == 0) for kind, leaf in layer.items() if kind == "bias")
            assert all(jnp.all(leaf == 1) for kind, leaf in layer.items() if kind == "scale")
    drawn = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert len({np.asarray(leaf).tobytes()[:16] for leaf in drawn}) == len(drawn)  # no key is used twice


@pytest.mark.parametrize("case", ["llama tied", "opt projections"])
def test_flax_holds_the_same_kernels(case, tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "model", case))
    module, tokens = cj_flax.CausalLM(model.config), jnp.asarray(tiny.tokens(case))
    variables = cj_flax.variables(params)
    np.testing.assert_allclose(jnp.asarray(module.apply(variables, tokens)), tiny.logits(case), rtol=0, atol=2e-5)
    drawn = module.init(jax.random.key(0), tokens)
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, variables)
    back = cj_flax.params(variables)
    assert back.outer is params.outer and all(a is b for a, b in zip(back.blocks, params.blocks))
    assert len(back.blocks) == 2


def test_flax_trains_and_the_result_can_be_saved(tmp_path):
    small = config.from_json(tiny.CASES["llama tied"])
    module, tokens = cj_flax.CausalLM(small, jnp.float32), jnp.asarray(tiny.tokens("llama tied"))
    variables = module.init(jax.random.key(0), tokens)

    def loss(variables):
        log = jax.nn.log_softmax(jnp.asarray(module.apply(variables, tokens[:, :-1])))
        return -jnp.mean(jnp.take_along_axis(log, tokens[:, 1:, None], axis=-1))

    step = jax.jit(lambda v: jax.tree.map(lambda x, g: x - 0.5 * g, v, jax.grad(loss)(v)))
    before = float(loss(variables))
    for _ in range(5):
        variables = step(variables)
    assert float(loss(variables)) < before - 0.05
    llm.save(tmp_path / "trained", llm.model(small), cj_flax.params(variables))
    model, params = llm.load(tmp_path / "trained")
    np.testing.assert_array_equal(base.forward(model, params, tokens), jnp.asarray(module.apply(variables, tokens)))
