"""Hostile and broken files and options: one line on stderr that names the file or the option, exit code 1 or 2, nothing written."""

import bz2
import gzip
import json
import lzma
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from commjax.cli import main
from commjax.llm import checkpoints
from tests.pruning import models

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"Line {i} of a text that nobody has to read, {i * i} words long.\n" for i in range(60))
DEEP = "[" * 100_000 + "]" * 100_000
PACK = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    models.folder(folder / "model", vocab_size=259)
    models.tokenizer(folder / "model" / "tokenizer.bin")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def here(good, tmp_path, monkeypatch):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def hugging_face(content):
    """A tokenizer that transformers reads."""

    def spoil():
        Path("model/tokenizer.bin").unlink()
        Path("model/tokenizer.json").write_text(content)

    return spoil


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
OPTIONS = {
    "seed": (["--seed", str(2**70)], "seed=1180591620717411303424; allowed: 0 to 4294967295"),
    "negative seed": (["--seed", "-1"], "seed=-1; allowed: 0 to 4294967295"),
    "samples": (
        ["--samples", str(10**9)],
        "samples=1000000000 windows of 16 tokens; allowed: 131072 windows, 67108864 tokens",
    ),
    "no samples": (["--samples", "-3"], "count=-3; allowed"),
    "window": (["--window", str(10**9)], "window=1000000000; allowed: 2 to max_position_embeddings=32"),
    "batch": (["--batch-size", "0"], "batch_size=0; allowed: at least 1"),
    "sparsity": (["--sparsity", "nan"], "sparsity=nan; allowed: 0 <= sparsity < 1"),
    "alpha": (["--alpha", "nan"], "alpha=nan; allowed"),
    "p": (["--p", "nan"], "p=nan; allowed"),
    "beta": (["--method", "stochria", "--beta", "nan"], "beta=nan; allowed"),
    "spread": (["--spread", "inf"], "spread=inf; allowed"),
    "pattern": (["--pattern", "2:999999999"], "m=999999999; allowed"),
    "long pattern": (["--pattern", f"2:{'9' * 5000}"], "pattern='2:999"),
    "cycles": (["--regrow", "dsnot", "--cycles", str(10**12)], "cycles=1000000000000; allowed: 1 to 1073741824"),
    "threshold": (["--regrow", "dsnot", "--threshold", "nan"], "threshold=nan; allowed"),
    "out below a file": (["--out", "text.txt/out"], "File exists: 'text.txt'"),
    "out in use": (["--out", "model"], "folder='model' exists"),
    "model is a file": (["--model", "text.txt"], "text.txt/config.json"),
    "model is nowhere": (["--model", "nowhere"], "nowhere/config.json"),
    "text is a folder": (["--calibration", "model"], "Is a directory: 'model'"),
    "text is nowhere": (["--calibration", "nowhere"], "No such file or directory: 'nowhere'"),
    "bin": (["--model", "model/tokenizer.bin"], "model/tokenizer.bin"),
}
PARSED = {
    "no command": ([], "Missing subcommand .*prune, perplexity"),
    "no such command": (["drop"], "Unrecognized options: drop"),
    "no options": (["prune"], "--model"),
    "no number": (["prune", "--model", "m", "--calibration", "c", "--out", "o", "--seed", "1.5"], "--seed"),
    "no such option": (["perplexity", "--model", "m", "--text", "t", "--sede", "1"], "--sede"),
}


def outcome(arguments, capsys):
    """(exit code, lines on stderr) as a shell has them."""
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    lines = capsys.readouterr().err.splitlines()
    return (
        (1, [*lines, *stop.value.code.splitlines()]) if isinstance(stop.value.code, str) else (stop.value.code, lines)
    )


def refused(arguments, message, capsys, code=1):
    before = tree()
    found, lines = outcome(arguments, capsys)
    assert found == code and len(lines) == 1 and re.match(f"commjax: .*({message})", lines[0]), lines
    assert "not foreseen" not in lines[0] and len(lines[0]) < 1300
    assert tree() == before


def tree():
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}


def prune(*more, text="text.txt"):
    options = {"--model": "model", "--calibration": text, "--out": "out", "--samples": "4", "--window": "16"}
    options |= dict(zip(more[::2], more[1::2]))
    return ["prune", *(word for pair in options.items() for word in pair)]


@pytest.mark.parametrize("name", [*CONFIG, *WEIGHTS, *TOKENIZERS])
def test_a_model_folder(name, here, capsys):
    spoil, message = (CONFIG | WEIGHTS | TOKENIZERS)[name]
    spoil()
    refused(prune(), message, capsys)
    refused(["perplexity", "--model", "model", "--text", "text.txt", "--window", "16"], message, capsys)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text(name, here, capsys):
    spoil, message = TEXTS[name]
    spoil()
    path = message.split()[0].removesuffix(":")
    refused(prune(text=path), message, capsys)
    refused(["perplexity", "--model", "model", "--text", path, "--window", "16"], message, capsys)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(name, here, capsys):
    refused(prune(*OPTIONS[name][0]), OPTIONS[name][1], capsys)


@pytest.mark.parametrize("name", PARSED)
def test_a_line_that_is_no_command(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(*PARSED[name], capsys, code=2)


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
def test_a_llama2c_file(values, message, here, capsys):
    Path("tiny.bin").write_bytes(struct.pack("<7i", *values))
    refused(prune("--model", "tiny.bin"), f"tiny.bin.*{message}", capsys)


@pytest.mark.extra
@pytest.mark.parametrize(
    "content", ["{}", "{", DEEP, "[]", '{"version": "1.0", "model": {"type": "Mine", "vocab": 3}}', '{"model": null}']
)
def test_a_tokenizer_of_another_schema(content, here, capsys):
    pytest.importorskip("transformers")
    hugging_face(content)()
    refused(prune(), "model: transformers cannot read its tokenizer", capsys)


CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import LlamaConfig, PreTrainedTokenizer
class Mine(PreTrainedTokenizer):
    pass
class Config(LlamaConfig):
    pass
"""


@pytest.mark.extra
@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_of_a_model_folder_is_not_run(where, here, capsys, monkeypatch):
    """`auto_map` names a class of a file in the folder; transformers would run it, or ask on the terminal."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("a question"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(here / "modules"))
    Path("model/mine.py").write_text(CODE.format(marker=str(here / "marker")))
    Path("model/tokenizer.bin").unlink()
    Path("model/tokenizer_config.json").write_text("{}")
    Path("model/vocab.json").write_text("{}")
    path, names = Path("model", where), {"AutoTokenizer": ["mine.Mine", None], "AutoConfig": "mine.Config"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": names, "tokenizer_class": "Mine"}))
    refused(prune(), "model: transformers cannot read its tokenizer", capsys)
    refused(["perplexity", "--model", "model", "--text", "text.txt"], "model: transformers cannot read", capsys)
    assert not (here / "marker").exists()
    if where == "tokenizer_config.json":  # the attack works where it is let
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(here / "modules"))
        with pytest.raises(NotImplementedError):
            transformers.AutoTokenizer.from_pretrained("model", local_files_only=True, trust_remote_code=True)
        assert (here / "marker").exists()


def test_a_full_disk(here, capsys):
    """A limit on the size of files, which fails in the first shard."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    try:
        code, lines = outcome(prune(), capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and lines == ["commjax: [Errno 27] File too large: 'out.partial/model-00001-of-00004.safetensors'"]
    assert not Path("out").exists() and not list(Path("out.partial").glob(".*"))


def test_a_fault_that_nobody_foresaw_is_one_line_or_a_traceback_if_asked_for(here, capsys, monkeypatch):
    monkeypatch.setattr(checkpoints, "open_folder", lambda folder: {}["x"])
    assert outcome(prune(), capsys) == (1, ["commjax: KeyError: 'x' (not foreseen; COMMJAX_TRACEBACK=1 shows where)"])
    monkeypatch.setattr(checkpoints, "open_folder", lambda folder: bytearray(2**62))
    assert outcome(prune(), capsys) == (1, ["commjax: out of memory"])
    monkeypatch.setenv("COMMJAX_TRACEBACK", "1")
    with pytest.raises(MemoryError):
        main.main(prune())


@pytest.mark.parametrize("missing", ["tyro", "rich"])
def test_help_without_extras(missing, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    main.main(["--help"])
    both = capsys.readouterr().out
    main.main(["perplexity", "-h"])
    one = capsys.readouterr()
    for text in (both, one.out):
        assert "pip install 'commjax[cli]'" in text and "commjax perplexity: Perplexity on a text" in text
    assert "sparsity: Share of weights pruned" in both and "sparsity" not in one.out and one.err == ""
    refused(["prune"], r"needs tyro and rich: pip install 'commjax\[cli\]'", capsys)


def test_a_closed_pipe_is_no_error_and_a_full_output_is_one():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "commjax", "prune", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed, open("/dev/full", "wb") as full:
        runs = [
            subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.PIPE) for out in (closed, full)
        ]
    errors = [run.communicate(timeout=120)[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [141, 1]
    assert errors[0] == "" and re.fullmatch(r"commjax: (stdout: )?\[Errno 28\] No space left on device\n", errors[1])
