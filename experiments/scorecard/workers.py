"""Measure modules of claims in several processes.

One process measures all claims of a module, because they share data and compiled programs. A worker receives the name
of a module and sends back its claims one by one. The parent shows them, so the output is the same for any number of
processes. If a claim fails, the error is raised in the parent with the worker's traceback.
"""

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from experiments.scorecard.claims import Claim


class Result(NamedTuple):
    """One measured claim and its position.

    Attributes:
        module: Name of the module.
        index: Index in the module's CLAIMS.
        claim: The measured claim.
    """

    module: str
    index: int
    claim: Claim


class ClaimError(RuntimeError):
    """A claim could not be measured."""


def measure_module(module: str) -> Iterator[Result]:
    """Measure the claims of one module in this process, and yield each when it is done."""
    for index, function in enumerate(importlib.import_module(module).CLAIMS):
        began = time.monotonic()
        claim = function()
        yield Result(module, index, replace(claim, seconds=round(time.monotonic() - began, 1)))


def measure_modules(modules: list[str], processes: int) -> Iterator[Result]:
    """Measure the claims of all modules, and yield each when it is done.

    Args:
        modules: Names of the modules, in the order in which they start.
        processes: Number of processes; 1 measures in this process.

    Raises:
        ClaimError: A claim failed, or a worker ended.
    """
    if processes < 1:
        raise ValueError(f"processes: {processes}; allowed: 1 or more")
    processes = min(processes, len(modules))
    if processes == 1:
        for module in modules:
            yield from measure_module(module)
        return
    import jax

    waiting, busy = list(modules), {}
    # Spawn instead of fork: a process that has JAX's threads must not be copied.
    context = multiprocessing.get_context("spawn")
    workers = {}
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, jax.config.jax_enable_x64), daemon=False)  # pyright: ignore[reportAttributeAccessIssue]
            worker.start()
            theirs.close()
            workers[ours] = worker
            _give(ours, waiting, busy)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                except EOFError:
                    workers[connection].join()
                    code = workers[connection].exitcode
                    raise ClaimError(f"the process that measured {busy[connection]} ended with {code}") from None
                if isinstance(message, str):
                    raise ClaimError(f"a claim of {busy[connection]} failed:\n{message}")
                if message is None:
                    _give(connection, waiting, busy)
                else:
                    yield message
    finally:
        for connection, worker in workers.items():
            connection.close()
            if connection in busy:  # there was an error, and the claims of this worker are not needed any more
                worker.terminate()
            worker.join()


def _give(connection: Connection, waiting: list[str], busy: dict[Connection, str]) -> None:
    """Send the next module to a worker, or the empty name, which ends it."""
    module = busy[connection] = waiting.pop(0) if waiting else ""
    connection.send(module)
    if not module:
        del busy[connection]


def _work(connection: Connection, x64: bool) -> None:
    """Run a worker: receive names of modules and send measured claims.

    None follows the last claim of a module. A traceback is sent instead of a claim that failed, and the worker ends.
    """
    import jax

    jax.config.update("jax_enable_x64", x64)
    while module := connection.recv():
        try:
            for result in measure_module(module):
                connection.send(result)
        except Exception:
            connection.send(traceback.format_exc())
            return
        connection.send(None)
