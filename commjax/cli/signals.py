"""SIGINT and SIGTERM while a command runs."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from commjax.pruning import stream


class Signalled(BaseException):
    """SIGINT or SIGTERM ended the command.

    Attributes:
        number: Number of the signal.
        text: Message for the user.
    """

    def __init__(self, number: int, text: str = "stopped; the same command again continues or begins anew") -> None:
        super().__init__(text)
        self.number, self.text = number, text


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

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if not asked or len(seen) > 1:
            raise Signalled(number)
        with contextlib.suppress(OSError):  # not print: the signal may have interrupted a print
            os.write(2, b"commjax: stops when this block is written; a second signal stops it now\n")

    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    # The caller may have switched SIGINT off (nohup, a job in the background).
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    except stream.Stopped as error:
        raise Signalled(seen[0], str(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
