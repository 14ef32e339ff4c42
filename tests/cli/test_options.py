"""Bad options: one line on stderr that names the option, its value and what is allowed; nothing is written."""

import re

import pytest

from tests.cli.cases import prune, refused

pytestmark = pytest.mark.slow

# Words of `commjax prune`, and the message.
REFUSED = {
    "seed": (prune(seed=2**70), "seed=1180591620717411303424; allowed: 0 to 4294967295"),
    "negative seed": (prune(seed=-1), "seed=-1; allowed: 0 to 4294967295"),
    "samples": (
        prune(samples=10**9),
        "samples=1000000000 windows of 16 tokens; allowed: 131072 windows, 67108864 tokens",
    ),
    "negative samples": (prune(samples=-3), "text.txt: length=16, count=-3; allowed: at least 1 each"),
    "no samples": (prune(samples=0), "text.txt: length=16, count=0; allowed: at least 1 each"),
    "huge window": (prune(window=10**9), "window=1000000000; allowed: 2 to max_position_embeddings=32"),
    "window": (prune(window=33), "window=33; allowed: 2 to max_position_embeddings=32"),
    "batch": (prune(batch_size=0), "batch_size=0; allowed: at least 1"),
    "sparsity": (prune(sparsity=1), "sparsity=1.0; allowed: 0 <= sparsity < 1"),
    "sparsity nan": (prune(sparsity="nan"), "sparsity=nan; allowed: 0 <= sparsity < 1"),
    "alpha": (prune("ria --alpha nan"), "alpha=nan; allowed: finite, at least 0"),
    "p": (prune("ria --p 0.5"), "p=0.5; allowed: 0, or at least 1 (math.inf included)"),
    "p nan": (prune("ria --p nan"), "p=nan; allowed: 0, or at least 1 (math.inf included)"),
    "beta": (prune("stochria --beta nan"), "beta=nan; allowed: 0 < beta <= 1"),
    "spread": (prune(spread="inf"), "spread=inf; allowed: finite, at least 0"),
    "outliers": (prune(outlier_multiple=3), "outlier_multiple=3.0 without a spread; allowed: with one (OWL)"),
    "no outliers": (
        prune(spread=0.1, outlier_multiple=0),
        "outlier_multiple=0.0; allowed: finite, above 0",
    ),
    "both": (prune(sparsity=0.5, pattern="2:4"), "sparsity=0.5 and pattern=(2, 4); allowed: one of them"),
    "pattern": (prune(pattern="2-4"), "pattern='2-4'; allowed: N:M, two whole numbers below 10^9, as 2:4"),
    "long pattern": (prune(pattern=f"2:{'9' * 500}"), f"pattern='2:{'9' * 500}'; allowed: N:M, two whole numbers"),
    "huge pattern": (prune(pattern="2:999999999"), "self_attn.q_proj: m=999999999; allowed"),
    "pattern n": (prune(pattern="5:4"), "self_attn.q_proj: n=5; allowed: 1 <= n <= m = 4"),
    "pattern m": (prune(pattern="2:3"), "self_attn.q_proj: m=3; allowed: a divisor of the 16 inputs"),
    "cycles": (
        prune(regrow=f"regrow:dsnot --regrow.cycles {10**12}"),
        "self_attn.q_proj: cycles=1000000000000; allowed: 1 to 1073741824",
    ),
    "threshold": (
        prune(regrow="regrow:dsnot --regrow.threshold nan"),
        "self_attn.q_proj: threshold=nan; allowed: finite, at least 0",
    ),
    "tokenizer": (
        prune(tokenizer="model/tokenizer.bin"),
        "tokenizer='model/tokenizer.bin'; allowed: with a .bin model only",
    ),
    "out below a file": (prune(out="text.txt/out"), "[Errno 17] File exists: 'text.txt'"),
    "out in use": (prune(out="model"), "folder='model' exists; allowed: a new folder"),
    "model is a file": (prune(model="text.txt"), "no text.txt/config.json; allowed"),
    "model is nowhere": (
        prune(model="nowhere"),
        "no nowhere/config.json; allowed: a model folder of Hugging Face, with config.json and *.safetensors",
    ),
    "text is a folder": (prune(calibration="model"), "[Errno 21] Is a directory: 'model'"),
    "text is nowhere": (prune(calibration="nowhere"), "[Errno 2] No such file or directory: 'nowhere'"),
    "short text": (
        prune(calibration="short.txt"),
        "short.txt: ids has 7 tokens; allowed: more than one window of length=16",
    ),
    "short texts": (
        prune(calibration="short.json"),
        "short.json: none of 2 documents has more than length=16 tokens; allowed: at least one",
    ),
    "odd texts": (
        prune(calibration="odd.json"),
        "odd.json holds no list of texts; allowed: strings, or objects with a string 'text'",
    ),
    "torn texts": (prune(calibration="torn.jsonl"), "torn.jsonl is not jsonl of texts: KeyError('text')"),
    "bin": (prune(model="model/tokenizer.bin"), "model/tokenizer.bin"),
}
SHARED = (
    "--model, --calibration, --out, --sparsity, --pattern, --group, --spread, --outlier-multiple, --samples, --window, "
    "--seed, --batch-size, --tokenizer; then one of regrow:none, regrow:dsnot, regrow:r2dsnot"
)
ALL = "magnitude, wanda, owanda, symwanda, symmetric, ri, ria, stochria"
PARSED = {
    "no command": ([], "command=None; allowed: prune, perplexity"),
    "no such command": (["drop"], "command='drop'; allowed: prune, perplexity"),
    "no method": (["prune"], f"method=None; allowed: {ALL}"),
    "no such method": (prune("sparsegpt"), f"method='sparsegpt'; allowed: {ALL}"),
    "method as an option": (prune("--method ria"), f"method='--method'; allowed: {ALL}"),
    "no options": (["prune", "ria"], "Required options Missing from commjax prune ria: --model DIR"),
    "no number": (prune(seed="1.5"), "Value error Error parsing --seed"),
    "no such join": (prune("ria --join sideways"), "invalid choice 'sideways' for argument '--join'"),
    "of perplexity": (
        ["perplexity", "--model", "m", "--text", "t", "--sede", "1"],
        "unknown: --sede 1; allowed with perplexity: --model, --text, --window, --batch-size, --tokenizer",
    ),
    "of ria": (prune("magnitude --alpha 1"), f"unknown: --alpha 1; allowed with prune magnitude: {SHARED}"),
    "of ria, too": (prune("wanda --p 2"), f"unknown: --p 2; allowed with prune wanda: --alpha, {SHARED}"),
    "of stochria": (
        prune("ria --shared"),
        f"unknown: --shared; allowed with prune ria: --alpha, --p, --axes, --join, {SHARED}",
    ),
    "of no regrow": (
        prune("magnitude --regrow.cycles 3"),
        f"unknown: --regrow.cycles 3; allowed with prune magnitude: {SHARED}",
    ),
    "of r2dsnot": (
        prune("magnitude", "regrow:dsnot --regrow.gamma-grow 1"),
        f"unknown: --regrow.gamma-grow 1; allowed with prune magnitude: {SHARED} with --regrow.cycles, "
        "--regrow.threshold, --regrow.power, --regrow.same-sign, --regrow.mlp",
    ),
    "no such regrow": (prune("magnitude", "regrow:mine"), "unknown: regrow:mine; allowed with prune magnitude"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_is_one_line_and_nothing_is_written(name, workspace, capsys):
    (workspace / "short.txt").write_text("short")
    (workspace / "short.json").write_text('["short", "texts"]')
    (workspace / "odd.json").write_text("[1, 2]")
    (workspace / "torn.jsonl").write_text('{"test": "spelled wrong"}\n')
    words, message = REFUSED[name]
    refused(words, re.escape(message), capsys)


@pytest.mark.parametrize("name", PARSED)
def test_words_that_are_no_command_are_refused_with_what_is_allowed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, message = PARSED[name]
    refused(words, re.escape(message), capsys, code=2)
