"""Hold SIGTERM and SIGINT back until a checkpoint is written."""

import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax
from jaxtyping import PyTree


class Deferred:
    """Holds a signal back until `act` is called.

    Attributes:
        signum: number of the signal that waits; None if there is none.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def act(self, text: str, signum: int | None = None) -> None:
        """Deliver the waiting signal, if there is one.

        Args:
            text: One line for stderr; nothing is printed if it is empty.
            signum: A signal that another process of the job received; None is the signal of this process.

        Returns:
            None if there is no signal, or if the user's handler returns; the run then continues.  Otherwise the
            exception of the handler is raised: SystemExit with 128 + signum if there is no handler, KeyboardInterrupt
            for Python's default handler of SIGINT.
        """
        signum = self.signum if signum is None else signum
        if signum is None:
            return
        if text:
            print(f"commjax: {signal.Signals(signum).name}: {text}", file=sys.stderr, flush=True)
        self._deliver(signum)
        self._install()  # the handler returned, so the run continues

    def wait(self, results: PyTree) -> None:
        """Wait for a compiled program.  Python handles signals meanwhile, so a second signal acts immediately.

        Args:
            results: The arrays that the program returned.

        Returns:
            None.
        """
        began = time.monotonic()
        while self._previous and not all(leaf.is_ready() for leaf in jax.tree.leaves(results)):
            time.sleep(min(0.1, 1e-4 + 0.02 * (time.monotonic() - began)))

    def _deliver(self, signum: int) -> None:
        self.signum = None
        self._restore()
        handler = self._previous.get(signum, signal.SIG_DFL)
        if callable(handler):
            handler(signum, sys._getframe())
        else:
            raise SystemExit(128 + signum)

    def _handle(self, signum: int, frame: Any) -> None:
        self._restore()  # so that a second signal acts immediately
        if os.getpid() == self._process:
            self.signum = signum
        else:  # a forked child has nothing to save
            signal.raise_signal(signum)

    def _install(self) -> None:
        for number in self._previous:
            signal.signal(number, self._handle)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)


@contextmanager
def deferred() -> Generator[Deferred, None, None]:
    """Hold SIGTERM and SIGINT back until `Deferred.act` is called or the block ends.

    A second signal acts immediately.  Only Python's main thread may handle signals: in another thread nothing changes.
    A signal that is ignored, or that is handled outside Python, is not held back.

    Returns:
        A context that yields the `Deferred`.  At its end the former handlers are restored.
    """
    waiting = Deferred()
    if threading.current_thread() is not threading.main_thread():
        yield waiting
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    waiting._previous = {
        number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)
    }
    try:
        waiting._install()
        yield waiting
    finally:
        waiting._restore()
        if waiting.signum is not None:
            waiting._deliver(waiting.signum)
