"""The command line runs the functions behind it: progress, table, files and perplexity."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from commjax import llm
from commjax.cli import main
from commjax.llm import perplexity, texts, tokens
from commjax.pruning import scores, stream
from commjax.pruning.recipe import Recipe, choose
from tests.cli.cases import ROOT, TEXT, llama2c_file, outcome, prune
from tests.pruning import models

pytestmark = pytest.mark.slow


def test_prune_is_the_functions_behind_it(workspace, capsys):
    main.main(prune("ria --alpha 1.0", sparsity=0.3, group="layer", seed=2))
    shown = capsys.readouterr()
    assert "pruning: 21/21, 0 s left" in shown.err and "written to out" in shown.out
    windows = texts.calibration("model", "text.txt", samples=4, length=16, seed=2)
    recipe = Recipe(sparsity=0.3, score=choose(scores.ria, alpha=1.0), group="layer", seed=2)
    layers = stream.prune_folder("model", "again", windows, recipe, batch_size=2, progress=False)
    assert models.files(workspace / "out") == models.files(workspace / "again")
    rows = [line.split("│")[1:-1] for line in shown.out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows[:-1]] == [
        [str(layer.block), layer.name, f"{layer.sparsity:.4f}", f"{layer.error:.4f}"] for layer in layers
    ]
    means = (np.mean([layer.sparsity for layer in layers]), np.mean([layer.error for layer in layers]))
    assert [cell.strip() for cell in rows[-1]] == ["", "mean", *(f"{mean:.4f}" for mean in means)]


def test_python_m_commjax(workspace):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "commjax", *prune("magnitude", samples=2)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "mlp.down_proj" in done.stdout and "s left" in done.stderr
    assert llm.load("out")[0].config.vocab_size == 259
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.strip() == "commjax: folder='out' exists; allowed: a new folder"


def test_perplexity(workspace, capsys):
    main.main(["perplexity", "--model", "model", "--text", "text.txt", "--window", "20", "--batch-size", "1000000000"])
    model, params = llm.load("model")
    windows = tokens.evaluation_windows(tokens.load("model").encode(TEXT), 20)
    losses = perplexity.losses(model, params.outer, params.blocks, windows)
    nats = perplexity.nats_per_token(losses)
    wanted = f"perplexity {np.exp(nats):.4f}, {nats:.4f} nats per token, {windows.shape[0] * 19} tokens\n"
    assert capsys.readouterr().out == wanted


def test_a_llama2c_file_is_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    llama2c_file(Path("tiny.bin"))
    Path("text.txt").write_text(TEXT)
    code, lines = outcome(prune(model="tiny.bin"), capsys)
    allowed = "tok259.bin, tokenizer.bin, or --tokenizer FILE"
    assert (code, lines) == (1, [f"commjax: no tokenizer beside tiny.bin; allowed: {allowed}"])
    models.tokenizer(Path("other"))
    main.main(prune(model="tiny.bin", tokenizer="other"))
    models.tokenizer(Path("tok259.bin"))
    main.main(prune(model="tiny.bin", out="again"))
    assert models.files(tmp_path / "out") == models.files(tmp_path / "again")
    assert "tokenizer.bin" in models.files(tmp_path / "out")
    capsys.readouterr()
    main.main(["perplexity", "--model", "tiny.bin", "--text", "text.txt"])
    main.main(["perplexity", "--model", "out", "--text", "text.txt"])
    dense, pruned = capsys.readouterr().out.splitlines()
    assert dense.startswith("perplexity ") and pruned.startswith("perplexity ") and dense != pruned
