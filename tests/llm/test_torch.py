"""Live: torch and transformers read what we write, and agree."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from commjax import llm  # noqa: E402
from commjax.llm import base, config, llama2c, tokens  # noqa: E402
from tests.llm import tiny  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore"),  # theirs, which change with every release
]


def torch_model(folder, **options):
    found, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, trust_remote_code=False, **options
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found.eval()


def torch_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor(np.asarray(ids)).long()).logits.float().numpy()


@pytest.mark.parametrize("case", tiny.CASES)
def test_what_we_save_torch_loads_with_the_same_logits(case, tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "source", case))
    llm.save(tmp_path / "copy", model, params, shard_bytes=3000)
    ids = tiny.tokens(case)
    theirs = torch_logits(torch_model(tmp_path / "copy"), ids)
    np.testing.assert_allclose(base.forward(model, params, jnp.asarray(ids)), theirs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(theirs, tiny.logits(case), rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["llama biases", "opt projections"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_kept_by_both(case, dtype, tmp_path):
    source = torch_model(tiny.golden(tmp_path / "float32", case), dtype=getattr(torch, dtype))
    source.save_pretrained(tmp_path / "half")
    model, params = llm.load(tmp_path / "half")
    assert model.config.dtype == dtype == str(params.blocks[0][model.linear[0]]["kernel"].dtype)
    llm.save(tmp_path / "copy", model, params)
    again = torch_model(tmp_path / "copy")
    for name, tensor in source.state_dict().items():
        assert again.state_dict()[name].dtype == tensor.dtype and torch.equal(again.state_dict()[name], tensor)
    ids = tiny.tokens(case)
    ours = np.asarray(base.forward(model, params, jnp.asarray(ids)).astype(jnp.float32))
    error = np.sqrt(np.mean((ours - torch_logits(again, ids)) ** 2))
    assert error < {"bfloat16": 0.06, "float16": 0.006}[dtype]


@pytest.mark.parametrize("case", ["llama llama3 scaling", "llama theta 5e5"])
def test_far_positions_agree(case, tmp_path):
    """At 1000 tokens, a relative error of 1e-5 in a frequency would show."""
    model, params = llm.load(tiny.golden(tmp_path, case))
    ids = np.random.default_rng(0).integers(0, 29, (1, 1000)).astype(np.int32)
    ours = jax.jit(lambda params: base.forward(model, params, jnp.asarray(ids)))(params)
    np.testing.assert_allclose(ours, torch_logits(torch_model(tmp_path), ids), rtol=0, atol=5e-4)


@pytest.mark.parametrize("case", tiny.CASES)
def test_our_config_is_theirs(case, tmp_path):
    """Every field that transformers reads from what we write is the one it had."""
    export, wanted = tmp_path / "config.json", transformers.AutoConfig.for_model(**tiny.goldens()[case]["config"])
    export.write_text(json.dumps(config.to_json(config.from_json(tiny.CASES[case]))))
    found = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    mine, theirs = found.to_dict(), wanted.to_dict()
    theirs.get("rope_parameters", {}).pop("type", None)  # an old name of rope_type, kept beside it
    differ = {key for key, value in theirs.items() if mine.get(key) != value}
    assert differ <= {"architectures", "dtype", "transformers_version", "_name_or_path", "pad_token_id"}, differ


def test_stories260k_runs_in_transformers(real_data, tmp_path):
    llama2c.to_hugging_face(
        f"{real_data}/stories/stories260K.bin", tmp_path / "stories", f"{real_data}/stories/tok512.bin"
    )
    model, params = llm.load(tmp_path / "stories", finite=True)
    ids = tokens.load(tmp_path / "stories").encode("One day, a little girl named Lily found a needle in her room.")
    ours = base.forward(model, params, jnp.asarray([ids], jnp.int32))
    np.testing.assert_allclose(ours, torch_logits(torch_model(tmp_path / "stories"), [ids]), rtol=0, atol=5e-5)
