"""Hostile and broken files: one line on stderr that names the file, exit code 1, nothing written."""

import bz2
import gzip
import json
import lzma
import struct
from pathlib import Path

import pytest

from commjax.llm import checkpoints
from tests.cli.cases import TEXT, prune, refused

pytestmark = pytest.mark.slow

DEEP = "[" * 100_000 + "]" * 100_000
PACK = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


def config(**changes):
    def spoil():
        path = Path("model/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def write(path, content):
    """A text, or bytes, in the place of a file."""
    return lambda: Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def index(content):
    return write(f"model/{checkpoints.INDEX}", content)


def weights(change):
    """The first file of weights, with other bytes."""

    def spoil():
        path = Path("model/model-00001-of-00004.safetensors")
        path = path if path.exists() else sorted(Path("model").glob("*.safetensors"))[0]
        path.write_bytes(change(path.read_bytes()))

    return spoil


def header(text):
    return weights(lambda content: struct.pack("<Q", len(text)) + text.encode())


def packed(kind, change):
    return write(f"text.txt.{kind}", change(PACK[kind](TEXT.encode())))


CONFIG = {
    "deep JSON": (write("model/config.json", DEEP), "model/config.json is not JSON: nested too deeply"),
    "no JSON": (write("model/config.json", "{"), "model/config.json is not JSON"),
    "empty": (write("model/config.json", ""), "model/config.json is not JSON"),
    "a list": (write("model/config.json", "[1]"), "model/config.json holds a list"),
    "no UTF-8": (write("model/config.json", b'{"a": "\xff\xfe"}'), "model/config.json is not JSON"),
    "5000 digits": (
        write("model/config.json", '{"model_type": "llama", "hidden_size": 1' + "0" * 5000 + "}"),
        "config.json is not JSON",
    ),
    "layers": (config(num_hidden_layers=10**9), "config.json: num_hidden_layers=1000000000; allowed: 1 to 4096"),
    "layers that are not there": (
        config(num_hidden_layers=4096),
        "model: .* missing tensors, first 'model.layers.10.input",
    ),
    "hidden": (config(hidden_size=10**12), "config.json: hidden_size=1000000000000; allowed: 1 to 131072"),
    "vocabulary": (config(vocab_size=10**10), "config.json: vocab_size=10000000000; allowed: 1 to 4194304"),
    "intermediate": (
        config(intermediate_size=10**10),
        "config.json: intermediate_size=10000000000; allowed: 1 to 1048576",
    ),
    "heads": (config(num_attention_heads=10**9), "config.json: num_attention_heads=1000000000; allowed: 1 to 4096"),
    "head size": (config(head_dim=10**9), "config.json: head_dim=1000000000; allowed: 1 to 16384"),
    "length": (
        config(max_position_embeddings=10**400),
        "max_position_embeddings=a number of 1329 bits; allowed: 1 to 134217728",
    ),
    "theta": (
        config(rope_theta=10**400),
        "config.json: rope_theta=a number of 1329 bits; allowed: a positive number, 1e[+]30",
    ),
    "infinite theta": (config(rope_theta=float("inf")), "config.json: rope_theta=inf; allowed: a positive number"),
    "eps": (config(rms_norm_eps=float("nan")), "config.json: rms_norm_eps=nan; allowed: a positive number"),
    "OPT sizes": (
        config(model_type="opt", architectures=None, ffn_dim=10**11),
        "config.json: ffn_dim=100000000000; allowed: 1 to 1048576",
    ),
    "type": (config(model_type=["llama"]), r"config.json: model_type=\['llama'\]; allowed: 'llama', 'opt'"),
    "code": (config(architectures=["Mine"]), "config.json: architectures="),
    "long value": (
        config(hidden_size="9" * 10**6),
        "config.json: hidden_size='999.* [.]{3} .*; allowed: a whole number",
    ),
}
WEIGHTS = {
    "deep index": (index(DEEP), "model.safetensors.index.json is not JSON: nested too deeply"),
    "index without map": (index("{}"), "index.json has no weight_map"),
    "index elsewhere": (index('{"weight_map": {"a": "../text.txt"}}'), "index.json names the file '../text.txt'"),
    "index of nothing": (index('{"weight_map": {"a": "b"}}'), "index.json names 'b', which is not there"),
    "cut": (weights(lambda content: content[:-100]), "safetensors is not a readable safetensors file"),
    "empty weights": (weights(lambda content: b""), "safetensors is not a readable safetensors file"),
    "header of 2^63": (
        weights(lambda content: struct.pack("<Q", 2**63) + content[8:]),
        "is not a readable safetensors file",
    ),
    "deep header": (header("[" * 50_000), "is not a readable safetensors file"),
    "header of a huge tensor": (
        header('{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'),
        "is not a readable",
    ),
}
TEXTS = {
    **{
        f"cut {kind}": (packed(kind, lambda content: content[:-9]), f"text.txt.{kind} cannot be unpacked as .{kind}")
        for kind in PACK
    },
    **{
        f"no {kind}": (write(f"text.txt.{kind}", TEXT), f"text.txt.{kind} cannot be unpacked as .{kind}")
        for kind in PACK
    },
    "deep text": (write("text.json", DEEP), "text.json is not JSON: nested too deeply"),
    "deep line": (write("text.jsonl", f'"a"\n{DEEP}\n'), "text.jsonl is not JSON: nested too deeply"),
    "torn JSON": (write("text.json", '["a'), "text.json is not JSON"),
    "numbers": (write("text.json", "3"), "text.json is not json of texts: TypeError"),
    "bytes": (write("text.txt", b"\xff" * 1000), "text.txt is not UTF-8 text"),
    "no text": (write("text.txt", ""), "text.txt: ids has 1 tokens"),
}
TOKENIZERS = {
    "cut tokenizer": (
        write("model/tokenizer.bin", b"\x06\0\0\0abc"),
        "model/tokenizer.bin is not a llama2.c tokenizer",
    ),
    "empty tokenizer": (write("model/tokenizer.bin", b""), "model/tokenizer.bin is not a llama2.c tokenizer"),
    "negative tokenizer": (write("model/tokenizer.bin", struct.pack("<ifi", 9, 0.0, -5)), "token 0 has length -5"),
    "other vocabulary": (
        config(vocab_size=100),
        "model: model.embed_tokens.weight has shape|model: lm_head.weight has shape",
    ),
}


@pytest.mark.parametrize("name", [*CONFIG, *WEIGHTS, *TOKENIZERS])
def test_a_model_folder(name, workspace, capsys):
    spoil, message = (CONFIG | WEIGHTS | TOKENIZERS)[name]
    spoil()
    refused(prune(), message, capsys)
    refused(["perplexity", "--model", "model", "--text", "text.txt", "--window", "16"], message, capsys)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text(name, workspace, capsys):
    spoil, message = TEXTS[name]
    spoil()
    path = message.split()[0].removesuffix(":")
    refused(prune(calibration=path), message, capsys)
    refused(["perplexity", "--model", "model", "--text", path, "--window", "16"], message, capsys)


@pytest.mark.parametrize(
    "values, message",
    [
        ((16, 16, 2, 4, 3, 259, 32), "num_key_value_heads=3; allowed: a divisor"),
        ((2**20, 16, 2, 4, 4, 259, 32), "hidden_size=1048576; allowed: 131072 at most"),
        ((16, 16, 10**9, 4, 4, 259, 32), "num_hidden_layers=1000000000; allowed: 4096 at most"),
        ((16, 16, 2, 4, 4, 259, 32), "holds 0 numbers; allowed by its header"),
        ((-1, 16, 2, 4, 4, 259, 32), "begins with"),
    ],
)
def test_a_llama2c_file(values, message, workspace, capsys):
    Path("tiny.bin").write_bytes(struct.pack("<7i", *values))
    refused(prune(model="tiny.bin"), f"tiny.bin.*{message}", capsys)
