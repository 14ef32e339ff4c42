"""The command line: `commjax prune` and `commjax perplexity`.

    commjax prune --model DIR --method ria --alpha 0.5 --sparsity 0.5 --group output --calibration FILE --out DIR
    commjax perplexity --model DIR --text FILE

The same functions in Python: `texts.calibration`, `stream.prune_folder`, `texts.losses`.  A model is a folder of
Hugging Face, or a `.bin` file of llama2.c with its tokenizer.

Exit codes:

    0       success
    1       an error in a file or an option, one line on stderr
    2       a command line that cannot be parsed, one line on stderr
    130     after SIGINT
    143     after SIGTERM
    141     stdout was closed
"""

import contextlib
import functools
import inspect
import io
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from commjax.llm import checkpoints, export, llama2c, perplexity, texts
from commjax.pruning import regrow as regrowing
from commjax.pruning import scores, stream
from commjax.pruning.masks import Group
from commjax.pruning.model import Layer
from commjax.pruning.recipe import Choice, Recipe, choose
from commjax.pruning.regrow import Regularizer
from commjax.pruning.scores import Axis

# Names of the methods, and the functions that have their options.
_SCORES: dict[str, Callable[..., Any]] = {
    "magnitude": scores.magnitude,
    "wanda": scores.wanda,
    "owanda": scores.owanda,
    "symwanda": scores.symwanda,
    "symmetric": scores.symmetric,
    "ri": scores.ri,
    "ria": scores.ria,
    "stochria": scores.stoch_ria,
}
Method = Literal["magnitude", "wanda", "owanda", "symwanda", "symmetric", "ri", "ria", "stochria"]
_REGROW: dict[str, Callable[..., Any]] = {"dsnot": regrowing.dsnot, "r2dsnot": regrowing.r2_dsnot}


class Signalled(BaseException):
    """SIGINT or SIGTERM ended the command.

    Attributes:
        number: Number of the signal.
        said: Message for the user.
    """

    def __init__(self, number: int, said: str = "stopped; the same command again continues or begins anew"):
        super().__init__(said)
        self.number, self.said = number, said


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    An error is one line on stderr; COMMJAX_TRACEBACK=1 in the environment shows its origin.

    Args:
        arguments: Words of the command line; None: those of the process.
    """
    outcome = _outcome(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise Python would flush again at exit and print another error.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        outcome = outcome or (_PIPE if isinstance(error, BrokenPipeError) else f"commjax: stdout: {error}")
    if outcome:
        sys.exit(outcome)


_PIPE = 128 + 13  # SIGPIPE


def _outcome(arguments: Sequence[str] | None) -> int | str | None:
    """Argument for `sys.exit`: 0 or None, an exit code, or the one line of an error."""
    try:
        return _parsed(arguments)()
    except SystemExit as stop:
        return stop.code
    except BrokenPipeError:
        return _PIPE
    except (KeyboardInterrupt, Signalled) as stop:
        number, said = (stop.number, stop.said) if isinstance(stop, Signalled) else (signal.SIGINT, "")
        print(f"commjax: {signal.Signals(number).name}{said and ': '}{said}", file=sys.stderr)
        return 128 + number
    except Exception as error:
        if os.environ.get("COMMJAX_TRACEBACK"):
            raise
        return _one_line(error)


def _one_line(error: Exception) -> str:
    """The error as one line: line breaks become spaces, and a long message loses its middle."""
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        said = f"out of memory {said}".strip()
    elif not isinstance(error, ValueError | OSError | ImportError):
        said = f"{type(error).__name__}: {said} (not foreseen; COMMJAX_TRACEBACK=1 shows where)"
    return f"commjax: {said}" if len(said) <= 1200 else f"commjax: {said[:800]} ... {said[-300:]}"


def _parsed(arguments: Sequence[str] | None) -> Callable[[], None]:
    """Parse the command and its options; SystemExit for a help text, or for words that are no command."""
    commands = {"prune": prune, "perplexity": perplexity_of}
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        import rich  # noqa: F401
        import tyro
    except ImportError as error:
        if not {"-h", "--help"} & set(words):
            raise ImportError(f"the command line needs tyro and rich: pip install 'commjax[cli]' ({error})") from error
        print(_plain_help(commands, words))
        sys.exit(0)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                {name: _later(command) for name, command in commands.items()},
                prog="commjax",
                description="Post-training pruning of language models.",
                args=words,
            )
    except SystemExit as stop:
        if stop.code:
            # tyro draws a box around its message.
            print("commjax:", " ".join(re.sub("[\u2500-\u257f]", " ", errors.getvalue()).split()), file=sys.stderr)
        raise


def _later(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """A function with the same options that returns the command instead of running it."""

    @functools.wraps(command)
    def later(**options: Any) -> Callable[[], None]:
        return functools.partial(command, **options)

    return later


def _plain_help(commands: dict[str, Callable], words: Sequence[str]) -> str:
    """Help texts without tyro and rich."""
    asked = [name for name in commands if name in words] or list(commands)
    texts_ = [f"commjax {name}: {inspect.getdoc(commands[name])}" for name in asked]
    return "\n\n".join([*texts_, "To run the commands: pip install 'commjax[cli]', which brings tyro and rich."])


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Handle SIGINT and SIGTERM while a command runs.

    A signal raises `Signalled` at once until the yielded function was called for the first time.  From then on the
    first signal makes the function return True, so that a block can be finished, and a second signal raises
    `Signalled`.

    Yields:
        A function that says whether the command should stop.
    """
    seen: list[int] = []
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return bool(seen)

    def handle(number: int, frame: Any) -> None:
        seen.append(number)
        if not asked or len(seen) > 1:
            raise Signalled(number)
        with contextlib.suppress(OSError):  # not print: the signal may have interrupted a print
            os.write(2, b"commjax: stops when this block is written; a second signal stops it now\n")

    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    # The caller may have switched SIGINT off (nohup, a job in the background).
    before = {one: signal.signal(one, handle) for one in numbers if signal.getsignal(one) is not signal.SIG_IGN}
    try:
        yield stop
    except stream.Stopped as error:
        raise Signalled(seen[0], str(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prune(
    *,
    model: Path,
    calibration: Path,
    out: Path,
    method: Method = "ria",
    alpha: float | None = None,
    p: float | None = None,
    axes: tuple[Axis, ...] | None = None,
    join: Literal["relative", "relative_to_sum", "plain", "harmonic", "root"] | None = None,
    beta: float | None = None,
    shared: bool | None = None,
    sparsity: float | None = None,
    pattern: str | None = None,
    group: Group = "output",
    spread: float | None = None,
    outlier_multiple: float | None = None,
    regrow: Literal["dsnot", "r2dsnot"] | None = None,
    cycles: int | None = None,
    threshold: float | None = None,
    power: float | None = None,
    same_sign: bool | None = None,
    relative_grow: bool | None = None,
    relative_prune: bool | None = None,
    gamma_grow: float | None = None,
    gamma_prune: float | None = None,
    regularizer: Regularizer | None = None,
    regularizer_p: float | None = None,
    regrow_alpha: float | None = None,
    literal: bool | None = None,
    regrow_mlp: bool = False,
    samples: int = 128,
    window: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    tokenizer: Path | None = None,
) -> None:
    """Prune a model without training, block by block, into a new folder that transformers loads.

    To resume a run that was stopped or killed, give the same command again: it continues after the last finished block,
    to the same bits.  SIGINT and SIGTERM stop it when the present block is written.

    Args:
        model: Folder with config.json and safetensors, or a .bin file of llama2.c.
        calibration: Text to calibrate on: plain, .json (list of texts) or .jsonl ("text"), also packed (.xz, .gz,
            .bz2).
        out: New folder.
        method: Score; the weights of least score are pruned.
        alpha: Power of the activations' norms (wanda, ria, stochria).
        p: Norm of the weights, 0, 1, 2, ..., inf (ria).
        axes: Norms of the in side, of the out side, or both (ria).
        join: How the norms u, v meet |W|: relative |W|/u + |W|/v (S1), relative_to_sum |W|/(u+v) (S2), plain |W|(u+v)
            (S3), harmonic |W|/(1/u+1/v) (S4), root |W| sqrt(u^2+v^2), which is the squared objective (ria, symwanda,
            symmetric).
        beta: Share of entries sampled for the norms (stochria).
        shared: One sample for all inputs and one for all outputs (stochria).
        sparsity: Share of weights pruned; 0.5 unless there is a pattern.
        pattern: N:M, N kept of every M inputs, as 2:4.
        group: Weights compete within an output, an input or the layer.
        spread: OWL: sparsities of blocks differ by at most twice this.
        outlier_multiple: OWL: a score above this multiple of the mean is an outlier, 5 by default.
        regrow: Swap weights back after pruning.
        cycles: Largest number of swaps of an output, 50 by default.
        threshold: Expected error at which an output is done, 0.1 by default.
        power: Power of the variance in the grow rule, 1 by default.
        same_sign: An output is also done when its error would change sign; by default with a pattern only.
        relative_grow: Relative importance in the grow rule (r2dsnot; True by default).
        relative_prune: Relative importance in the prune rule (r2dsnot; False by default).
        gamma_grow: Weight of the regulariser in the grow rule (r2dsnot).
        gamma_prune: Weight of the regulariser in the prune rule (r2dsnot).
        regularizer: Norm of the output's kept weights as printed, of the input's, or of the output's after the change
            (r2dsnot).
        regularizer_p: Which norm, 1, 2, ..., inf (r2dsnot).
        regrow_alpha: Power of the activations' norms in the prune rule (r2dsnot).
        literal: The printed grow rule, without the weight (r2dsnot).
        regrow_mlp: Also swap in the MLP, where the released DSnoT does not.
        samples: Number of calibration windows.
        window: Tokens of a window; by default what the model reads, 2048 at most.
        seed: Seed of the windows, and of a score that samples.
        batch_size: Windows per batch.
        tokenizer: For a .bin model; by default tok<vocabulary>.bin or tokenizer.bin beside it.
    """
    recipe = Recipe(
        sparsity=0.5 if sparsity is None and pattern is None else sparsity,
        pattern=None if pattern is None else pattern_of(pattern),
        score=score_of(method, alpha=alpha, p=p, axes=axes, join=join, beta=beta, shared=shared),
        group=group,
        spread=spread,
        regrow=regrow_of(
            regrow,
            cycles=cycles,
            threshold=threshold,
            power=power,
            same_sign=same_sign,
            relative_grow=relative_grow,
            relative_prune=relative_prune,
            gamma_grow=gamma_grow,
            gamma_prune=gamma_prune,
            regularizer=regularizer,
            p=regularizer_p,
            alpha=regrow_alpha,
            literal=literal,
        ),
        regrow_layers=("",) if regrow_mlp else Recipe().regrow_layers,
        seed=seed,
    )
    if outlier_multiple is not None:
        if spread is None:
            raise ValueError(f"outlier_multiple={outlier_multiple} without a spread; allowed: with one (OWL)")
        recipe = recipe._replace(outlier_multiple=outlier_multiple)
    export.refuse_existing(out)
    with stopping() as stop, model_folder(model, tokenizer) as folder:
        checkpoints.open_folder(folder)  # errors of the model come before the text is read
        windows = texts.calibration(folder, calibration, samples=samples, length=window, seed=seed)
        layers = stream.prune_folder(folder, out, windows, recipe, batch_size=batch_size, stop=stop)
    show(layers)
    print(f"written to {out}")


def perplexity_of(
    *, model: Path, text: Path, window: int | None = None, batch_size: int = 8, tokenizer: Path | None = None
) -> None:
    """Perplexity on a text, as the pruning papers measure it: adjacent windows, mean over all predicted tokens.

    Several texts of a file are joined by a blank line, as WikiText's are; no text gets a beginning token of its own.

    Args:
        model: Folder with config.json and safetensors, or a .bin file of llama2.c.
        text: Plain text, .json (list of texts) or .jsonl ("text"), also packed (.xz, .gz, .bz2).
        window: Tokens of a window; by default what the model reads, 2048 at most.
        batch_size: Windows per batch.
        tokenizer: For a .bin model; by default tok<vocabulary>.bin or tokenizer.bin beside it.
    """
    with stopping(), model_folder(model, tokenizer) as folder:
        found = texts.losses(folder, text, length=window, batch_size=batch_size)
    nats, count = perplexity.nats_per_token(found), int(found.targets.sum())
    print(f"perplexity {perplexity.perplexity(found):.4f}, {nats:.4f} nats per token, {count} tokens")


def score_of(method: str, **options: Any) -> Choice:
    """The score of a method, by its name on the command line.

    >>> score_of("ria", alpha=0.5, p=None).options
    {'alpha': 0.5}

    Args:
        method: Name of the method.
        **options: Its options; None keeps the method's default.

    Returns:
        The choice, for a `Recipe`.
    """
    given = _known(f"method {method}", _SCORES[method], options)
    return choose(_SCORES[method], **given | ({"join": getattr(scores, given["join"])} if "join" in given else {}))


def regrow_of(name: str | None, **options: Any) -> Choice | None:
    """DSnoT or R^2-DSnoT, by its name on the command line.

    Args:
        name: "dsnot", "r2dsnot", or None for no swaps.
        **options: Its options; None keeps the default.

    Returns:
        The choice, for a `Recipe`; None without a name.
    """
    if name is None:
        _known("no regrow", lambda: None, options)
        return None
    return choose(_REGROW[name], **_known(f"regrow {name}", _REGROW[name], options))


def _known(what: str, function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """The options that are not None; ValueError if the function does not have one of them."""
    known = [name for name in inspect.signature(function).parameters if name in options]
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{name}={value} with {what}; allowed: {', '.join(known) or 'no options'}")
    return given


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
