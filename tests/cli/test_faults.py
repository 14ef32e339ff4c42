"""Code in a model folder, a full disk, a fault that nobody foresaw, missing extras, a closed pipe."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from commjax.cli import main
from commjax.llm import checkpoints
from tests.cli.cases import ROOT, llama2c_file, outcome, prune, refused

pytestmark = pytest.mark.slow

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.extra
@pytest.mark.parametrize(
    "content", ["{}", "{", DEEP, "[]", '{"version": "1.0", "model": {"type": "Mine", "vocab": 3}}', '{"model": null}']
)
def test_a_tokenizer_of_another_schema(content, workspace, capsys):
    pytest.importorskip("transformers")
    Path("model/tokenizer.bin").unlink()
    Path("model/tokenizer.json").write_text(content)
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
def test_code_of_a_model_folder_is_not_run(where, workspace, capsys, monkeypatch):
    """`auto_map` names a class of a file in the folder; transformers would run it, or ask on the terminal."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("a question"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(workspace / "modules"))
    Path("model/mine.py").write_text(CODE.format(marker=str(workspace / "marker")))
    Path("model/tokenizer.bin").unlink()
    Path("model/tokenizer_config.json").write_text("{}")
    Path("model/vocab.json").write_text("{}")
    path, names = Path("model", where), {"AutoTokenizer": ["mine.Mine", None], "AutoConfig": "mine.Config"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": names, "tokenizer_class": "Mine"}))
    refused(prune(), "model: transformers cannot read its tokenizer", capsys)
    refused(["perplexity", "--model", "model", "--text", "text.txt"], "model: transformers cannot read", capsys)
    assert not (workspace / "marker").exists()
    if where == "tokenizer_config.json":  # the attack works where it is let
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(workspace / "modules"))
        with pytest.raises(NotImplementedError):
            transformers.AutoTokenizer.from_pretrained("model", local_files_only=True, trust_remote_code=True)
        assert (workspace / "marker").exists()


def test_a_full_disk(workspace, capsys):
    """A limit on the size of files, which fails in the first shard."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    try:
        code, lines = outcome(prune(), capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and lines == ["commjax: [Errno 27] File too large: 'out.partial/model-00001-of-00004.safetensors'"]
    assert not Path("out").exists() and not list(Path("out.partial").glob(".*"))


def test_a_fault_that_nobody_foresaw_is_one_line_or_a_traceback_if_asked_for(workspace, capsys, monkeypatch):
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
    measure = capsys.readouterr()
    for text in (both, measure.out):
        assert "pip install 'commjax[cli]'" in text and "commjax perplexity: Measure the perplexity" in text
    assert "sparsity: Share of weights pruned" in both and "sparsity" not in measure.out and measure.err == ""
    assert "commjax prune ria: " in both and "regrow:dsnot: " in both
    refused(["prune"], r"needs tyro and rich: pip install 'commjax\[cli\]'", capsys)


def test_a_closed_pipe_is_no_error_and_a_full_output_is_one():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "commjax", "prune", "ria", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed, open("/dev/full", "wb") as full:
        runs = [
            subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.PIPE) for out in (closed, full)
        ]
    errors = [run.communicate(timeout=120)[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [141, 1]
    assert errors[0] == "" and re.fullmatch(r"commjax: \[Errno 28\] No space left on device: 'stdout'\n", errors[1])


@pytest.mark.parametrize(
    "redirect, code, said",
    [
        (">&-", 1, "commjax: stdout is closed; allowed: a terminal, a file or a pipe\n"),
        ("2>&-", 0, ""),
        (">/dev/full", 1, "commjax: [Errno 28] No space left on device: 'stdout'\n"),
    ],
)
def test_a_closed_or_full_stream_is_one_line(redirect, code, said, workspace):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    words = f"{sys.executable} -m commjax perplexity --model model --text text.txt --window 16"
    run = subprocess.run(f"exec {words} {redirect}", shell=True, env=environment, capture_output=True, timeout=120)
    assert (run.returncode, run.stderr.decode()) == (code, said)
    assert (b"perplexity" in run.stdout) == (code == 0)


@pytest.mark.parametrize("option", ["text", "tokenizer"])
def test_an_error_of_the_system_names_the_file(option, workspace, capsys):
    llama2c_file(Path("tiny.bin"))
    words = ["perplexity", "--model", "tiny.bin" if option == "tokenizer" else "model"]
    words += ["--text", "text.txt", f"--{option}", "/proc/self/mem"]
    refused(words, r"\[Errno 5\] Input/output error: '/proc/self/mem'", capsys)
