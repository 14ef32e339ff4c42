"""The command line: `commjax prune METHOD` and `commjax perplexity`.

    commjax prune ria --alpha 0.5 --model DIR --sparsity 0.5 --calibration FILE --out NEW_DIR
    commjax prune wanda --model DIR --calibration FILE --out NEW_DIR regrow:dsnot --regrow.cycles 50
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
import os
import signal
import sys
from collections.abc import Sequence

from commjax.cli import commands
from commjax.cli.parse import parse
from commjax.cli.signals import Signalled

_PIPE = 128 + 13  # SIGPIPE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    An error is one line on stderr; COMMJAX_TRACEBACK=1 in the environment shows its origin.

    Args:
        arguments: Words of the command line; None: those of the process.
    """
    if sys.stderr is None:  # closed by the caller; the first file that is opened must not get its number
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for the rest of the process
    if sys.stdout is None:
        sys.exit("commjax: stdout is closed; allowed: a terminal, a file or a pipe")
    outcome = _outcome(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise Python would flush again at exit and print another error.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        outcome = outcome or (_PIPE if isinstance(error, BrokenPipeError) else f"commjax: stdout: {error}")
    if outcome:
        sys.exit(outcome)


def _outcome(arguments: Sequence[str]) -> int | str | None:
    """Argument for `sys.exit`: 0 or None, an exit code, or the one line of an error."""
    try:
        with commands.to_stdout():
            options = parse(arguments)
        commands.run(options)
        return None
    except SystemExit as stop:
        return stop.code
    except BrokenPipeError:
        return _PIPE
    except (KeyboardInterrupt, Signalled) as stop:
        number, text = (stop.number, stop.text) if isinstance(stop, Signalled) else (signal.SIGINT, "")
        print(f"commjax: {signal.Signals(number).name}{text and ': '}{text}", file=sys.stderr)
        return 128 + number
    except Exception as error:
        if os.environ.get("COMMJAX_TRACEBACK"):
            raise
        return _one_line(error)


def _one_line(error: Exception) -> str:
    """The error as one line: line breaks become spaces, and a long message loses its middle."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        text = f"out of memory {text}".strip()
    elif not isinstance(error, ValueError | OSError | ImportError):
        text = f"{type(error).__name__}: {text} (not foreseen; COMMJAX_TRACEBACK=1 shows where)"
    return f"commjax: {text}" if len(text) <= 1200 else f"commjax: {text[:800]} ... {text[-300:]}"
