"""A run of an experiment that can be resumed, and its record on disk."""

from pathlib import Path
from typing import Any

from commjax.core import runner
from commjax.core.base import Algorithm, Key, State
from commjax.core.loop import Evaluate
from commjax.core.records import Record


def run(
    path: Path,
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: Any,
    *,
    rounds: int,
    chunk: int,
    progress: bool,
    config: dict[str, Any],
    evaluate: Evaluate | None = None,
    at_once: int | None = None,
    bits_init: float = 0.0,
) -> Record:
    """Run an algorithm by `runner.loop`, with the checkpoint `path`.ckpt, and save its record under `path`.

    Args:
        path: Where the record is saved; its name is the text of the progress bar.
        key: As in `runner.loop`, as all arguments that follow.
        algorithm: The method.
        hparams: Its hyperparameters.
        state: The state with which the run begins.
        data: The data of all clients.
        rounds: Number of rounds.
        chunk: Number of rounds in a compiled chunk.
        progress: Whether to show a progress bar.
        config: Settings to store in the record.
        evaluate: (state) -> dictionary of numbers, called after each chunk.
        at_once: Number of settings of a sweep that are computed together.
        bits_init: Bits that one client sent before the first round.
    """
    _, record = runner.loop(
        key,
        algorithm,
        hparams,
        state,
        data,
        rounds,
        chunk=chunk,
        evaluate=evaluate,
        checkpoint=path.with_name(f"{path.name}.ckpt"),
        config=config,
        bits_init=bits_init,
        label=path.name,
        progress=progress,
        at_once=at_once,
    )
    record.save(path)
    return record
