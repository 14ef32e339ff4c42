"""The only host loop: advance a run by chunks; evaluate, track, save and show progress after each chunk."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from commjax.core import checks, files
from commjax.core.progress import progress_bar
from commjax.core.trackers import Tracker

# (state without padding) -> numbers by name; in a sweep arrays [h, s]
Evaluate = Callable[[Any], Mapping[str, Any]]


class DivergedError(FloatingPointError):
    """The loss or the parameters of a run are no longer finite."""


def first_bad_round(metrics: Mapping[str, np.ndarray], params: Any, start: int) -> int | None:
    """Find the first round with a loss that is not finite.

    Args:
        metrics: has `loss`, one number for each round from `start` on.
        params: the model after the last of these rounds.
        start: number of the first of these rounds.

    Returns:
        The number of the first round whose loss is not finite.  If all losses are finite and `params` are not, the
        number of the round after the last.  None if all are finite.
    """
    bad = np.flatnonzero(~np.isfinite(metrics["loss"]))
    if len(bad):
        return start + int(bad[0])
    return None if checks.finite_tree(params) else start + len(metrics["loss"])


class History:
    """Metrics of each round, and evaluations with names such as "eval/norm".

    `extend` takes constant time; the parts are joined when they are needed.
    """

    def __init__(self, stored: Mapping[str, np.ndarray] | None = None, *, swept: bool = False) -> None:
        """Begin with the arrays of a checkpoint, or with none."""
        self._parts = {name: [values] for name, values in (stored or {}).items()}
        self._axes = (1, 3) if swept else (1,)

    def extend(self, name: str, values: np.ndarray) -> None:
        """Append values along the last axis.

        Raises a ValueError unless they have one number per round, in a sweep [h, s] numbers per round.
        """
        if values.ndim not in self._axes:
            raise ValueError(f"{name} must be one number a time (in a sweep: [h, s] of them), got shape {values.shape}")
        self._parts.setdefault(name, []).append(values)

    def arrays(self) -> dict[str, np.ndarray]:
        """All values so far, by name, with the time on the last axis."""
        for name, parts in self._parts.items():
            if len(parts) > 1:
                self._parts[name] = [np.concatenate(parts, axis=-1)]
        return {name: parts[0] for name, parts in self._parts.items()}

    def metrics(self) -> dict[str, np.ndarray]:
        """The metrics of all rounds, by name."""
        return {name: values for name, values in self.arrays().items() if not name.startswith("eval/")}

    def evaluations(self) -> dict[str, np.ndarray]:
        """All evaluations by name; `round` says when each was made."""
        arrays = self.arrays()
        return {name.removeprefix("eval/"): arrays[name] for name in arrays if name.startswith("eval/")}

    def evaluation(self, round: int) -> dict[str, np.ndarray]:
        """The evaluation that was made before a round, by name; empty if there is none."""
        last = {name: parts[-1][..., -1] for name, parts in self._parts.items() if name.startswith("eval/")}
        return last if last.pop("eval/round", None) == round else {}


@runtime_checkable
class Job(Protocol):
    """A run that `drive` advances.  Its state may be of any type."""

    @property
    def path(self) -> Path | None:
        """The file that `save` writes, for its lock; None if nothing is saved.  Signals wait for `save`."""
        ...

    @property
    def writes(self) -> bool:
        """Whether this process writes files, calls the tracker and shows progress."""
        ...

    def advance(self, state: Any, length: int) -> tuple[Any, Any]:
        """Run `length` rounds; the state that was given is no longer valid.

        Returns:
            The state after them, and a named tuple of metrics with one entry per round on the last axis.
        """
        ...

    def check(self, state: Any, metrics: Mapping[str, np.ndarray], start: int) -> None:
        """Raise a DivergedError if the chunk that began in round `start` is not finite."""
        ...

    def whole(self, state: Any) -> Any:
        """The state as `evaluate` sees it."""
        ...

    def save(self, state: Any, history: History) -> None:
        """Save the state and the history, if this run saves anything."""
        ...

    def agreed(self, signum: int | None) -> int | None:
        """The signal on which all processes of the job act; None if there is none."""
        ...

    def resume_text(self, done: int) -> str:
        """One line that says how to continue a run that a signal stops in round `done`; empty prints nothing."""
        ...


def _scalars(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the numbers by name; the entries of an array get names such as "loss[2,0]"."""
    return {
        name + (f"[{','.join(map(str, index))}]" if index else ""): float(value)
        for name, array in values.items()
        for index, value in np.ndenumerate(array)
    }


def _evaluated(evaluate: Evaluate, job: Job, state: Any, history: History, done: int) -> None:
    values = evaluate(job.whole(state))
    if "round" in values:
        raise ValueError("evaluate must not return 'round', which is kept beside its values")
    for name, value in {**values, "round": done}.items():
        history.extend(f"eval/{name}", np.asarray(value, np.float64)[..., None])


def _track(tracker: Tracker, rows: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray], start: int) -> None:
    """Log the rounds of a chunk; the first together with the evaluation before it."""
    for i in range(rows["loss"].shape[-1]):
        values = {name: array[..., i] for name, array in rows.items()}
        tracker.log(start + i, _scalars({**values, **(before if i == 0 else {})}))


def drive(
    job: Job,
    state: Any,
    history: History,
    rounds: tuple[int, int],
    *,
    chunk: int = 1,
    evaluate: Evaluate | None = None,
    tracker: Tracker | None = None,
    label: str = "rounds",
    progress: bool = False,
) -> Any:
    """Advance a run up to a given round.

    After each chunk: check that all is finite, evaluate, log, save, show progress.  A SIGTERM or SIGINT waits until
    the chunk is saved, if `job.path` is not None.  Rounds are logged before they are saved, so a tracker that ignores
    repeated rounds misses none after a kill.

    Args:
        job: how the run advances, and how it is saved.
        state: state in the first of the rounds.
        history: metrics and evaluations before it; this function extends it.
        rounds: the round of `state`, and the round at which the run ends.
        chunk: number of rounds between two saves.
        evaluate: (state of `job.whole`) -> numbers by name; called before the first round and after each chunk.
        tracker: gets the numbers of each round; None logs nothing.
        label: text of the progress bar.
        progress: whether to show a progress bar.

    Returns:
        The last state.
    """
    done, num_rounds = rounds
    tracker = tracker if job.writes else None
    if evaluate is not None and not history.arrays():
        _evaluated(evaluate, job, state, history, done)
    show_bar = progress and job.writes
    with (
        files.writing(job.path if done < num_rounds else None, lock=job.writes) as signals,
        progress_bar(label, num_rounds, done, enabled=show_bar) as show,
    ):
        while done < num_rounds:
            length, start, before = min(chunk, num_rounds - done), done, history.evaluation(done)
            state, metrics = job.advance(state, length)
            signals.wait(metrics)
            rows = {name: np.asarray(values, np.float64) for name, values in metrics._asdict().items()}
            job.check(state, rows, start)
            for name, values in rows.items():
                history.extend(name, values)
            done += length
            if evaluate is not None:
                _evaluated(evaluate, job, state, history, done)
            if tracker is not None:
                _track(tracker, rows, before, start)
            job.save(state, history)
            show(done, {"loss": float(rows["loss"][..., -1].mean())})
            # A signal that arrives after this exchange waits for the next chunk, so all processes stop together.
            if (signum := job.agreed(signals.signum)) is not None:
                signals.act(job.resume_text(done), signum)
    if tracker is not None and (last := history.evaluation(done)):
        tracker.log(done, _scalars(last))
    return state
