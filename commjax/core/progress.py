"""A progress bar with the time left.  It uses rich if that is installed, else it prints a line every few seconds."""

import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    label: str, total: int, done: int = 0, enabled: bool = True
) -> Generator[Callable[[int, dict[str, float]], None], None, None]:
    """Show a progress bar on stderr.

    Args:
        label: text before the bar.
        total: number of steps.
        done: number of steps that are done already.
        enabled: False shows nothing.

    Returns:
        A context that yields advance(done, values), where `values` are numbers to show beside the bar, by name.
    """
    if not enabled or total <= done:
        yield lambda done, values: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _plain(label, total, done)
        return
    console = Console(stderr=True)
    if not console.is_terminal:  # a log file: no animation
        yield _plain(label, total, done)
        return
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[values]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total, completed=done, values="")
        yield lambda done, values: bar.update(task, completed=done, values=_text(values))


def _text(values: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in values.items())


def _plain(label: str, total: int, start: int) -> Callable[[int, dict[str, float]], None]:
    began, last = time.monotonic(), -math.inf  # the first line comes at once

    def advance(done: int, values: dict[str, float]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 5 and done < total:
            return
        last = now
        left = (now - began) / max(1, done - start) * (total - done)
        print(f"{label}: {done}/{total}, {left:.0f} s left {_text(values)}", file=sys.stderr, flush=True)

    return advance
