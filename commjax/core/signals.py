"""SIGTERM and SIGINT wait until a checkpoint is written."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jaxtyping import PyTree


class Deferred:
    """The signal that waits, if there is one."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def act(self, text: str, signum: int | None = None) -> None:
        """Do what the waiting signal asks for; without one, nothing.

        Args:
            text: One line for stderr; nothing is printed if it is empty.
            signum: A signal that another process of the job received.

        Returns:
            None, without a signal or where the user's own handler returns; the run then continues.  Otherwise the handler's
            exception: SystemExit with 128 + signum where there is no handler, KeyboardInterrupt for Python's own one.
        """
        signum = self.signum if signum is None else signum
        if signum is None:
            return
        if text:
            print(f"commjax: {signal.Signals(signum).name}: {text}", file=sys.stderr, flush=True)
        self._deliver(signum)
        self._install()  # the handler returned

    def wait(self, results: PyTree) -> None:
        """Wait for a compiled program and let Python handle signals meanwhile, so that a second one acts at once.

        Args:
            results: What the program returned.

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
        self._restore()  # a second one acts at once
        if os.getpid() == self._process:
            self.signum = signum
        else:  # a child that was forked meanwhile has nothing to save
            signal.raise_signal(signum)

    def _install(self) -> None:
        for number in self._previous:
            signal.signal(number, self._handle)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[Deferred]:
    """Let SIGTERM and SIGINT wait for `Deferred.act`, or for the end of the block.

    A second signal acts at once, as it would have before.  Only Python's main thread may handle signals: in another thread nothing
    changes.  A signal that is ignored, or that is handled outside Python, stays as it is.

    Returns:
        A context with the waiting signal.  Afterwards the handlers are those of before.
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
