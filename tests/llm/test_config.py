"""config.json in both spellings; what these models cannot compute is refused."""

import json

import pytest

from commjax import llm
from commjax.llm import config
from commjax.llm.config import Config, Rope
from tests.llm import tiny

pytestmark = pytest.mark.slow

LLAMA = {"model_type": "llama"}
OPT = {"model_type": "opt"}


@pytest.mark.parametrize("case", tiny.CASES)
def test_both_spellings_say_the_same(case):
    """transformers 4's (our cases) and transformers 5's (what it wrote of them)."""
    new = tiny.goldens()[case]["config"]
    assert ("rope_parameters" in new) == case.startswith("llama")
    assert config.from_json(tiny.CASES[case]) == config.from_json(new)


@pytest.mark.parametrize("case", tiny.CASES)
def test_what_is_written_is_read_back(case):
    found = config.from_json(tiny.CASES[case])
    assert config.from_json(json.loads(json.dumps(config.to_json(found)))) == found


def test_defaults_are_those_of_transformers():
    assert config.from_json(LLAMA) == Config(
        "llama", 32000, 4096, 11008, 32, 32, 32, 128, 2048, "silu", False, "float32", 1e-6, Rope(10000.0)
    )
    assert config.from_json(OPT) == Config(
        "opt", 50272, 768, 3072, 12, 12, 12, 64, 2048, "relu", True, "float32", word_embed_proj_dim=768
    )
    assert config.from_json(LLAMA | {"num_key_value_heads": None, "head_dim": None}) == config.from_json(LLAMA)


def test_every_field_is_read():
    found = {
        **LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 11,
        "hidden_size": 12,
        "intermediate_size": 13,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 17,
        "hidden_act": "relu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-4,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500,
    }
    wanted = Config("llama", 11, 12, 13, 3, 6, 2, 8, 17, "relu", True, "bfloat16", 1e-4, Rope(500.0), True, True)
    assert config.from_json(found) == wanted
    found = {
        **OPT,
        "vocab_size": 11,
        "hidden_size": 12,
        "ffn_dim": 13,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 17,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
        "dtype": "float16",
        "word_embed_proj_dim": 5,
        "_remove_final_layer_norm": True,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
    }
    wanted = Config("opt", 11, 12, 13, 3, 6, 6, 2, 17, "gelu", False, "float16", word_embed_proj_dim=5)
    wanted = wanted._replace(final_layer_norm=False, enable_bias=False, layer_norm_elementwise_affine=False)
    assert config.from_json(found) == wanted
    after = config.from_json(OPT | {"do_layer_norm_before": False})
    assert not after.do_layer_norm_before and not after.final_layer_norm


LONG = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, Rope(10000.0)),
        ({"rope_scaling": None, "rope_theta": 7}, Rope(7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(10000.0, "linear", 2.0)),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}, Rope(10000.0, "linear", 2.0)),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, Rope(7.0)),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 7}, Rope(7.0)),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, Rope()),
        ({"rope_scaling": LONG}, Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 2048)),
        ({"rope_scaling": LONG | {"original_max_position_embeddings": 9}}, Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 9)),
    ],
)
def test_rotary_positions(said, wanted):
    assert config.from_json(LLAMA | said).rope == wanted


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, r"model_type=None; allowed: 'llama', 'opt'"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]; allowed"),
        ({"model_type": "mistral"}, r"model_type='mistral'; allowed: 'llama', 'opt'"),
        (
            LLAMA | {"architectures": ["MistralForCausalLM"]},
            r"architectures=.*Mistral.*; allowed: \['LlamaForCausalLM'\]",
        ),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, r"allowed: \['LlamaForCausalLM'\]"),
        (OPT | {"architectures": ["LlamaForCausalLM"]}, r"allowed: \['OPTForCausalLM'\]"),
        (LLAMA | {"quantization_config": {"bits": 4}}, r"quantization_config is set; allowed: .*float32"),
        (LLAMA | {"num_key_value_heads": 5}, r"num_key_value_heads=5; allowed: a divisor of num_attention_heads=32"),
        (LLAMA | {"head_dim": 5}, r"head_dim=5; allowed: an even number"),
        (LLAMA | {"hidden_size": 33}, r"hidden_size=33; allowed: a multiple of num_attention_heads=32"),
        (OPT | {"hidden_size": 13}, r"hidden_size=13; allowed: a multiple of num_attention_heads=12"),
        (LLAMA | {"vocab_size": 0}, r"vocab_size=0; allowed: a whole number of at least 1"),
        (LLAMA | {"vocab_size": 2.0}, r"vocab_size=2.0; allowed: a whole number"),
        (LLAMA | {"num_hidden_layers": True}, r"num_hidden_layers=True; allowed: a whole number"),
        (OPT | {"ffn_dim": "big"}, r"ffn_dim='big'; allowed: a whole number"),
        (LLAMA | {"tie_word_embeddings": 1}, r"tie_word_embeddings=1; allowed: true or false"),
        (LLAMA | {"hidden_act": "gelu_new"}, r"hidden_act='gelu_new'; allowed: 'silu', 'relu', 'gelu'"),
        (LLAMA | {"rms_norm_eps": 0}, r"rms_norm_eps=0; allowed: a positive number"),
        (LLAMA | {"rms_norm_eps": float("inf")}, r"rms_norm_eps=inf; allowed: a positive number"),
        (LLAMA | {"rms_norm_eps": True}, r"rms_norm_eps=True; allowed: a positive number"),
        (LLAMA | {"rms_norm_eps": "1"}, r"rms_norm_eps='1'; allowed: a positive number"),
        (LLAMA | {"torch_dtype": "float8"}, r"\['float8'\]; allowed: one of float32, float16, bfloat16"),
        (LLAMA | {"torch_dtype": "float16", "dtype": "float32"}, r"\['float16', 'float32'\]; allowed: one of"),
        (
            LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2}},
            r"rope_type='yarn'; allowed: 'default', 'linear', 'llama3'",
        ),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, r"factor=None; allowed: a positive number"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "rope_type": "llama3"}},
            r"rope_type is 'linear' and 'llama3' in two",
        ),
        (LLAMA | {"rope_scaling": [2]}, r"rope_scaling, rope_parameters: \[\[2\]\]; allowed: JSON objects"),
        (LLAMA | {"rope_theta": 7, "rope_parameters": {"rope_theta": 8}}, r"rope_theta is 8 and 7 in two places"),
        (LLAMA | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5; allowed: 1"),
        (
            LLAMA | {"rope_scaling": LONG | {"low_freq_factor": 4}},
            r"low_freq_factor=4.0; allowed: less than high_freq_factor=4.0",
        ),
        (
            LLAMA | {"rope_scaling": LONG | {"high_freq_factor": None}},
            r"high_freq_factor=None; allowed: a positive number",
        ),
    ],
)
def test_other_models_and_contradictions_are_refused(found, message):
    with pytest.raises(ValueError, match=message):
        config.from_json(found)


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(ValueError, match=r"head_dim=4; allowed: hidden_size / num_attention_heads = 12/6"):
        llm.model(config.from_json(OPT | {"hidden_size": 12, "num_attention_heads": 6})._replace(head_dim=4))
    with pytest.raises(ValueError, match=r"word_embed_proj_dim=0; allowed: at least 1, hidden_size by default"):
        llm.model(config.from_json(OPT)._replace(word_embed_proj_dim=0))


def test_errors_of_a_folder_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .*config.json; allowed: a model folder"):
        config.load(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "holds a list"), ('{"model_type": "t5"}', "model_type='t5'")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config.json.*{message}"):
            config.load(tmp_path)
