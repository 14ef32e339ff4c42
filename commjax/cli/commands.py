"""What the commands do with their options."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commjax.cli.options import METHODS, REGROW, Perplexity, Prune, choice
from commjax.cli.signals import stopping
from commjax.llm import checkpoints, export, llama2c, perplexity, texts
from commjax.pruning import stream
from commjax.pruning.model import Layer
from commjax.pruning.recipe import Recipe


def run(options: Prune[Any] | Perplexity) -> None:
    """Run a command.

    Args:
        options: Its options.
    """
    prune(options) if isinstance(options, Prune) else measure(options)


def prune(options: Prune[Any]) -> None:
    """Prune a model into a new folder, and print the result of every layer.

    Args:
        options: The options.
    """
    recipe = recipe_of(options)
    export.refuse_existing(options.out)
    with stopping() as stop, model_folder(options.model, options.tokenizer) as folder:
        checkpoints.open_folder(folder)  # errors of the model come before the text is read
        windows = texts.calibration(
            folder, options.calibration, samples=options.samples, length=options.window, seed=options.seed
        )
        layers = stream.prune_folder(folder, options.out, windows, recipe, batch_size=options.batch_size, stop=stop)
    with to_stdout():
        show(layers)
        print(f"written to {options.out}")


def measure(options: Perplexity) -> None:
    """Print the perplexity of a model on a text.

    Args:
        options: The options.
    """
    with stopping(), model_folder(options.model, options.tokenizer) as folder:
        losses = texts.losses(folder, options.text, length=options.window, batch_size=options.batch_size)
    nats, count = perplexity.nats_per_token(losses), int(losses.targets.sum())
    with to_stdout():
        print(f"perplexity {perplexity.perplexity(losses):.4f}, {nats:.4f} nats per token, {count} tokens")


@contextmanager
def to_stdout() -> Iterator[None]:
    """Add the name stdout to an OSError of printing."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def recipe_of(options: Prune[Any]) -> Recipe:
    """The recipe that the options describe.

    Args:
        options: Options of `commjax prune`.

    Returns:
        The recipe, with every option of the method and of the swaps, defaults included.
    """
    if options.outlier_multiple is not None and options.spread is None:
        raise ValueError(f"outlier_multiple={options.outlier_multiple} without a spread; allowed: with one (OWL)")
    score = choice(METHODS, options.method)
    assert score is not None
    default = Recipe()
    multiple = default.outlier_multiple if options.outlier_multiple is None else options.outlier_multiple
    return Recipe(
        sparsity=0.5 if options.sparsity is None and options.pattern is None else options.sparsity,
        pattern=None if options.pattern is None else pattern_of(options.pattern),
        score=score,
        group=options.group,
        spread=options.spread,
        outlier_multiple=multiple,
        regrow=choice(REGROW, options.regrow),
        regrow_layers=("",) if getattr(options.regrow, "mlp", False) else default.regrow_layers,
        seed=options.seed,
    )


def pattern_of(text: str) -> tuple[int, int]:
    """Parse an N:M pattern.

    >>> pattern_of("2:4")
    (2, 4)

    Args:
        text: The pattern, such as "2:4".

    Returns:
        n and m.
    """
    n, colon, m = text.partition(":")
    if not (colon and n.isdecimal() and m.isdecimal() and max(len(n), len(m)) <= 9):
        raise ValueError(f"pattern={text!r}; allowed: N:M, two whole numbers below 10^9, as 2:4")
    return int(n), int(m)


@contextmanager
def model_folder(model: Path, tokenizer: Path | None = None) -> Iterator[Path]:
    """The folder of a model; a llama2.c file is converted into a temporary folder.

    Args:
        model: Folder, or .bin file of llama2.c.
        tokenizer: Tokenizer of a .bin file; None: tok<vocabulary>.bin or tokenizer.bin beside it.

    Yields:
        The folder.
    """
    if model.suffix != ".bin":
        if tokenizer is not None:
            raise ValueError(f"tokenizer={str(tokenizer)!r}; allowed: with a .bin model only")
        yield model
        return
    vocabulary = llama2c.read(model)[0].config.vocab_size
    beside = (model.with_name(name) for name in (f"tok{vocabulary}.bin", "tokenizer.bin"))
    tokenizer = tokenizer or next((path for path in beside if path.is_file()), None)
    if tokenizer is None:
        raise ValueError(
            f"no tokenizer beside {model}; allowed: tok{vocabulary}.bin, tokenizer.bin, or --tokenizer FILE"
        )
    with tempfile.TemporaryDirectory() as temporary:
        llama2c.to_hugging_face(model, Path(temporary, model.stem), tokenizer)
        yield Path(temporary, model.stem)


def show(layers: Sequence[Layer]) -> None:
    """Print a table of sparsities and reconstruction errors.

    Args:
        layers: Results of the layers.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("block", "layer", title="error: |XW - XW~| / |XW|")
    table.add_column("sparsity", justify="right")
    table.add_column("error", justify="right")
    for layer, after in zip(layers, (*layers[1:], None)):
        ends = after is None or after.block != layer.block
        table.add_row(str(layer.block), layer.name, f"{layer.sparsity:.4f}", f"{layer.error:.4f}", end_section=ends)
    means = (sum(values) / len(layers) for values in zip(*((layer.sparsity, layer.error) for layer in layers)))
    table.add_row("", "mean", *(f"{mean:.4f}" for mean in means))
    # A pipe has no width; 100 columns keep the lines of the table whole.
    console = Console()
    Console(width=None if console.is_terminal else 100).print(table)
