"""The words of a command line, its outcome, and the folder it runs in: what the tests of the command line share."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commjax.cli import main

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"Line {i} of a text that nobody has to read, {i * i} words long.\n" for i in range(60))
OPTIONS = {"model": "model", "calibration": "text.txt", "out": "out", "samples": 4, "window": 16, "batch_size": 2}


def prune(line: str = "ria", regrow: str = "", **changes: Any) -> list[str]:
    """Words of `commjax prune`: the method with its options, the options that all have, and the swaps."""
    flags = [
        word for name, value in (OPTIONS | changes).items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return ["prune", *line.split(), *flags, *regrow.split()]


def outcome(arguments, capsys):
    """(exit code, lines on stderr) as a shell has them."""
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    lines = capsys.readouterr().err.splitlines()
    code = stop.value.code
    return (1, [*lines, *code.splitlines()]) if isinstance(code, str) else (code, lines)


def refused(arguments, message, capsys, code=1):
    """The command ends with one line on stderr, and no file is written."""
    before = tree()
    result, lines = outcome(arguments, capsys)
    assert result == code and len(lines) == 1 and re.match(f"commjax: .*({message})", lines[0]), lines
    assert "not foreseen" not in lines[0] and len(lines[0]) < 1300
    assert tree() == before


def tree():
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}


def llama2c_file(path):
    """A small llama2.c model with random weights."""
    random, (dim, vocab, length) = np.random.default_rng(0), (16, 259, 32)
    sizes = [vocab * dim, 2 * dim, *[2 * dim * dim] * 4, 2 * dim, *[2 * dim * dim] * 3, dim, length * 2, length * 2]
    header = struct.pack("<7i", dim, dim, 2, 4, 4, vocab, length)
    path.write_bytes(header + random.normal(0, 0.3, sum(sizes)).astype("<f4").tobytes())
