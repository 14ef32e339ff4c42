"""A folder with a small model and a text, in which the commands run."""

import shutil

import pytest

from tests.cli.cases import TEXT
from tests.pruning import models


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    models.folder(folder / "model", vocab_size=259)
    models.tokenizer(folder / "model" / "tokenizer.bin")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def workspace(pristine, tmp_path, monkeypatch):
    """A copy of the folder, as the present directory."""
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
