"""A recipe and ways to fail in the middle: what the tests of interrupted pruning share."""

from commjax.llm import export
from commjax.pruning import scores
from commjax.pruning.recipe import Recipe, choose

WANDA = Recipe(sparsity=0.5, score=choose(scores.wanda))


def failing(monkeypatch, at):
    """The disk is full when `at` files of tensors are written."""
    real, calls = export.write_tensors, []

    def write(path, tensors):
        calls.append(path)
        if len(calls) > at:
            raise OSError("no space left on device")
        return real(path, tensors)

    monkeypatch.setattr(export, "write_tensors", write)
