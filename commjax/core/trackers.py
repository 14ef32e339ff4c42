"""Trackers: a run passes the numbers of each round to a file or to a service."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Takes the numbers of a run, as `runner.loop(..., tracker=)` calls it."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one round.

        Rounds come in ascending order.  A run that continues after a kill may repeat rounds, with equal numbers.

        Args:
            round: number of the round.
            values: the metrics of the round by name; an evaluation before the round has names such as "eval/norm".  In
                a sweep, "loss[2,0]" is the loss of setting 2 and key 0.
        """
        ...


class JsonLines:
    """Appends a JSON object for each round to a file.

    Attributes:
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        """Name the file.  It is read and written by the first `log`."""
        self.path = Path(path)
        self._last: tuple[int, set[str]] | None = None  # the last round of the file, and the names that it has

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Append a line with the numbers that the file does not have yet.  A number that is not finite is `null`."""
        if self._last is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._last = _last_round(self.path)
        last, names = self._last
        names = names if round == last else set[str]()
        new = {name: value if math.isfinite(value) else None for name, value in values.items() if name not in names}
        if round < last or not new:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"round": round, **new}) + "\n")
        self._last = round, names | new.keys()


def json_lines(path: str | Path) -> JsonLines:
    """Make a tracker that writes JSON lines.

    Args:
        path: the file.  An existing file is continued: numbers that it has are not written again, and a last line that
            a killed process left unfinished is removed.  If a run that has ended is extended, its last round has two
            lines: the evaluation at the end, and then the metrics.

    Returns:
        The tracker.
    """
    return JsonLines(path)


def _last_round(path: Path) -> tuple[int, set[str]]:
    """The last round in a file, and the names of its numbers; -1 if there is none.

    An unfinished last line is removed.
    """
    if not path.exists():
        return -1, set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    last, names = -1, set[str]()
    try:
        for line in reversed(whole.splitlines()):
            row = json.loads(line)
            if last >= 0 and int(row["round"]) != last:
                break
            last, names = int(row["round"]), names | row.keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold JSON lines with a round: {error!r}; allowed: a new file") from error
    return last, names
