"""Texts to calibrate on and to measure: files of every kind, the windows that are drawn from them."""

import json
import lzma

import numpy as np
import pytest

from commjax.llm import texts, tokens
from tests.cli.cases import TEXT

pytestmark = pytest.mark.slow


def test_text_files_of_every_kind(tmp_path):
    wanted = ["Ein Text.", "ünicode\n\nand more"]
    wanted[0] += "\u2028\x85\x0c\x1e"  # ends of lines for str.splitlines, not for JSON
    plain, listed = "".join(wanted), json.dumps(wanted, ensure_ascii=False)
    lines = "\r\n".join(json.dumps({"text": text, "url": "x"}, ensure_ascii=False) for text in wanted) + "\n\n"
    for name, content in {"a.txt": plain, "b": plain, "c.json": listed, "d.jsonl": lines}.items():
        (tmp_path / name).write_bytes(content.encode())
        (tmp_path / f"{name}.xz").write_bytes(lzma.compress(content.encode()))
        for path in (tmp_path / name, tmp_path / f"{name}.xz"):
            assert texts.documents(path) == ([plain] if name in ("a.txt", "b") else wanted)


def test_calibration_draws_as_the_papers_do(workspace):
    encode = tokens.load("model").encode
    found = texts.calibration("model", "text.txt", samples=3, length=9, seed=4)
    np.testing.assert_array_equal(found, tokens.random_windows(encode(TEXT), 9, 3, 4))
    documents = [f"document number {i}, {'long' * i}" for i in range(6)]
    (workspace / "many.json").write_text(json.dumps(documents))
    found = texts.calibration("model", "many.json", samples=3, length=30, seed=4)
    np.testing.assert_array_equal(found, tokens.document_windows(documents, encode, 30, 3, 4))
    assert texts.calibration("model", "text.txt", samples=1).shape == (1, 32)


def test_the_longest_window_is_2048(workspace):
    assert texts.window_length("model") == 32 and texts.window_length("model", 5) == 5
    found = json.loads((workspace / "model/config.json").read_text())
    (workspace / "model/config.json").write_text(json.dumps(found | {"max_position_embeddings": 4096}))
    assert texts.window_length("model") == 2048 and texts.window_length("model", 4096) == 4096
    with pytest.raises(ValueError, match="window=1; allowed: 2 to max_position_embeddings=4096"):
        texts.window_length("model", 1)


def test_perplexity_joins_documents_by_a_blank_line(workspace):
    (workspace / "many.json").write_text(json.dumps([TEXT[:200], TEXT[200:400]]))
    (workspace / "joined.txt").write_text(TEXT[:200] + "\n\n" + TEXT[200:400])
    a, b = (texts.losses("model", name, length=20) for name in ("many.json", "joined.txt"))
    np.testing.assert_array_equal(a.nats, b.nats)
    with pytest.raises(ValueError, match=r"many.json: ids has .* tokens; allowed: at least one window of length=32"):
        (workspace / "many.json").write_text('["a", "b"]')
        texts.losses("model", "many.json")
