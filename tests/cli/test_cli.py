"""The command line: the functions behind it with their files, progress, table, and one line for every error."""

import json
import lzma
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from commjax import llm
from commjax.cli import main
from commjax.llm import perplexity, texts, tokens
from commjax.pruning import regrow, scores, stream
from commjax.pruning.recipe import Recipe, choose
from tests.pruning import models

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"Line {i} of a text that nobody has to read, {i * i} words long.\n" for i in range(60))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with model, text and their names as short as on a command line."""
    models.folder(tmp_path / "model", vocab_size=259)
    models.tokenizer(tmp_path / "model" / "tokenizer.bin")
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prune(*more, **changes):
    options = {"model": "model", "calibration": "text.txt", "out": "out", "samples": 4, "window": 16, "batch-size": 2}
    flags = [word for name, value in (options | changes).items() for word in (f"--{name}", str(value))]
    main.main(["prune", *flags, *more])


def refused(capsys, *more, **changes):
    """The one line on stderr."""
    with pytest.raises(SystemExit) as stop:
        prune(*more, **changes)
    assert stop.value.code not in (0, None)
    return str(stop.value.code)


def test_prune_is_the_functions_behind_it(here, capsys):
    prune("--method", "ria", "--alpha", "1.0", "--sparsity", "0.3", "--group", "layer", "--seed", "2")
    shown = capsys.readouterr()
    assert "pruning: 21/21, 0 s left" in shown.err and "written to out" in shown.out
    windows = texts.calibration("model", "text.txt", samples=4, length=16, seed=2)
    recipe = Recipe(sparsity=0.3, score=choose(scores.ria, alpha=1.0), group="layer", seed=2)
    layers = stream.prune_folder("model", "again", windows, recipe, batch_size=2, progress=False)
    assert models.files(here / "out") == models.files(here / "again")
    rows = [line.split("│")[1:-1] for line in shown.out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows[:-1]] == [
        [str(one.block), one.name, f"{one.sparsity:.4f}", f"{one.error:.4f}"] for one in layers
    ]
    means = (np.mean([one.sparsity for one in layers]), np.mean([one.error for one in layers]))
    assert [cell.strip() for cell in rows[-1]] == ["", "mean", *(f"{mean:.4f}" for mean in means)]


@pytest.fixture
def recipe(monkeypatch):
    """The recipe that the command line makes of its words; nothing is pruned."""
    found = []
    monkeypatch.setattr(stream, "prune_folder", lambda *arguments, **more: found.append(arguments[3]) or [])
    monkeypatch.setattr(main, "show", lambda layers: None)

    def of(line, **changes):
        prune(*line.split(), **changes)
        return found[-1]

    return of


def test_every_option_reaches_the_recipe(here, recipe):
    found = recipe("--pattern 2:4 --regrow r2dsnot --cycles 7 --regrow-mlp", method="stochria", beta=0.5)
    assert found == Recipe(
        pattern=(2, 4),
        score=choose(scores.stoch_ria, beta=0.5),
        regrow=choose(regrow.r2_dsnot, cycles=7),
        regrow_layers=("",),
    )
    found = recipe(
        "--regrow dsnot --spread 0.05 --outlier-multiple 7 --threshold 0.2 --power 0.5 --same-sign True --p inf"
    )
    wanted = choose(regrow.dsnot, threshold=0.2, power=0.5, same_sign=True)
    assert found == Recipe(0.5, score=choose(scores.ria, p=math.inf), spread=0.05, outlier_multiple=7.0, regrow=wanted)


def test_every_score_of_the_chapter_is_reached(here, recipe):
    joins = ("relative", "relative_to_sum", "plain", "harmonic", "root")
    lines = {f"--method ria --join {name}": choose(scores.ria, join=getattr(scores, name)) for name in joins} | {
        "--method symwanda --join root": choose(scores.symwanda, join=scores.root),
        "--method symmetric --join root": choose(scores.symmetric, join=scores.root),
        "--method ria --axes out --alpha 1": choose(scores.ria, alpha=1.0, axes=("out",)),
        "--method ria --axes in out": choose(scores.ria, axes=("in", "out")),
        "--method stochria --shared True": choose(scores.stoch_ria, shared=True),
        "--method owanda": choose(scores.owanda),
        "--method ri": choose(scores.ri),
    }
    for line, score in lines.items():
        assert recipe(line).score == score
    line = "--regrow r2dsnot --relative-grow False --relative-prune True --gamma-grow 0.1 --gamma-prune 0.2 --regularizer in"
    assert recipe(f"{line} --regularizer-p inf --regrow-alpha 1 --literal True").regrow == choose(
        regrow.r2_dsnot,
        relative_grow=False,
        relative_prune=True,
        gamma_grow=0.1,
        gamma_prune=0.2,
        regularizer="in",
        p=math.inf,
        alpha=1.0,
        literal=True,
    )


def test_python_m_commjax(here):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    flags = ["--model", "model", "--calibration", "text.txt", "--out", "out", "--samples", "2", "--window", "16"]
    command = [sys.executable, "-m", "commjax", "prune", *flags, "--method", "magnitude"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "mlp.down_proj" in done.stdout and "s left" in done.stderr
    assert llm.load("out")[0].config.vocab_size == 259
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.strip() == "commjax: folder='out' exists; allowed: a new folder"


def test_perplexity(here, capsys):
    main.main(["perplexity", "--model", "model", "--text", "text.txt", "--window", "20", "--batch-size", "1000000000"])
    model, params = llm.load("model")
    windows = tokens.evaluation_windows(tokens.load("model").encode(TEXT), 20)
    found = perplexity.losses(model, params.outer, params.blocks, windows)
    nats = perplexity.nats_per_token(found)
    wanted = f"perplexity {np.exp(nats):.4f}, {nats:.4f} nats per token, {windows.shape[0] * 19} tokens\n"
    assert capsys.readouterr().out == wanted


def test_a_llama2c_file_is_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    random, (dim, vocab, length) = np.random.default_rng(0), (16, 259, 32)
    sizes = [vocab * dim, 2 * dim, *[2 * dim * dim] * 4, 2 * dim, *[2 * dim * dim] * 3, dim, length * 2, length * 2]
    header = struct.pack("<7i", dim, dim, 2, 4, 4, vocab, length)
    Path("tiny.bin").write_bytes(header + random.normal(0, 0.3, sum(sizes)).astype("<f4").tobytes())
    Path("text.txt").write_text(TEXT)
    message = refused(capsys, model="tiny.bin")
    assert message == "commjax: no tokenizer beside tiny.bin; allowed: tok259.bin, tokenizer.bin, or --tokenizer FILE"
    models.tokenizer(Path("other"))
    prune("--tokenizer", "other", model="tiny.bin")
    models.tokenizer(Path("tok259.bin"))
    prune(model="tiny.bin", out="again")
    assert models.files(tmp_path / "out") == models.files(tmp_path / "again")
    assert "tokenizer.bin" in models.files(tmp_path / "out")
    capsys.readouterr()
    main.main(["perplexity", "--model", "tiny.bin", "--text", "text.txt"])
    main.main(["perplexity", "--model", "out", "--text", "text.txt"])
    dense, pruned = capsys.readouterr().out.splitlines()
    assert dense.startswith("perplexity ") and pruned.startswith("perplexity ") and dense != pruned


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sparsity": 1}, "sparsity=1.0; allowed: 0 <= sparsity < 1"),
        ({"sparsity": 0.5, "pattern": "2:4"}, "sparsity=0.5 and pattern=(2, 4); allowed: one of them"),
        ({"pattern": "2-4"}, "pattern='2-4'; allowed: N:M, two whole numbers below 10^9, as 2:4"),
        ({"pattern": "5:4"}, "self_attn.q_proj: n=5; allowed: 1 <= n <= m = 4"),
        ({"pattern": "2:3"}, "self_attn.q_proj: m=3; allowed: a divisor of the 16 inputs"),
        ({"method": "magnitude", "alpha": 1}, "alpha=1.0 with method magnitude; allowed: no options"),
        ({"method": "wanda", "p": 2}, "p=2.0 with method wanda; allowed: alpha"),
        ({"method": "ria", "p": 0.5}, "p=0.5; allowed: 0, or at least 1 (math.inf included)"),
        ({"method": "ria", "shared": "True"}, "shared=True with method ria; allowed: alpha, p, axes, join"),
        ({"method": "wanda", "join": "root"}, "join=root with method wanda; allowed: alpha"),
        (
            {"regrow": "dsnot", "gamma-grow": 1},
            "gamma_grow=1.0 with regrow dsnot; allowed: cycles, threshold, power, same_sign",
        ),
        ({"cycles": 3}, "cycles=3 with no regrow; allowed: no options"),
        ({"outlier-multiple": 3}, "outlier_multiple=3.0 without a spread; allowed: with one (OWL)"),
        ({"spread": 0.1, "outlier-multiple": 0}, "outlier_multiple=0.0; allowed: finite, above 0"),
        ({"window": 33}, "window=33; allowed: 2 to max_position_embeddings=32"),
        ({"samples": 0}, "text.txt: length=16, count=0; allowed: at least 1 each"),
        ({"tokenizer": "model/tokenizer.bin"}, "tokenizer='model/tokenizer.bin'; allowed: with a .bin model only"),
        ({"calibration": "nothing"}, "[Errno 2] No such file or directory: 'nothing'"),
        ({"calibration": "short.txt"}, "short.txt: ids has 7 tokens; allowed: more than one window of length=16"),
        (
            {"calibration": "short.json"},
            "short.json: none of 2 documents has more than length=16 tokens; allowed: at least one",
        ),
        (
            {"calibration": "odd.json"},
            "odd.json holds no list of texts; allowed: strings, or objects with a string 'text'",
        ),
        ({"calibration": "torn.jsonl"}, "torn.jsonl is not jsonl of texts: KeyError('text')"),
        (
            {"model": "nowhere"},
            "no nowhere/config.json; allowed: a model folder of Hugging Face, with config.json and *.safetensors",
        ),
        ({"out": "model"}, "folder='model' exists; allowed: a new folder"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(changes, message, here, capsys):
    (here / "short.txt").write_text("short")
    (here / "short.json").write_text('["short", "texts"]')
    (here / "odd.json").write_text("[1, 2]")
    (here / "torn.jsonl").write_text('{"test": "spelled wrong"}\n')
    before = sorted(here.iterdir()), models.files(here / "model")
    assert refused(capsys, **changes) == f"commjax: {message}"
    assert (sorted(here.iterdir()), models.files(here / "model")) == before


def test_a_method_that_is_not_there_is_refused_by_the_parser(here, capsys):
    assert refused(capsys, method="sparsegpt") == "2" and "stochria" in capsys.readouterr().err


def test_text_files_of_every_kind(tmp_path):
    wanted = ["Ein Text.", "ünicode\n\nand more"]
    wanted[0] += "\u2028\x85\x0c\x1e"  # ends of lines for str.splitlines, not for JSON
    plain, listed = "".join(wanted), json.dumps(wanted, ensure_ascii=False)
    lines = "\r\n".join(json.dumps({"text": one, "url": "x"}, ensure_ascii=False) for one in wanted) + "\n\n"
    for name, content in {"a.txt": plain, "b": plain, "c.json": listed, "d.jsonl": lines}.items():
        (tmp_path / name).write_bytes(content.encode())
        (tmp_path / f"{name}.xz").write_bytes(lzma.compress(content.encode()))
        for path in (tmp_path / name, tmp_path / f"{name}.xz"):
            assert texts.documents(path) == ([plain] if name in ("a.txt", "b") else wanted)


def test_calibration_draws_as_the_papers_do(here):
    encode = tokens.load("model").encode
    found = texts.calibration("model", "text.txt", samples=3, length=9, seed=4)
    np.testing.assert_array_equal(found, tokens.random_windows(encode(TEXT), 9, 3, 4))
    documents = [f"document number {i}, {'long' * i}" for i in range(6)]
    (here / "many.json").write_text(json.dumps(documents))
    found = texts.calibration("model", "many.json", samples=3, length=30, seed=4)
    np.testing.assert_array_equal(found, tokens.document_windows(documents, encode, 30, 3, 4))
    assert texts.calibration("model", "text.txt", samples=1).shape == (1, 32)


def test_the_longest_window_is_2048(here):
    assert texts.window_length("model") == 32 and texts.window_length("model", 5) == 5
    found = json.loads((here / "model/config.json").read_text())
    (here / "model/config.json").write_text(json.dumps(found | {"max_position_embeddings": 4096}))
    assert texts.window_length("model") == 2048 and texts.window_length("model", 4096) == 4096
    with pytest.raises(ValueError, match="window=1; allowed: 2 to max_position_embeddings=4096"):
        texts.window_length("model", 1)


def test_perplexity_joins_documents_by_a_blank_line(here):
    (here / "many.json").write_text(json.dumps([TEXT[:200], TEXT[200:400]]))
    (here / "joined.txt").write_text(TEXT[:200] + "\n\n" + TEXT[200:400])
    a, b = (texts.losses("model", name, length=20) for name in ("many.json", "joined.txt"))
    np.testing.assert_array_equal(a.nats, b.nats)
    with pytest.raises(ValueError, match=r"many.json: ids has .* tokens; allowed: at least one window of length=32"):
        (here / "many.json").write_text('["a", "b"]')
        texts.losses("model", "many.json")
