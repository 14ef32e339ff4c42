"""Parse a command line into the dataclasses of `commjax.cli.options`, and print the help texts."""

import contextlib
import functools
import inspect
import io
import operator
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, NoReturn

from commjax.cli.options import METHODS, REGROW, Perplexity, Prune

# tyro shows a paragraph on one line, so each of them fits into 80 columns.
_PRUNE = """Prune a language model without training, into a new folder.

Example: commjax prune ria --model DIR --calibration FILE --out NEW_DIR

To resume a run that was stopped or killed, give the same command again."""
_PERPLEXITY = """Measure the perplexity of a language model on a text.

Example: commjax perplexity --model DIR --text FILE"""


def parse(words: Sequence[str]) -> Prune[Any] | Perplexity:
    """Parse the words of a command line.

    Args:
        words: The words after `commjax`.

    Returns:
        The options of the command.  SystemExit with code 0 after a help text, with code 2 and one line on stderr for
        words that are no command.
    """
    try:
        import rich  # noqa: F401
        import tyro
    except ImportError as error:
        if not {"-h", "--help"} & set(words):
            raise ImportError(f"the command line needs tyro and rich: pip install 'commjax[cli]' ({error})") from error
        print(plain_help(words))
        sys.exit(0)
    words = list(words)
    _check_names(words)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            options, unknown = tyro.cli(
                _commands(),
                prog="commjax",
                description="Post-training pruning of language models.",
                args=words,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code:
            # tyro draws a box around its message, and lines between its parts.
            _refuse(" ".join(re.sub("[\u2500-\u257f]|-{3,}", " ", errors.getvalue()).split()))
        raise
    if unknown:
        _refuse(f"unknown: {' '.join(unknown)}; allowed with {_allowed(options)}")
    return options


def _check_names(words: Sequence[str]) -> None:
    """Refuse a word that is no command, or no method, in its place."""
    places = [("command", ("prune", "perplexity")), *([("method", METHODS)] if words[:1] == ["prune"] else [])]
    for place, (what, allowed) in enumerate(places):
        word = words[place] if place < len(words) else None
        if word in ("-h", "--help"):
            return
        if word not in allowed:
            _refuse(f"{what}={word!r}; allowed: {', '.join(allowed)}")


def _commands() -> Any:
    """The union of all commands, as tyro reads it."""
    from tyro.conf import subcommand

    methods = functools.reduce(
        operator.or_,
        (
            Annotated[Prune[options], subcommand(name, description=_summary(options))]
            for name, (options, _) in METHODS.items()
        ),
    )
    prune: Any = Annotated[methods, subcommand("prune", description=_PRUNE)]
    return prune | Annotated[Perplexity, subcommand("perplexity", description=_PERPLEXITY)]


def _summary(options: type) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(options) or "").partition("\n\n")[0]


def _refuse(text: str) -> NoReturn:
    print(f"commjax: {text}", file=sys.stderr)
    sys.exit(2)


def _allowed(options: Prune[Any] | Perplexity) -> str:
    """Name the command, and every option that it has."""
    if isinstance(options, Perplexity):
        return f"perplexity: {', '.join(_flags(Perplexity))}"
    method = next(name for name, (kind, _) in METHODS.items() if kind is type(options.method))
    flags = [*_flags(type(options.method)), *_flags(Prune)]
    ways = ", ".join(f"regrow:{name}" for name, (kind, _) in REGROW.items())
    chosen = list(_flags(type(options.regrow), "regrow."))
    return f"prune {method}: {', '.join(flags)}; then one of {ways}" + (f" with {', '.join(chosen)}" if chosen else "")


def _flags(kind: type, prefix: str = "") -> Iterator[str]:
    for field in fields(kind):
        if field.name not in ("method", "regrow"):
            yield f"--{prefix}{field.name.replace('_', '-')}"


def plain_help(words: Sequence[str]) -> str:
    """Help texts without tyro and rich.

    Args:
        words: The words of the command line.

    Returns:
        The text.
    """
    commands = {"prune": Prune, "perplexity": Perplexity}
    asked = [name for name in commands if name in words] or list(commands)
    parts = [f"commjax {name}: {inspect.getdoc(commands[name])}" for name in asked]
    if "prune" in asked:
        parts += [f"commjax prune {name}: {inspect.getdoc(options)}" for name, (options, _) in METHODS.items()]
        parts += [f"regrow:{name}: {inspect.getdoc(options)}" for name, (options, _) in REGROW.items()]
    return "\n\n".join([*parts, "To run the commands: pip install 'commjax[cli]', which brings tyro and rich."])
