"""The record of a run: settings, versions and the metrics of each round, with a table and a figure of them."""

import importlib.metadata
import io
import json
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from commjax.core.conventions import legacy_bits
from commjax.core.files import write_atomically

_PACKAGES = ("commjax", "jax", "jaxlib", "flax", "optax", "numpy")


def environment() -> dict[str, Any]:
    """Return the versions of packages and the device, for the record of a run.

    Returns:
        `versions` of Python and packages by name, `device`, and `x64`: whether float64 is the default dtype.
    """

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    device = jax.devices()[0]
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "device": f"{device.platform} {device.device_kind} x {jax.device_count()}",
        "x64": jax.numpy.zeros(()).dtype == np.float64,
    }


def _plain(value: Any) -> Any:
    """A setting as JSON can store it."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


@dataclass(frozen=True)
class Record:
    """Settings and metrics of a run, or of a sweep.

    Attributes:
        config: settings; the conventions of `bits_up` need `d` and `kept` here.
        environment: versions and device, as `environment` gives them.
        metrics: by name (loss, bits_up, ...), float64 with one entry per round; in a sweep [h, s, round].
        evaluations: by name, float64 with one entry per evaluation; `round` says when each was made.
        bits_init: bits that one client sent before the first round (h_i^0 of EF-BV).
    """

    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray] = field(default_factory=dict)
    bits_init: float = 0.0

    def bits_up(self, convention: str | None = None) -> np.ndarray:
        """Bits that one client had sent when the loss of each round was measured.

        Args:
            convention: a name in `conventions.LEGACY`, which needs `d` and `kept` in `config`; None counts the bits of
                the encoded messages, `bits_init` included.

        Returns:
            The cumulative bits, in float64, with one entry per round.
        """
        per_round = np.asarray(self.metrics["bits_up"], np.float64)
        if convention is not None:
            if missing := {"d", "kept"} - self.config.keys():
                raise ValueError(
                    f"bits_up: the convention {convention!r} needs {sorted(missing)} in the record's config: "
                    "runner.loop(..., config={'d': ..., 'kept': ...})"
                )
            per_round = np.full_like(per_round, legacy_bits(convention, self.config["d"], self.config["kept"]))
        return (0.0 if convention else self.bits_init) + np.cumsum(per_round, axis=-1) - per_round

    def bits_down(self) -> np.ndarray:
        """Bits that were sent to one client before the loss of each round was measured; cumulative, in float64."""
        per_round = np.asarray(self.metrics["bits_down"], np.float64)
        return np.cumsum(per_round, axis=-1) - per_round

    def first_below(self, target: float, floor: float = 0.0) -> int | None:
        """The first round in which loss - floor is at most `target`; None if there is none."""
        hits = np.flatnonzero(self._loss() - floor <= target)
        return int(hits[0]) if len(hits) else None

    def one(self, h: int, s: int = 0) -> "Record":
        """Return the record of setting h and key s of a sweep."""

        def picked(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: values[h, s] if values.ndim == 3 else values for name, values in parts.items()}

        return replace(self, metrics=picked(self.metrics), evaluations=picked(self.evaluations))

    def _loss(self) -> np.ndarray:
        loss = self.metrics["loss"]
        if loss.ndim != 1:
            raise ValueError(f"this is the record of a sweep, of shape {loss.shape}; take one(h, s) of it")
        return loss

    def save(self, path: str | Path) -> None:
        """Write `path`.json (settings) and `path`.npz (numbers), each atomically."""
        about = {"config": self.config, "environment": self.environment, "bits_init": self.bits_init}
        buffer = io.BytesIO()
        arrays = {f"metrics/{k}": v for k, v in self.metrics.items()} | {
            f"evaluations/{k}": v for k, v in self.evaluations.items()
        }
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_atomically(f"{path}.npz", buffer.getvalue())
        write_atomically(f"{path}.json", json.dumps(_plain(about), indent=1).encode())

    @staticmethod
    def load(path: str | Path) -> "Record":
        """Read the record that `save` wrote to `path`.json and `path`.npz."""
        about = json.loads(Path(f"{path}.json").read_text())
        parts: dict[str, dict[str, np.ndarray]] = {"metrics": {}, "evaluations": {}}
        with np.load(f"{path}.npz", allow_pickle=False) as arrays:
            for name in arrays.files:
                part, key = name.split("/", 1)
                parts[part][key] = arrays[name]
        return Record(about["config"], about["environment"], parts["metrics"], parts["evaluations"], about["bits_init"])

    def table(self, rows: int = 8, floor: float = 0.0) -> str:
        """A text table of a few rounds, spaced evenly.

        Args:
            rows: number of rounds, at most.
            floor: number that is subtracted from the loss.

        Returns:
            The table, with loss and cumulative bits.
        """
        loss = self._loss()
        picked = np.unique(np.linspace(0, len(loss) - 1, min(rows, len(loss))).astype(int))
        up, down = self.bits_up(), self.bits_down()
        lines = [f"{'round':>8} {'loss' if floor == 0 else 'loss - floor':>14} {'bits up':>14} {'bits down':>14}"]
        lines += [f"{t:8d} {loss[t] - floor:14.6e} {up[t]:14.6e} {down[t]:14.6e}" for t in picked]
        return "\n".join(lines)

    def plot(self, path: str | Path, floor: float = 0.0, label: str = "") -> None:
        """Plot loss - floor against bits per client into a PNG file."""
        plot_records(path, {label: self}, floor)


def plot_records(path: str | Path, records: dict[str, Record], floor: float = 0.0) -> None:
    """Plot the loss of several runs against the kilobits that one client sent, and save the figure as a PNG file.

    The axis of the loss is logarithmic.  The figure is as wide as a column of a paper.  It needs matplotlib.

    Args:
        path: the file.
        records: the runs, by label; an empty label is not shown.
        floor: number that is subtracted from the loss.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'commjax[experiments]'") from error
    figure = Figure(figsize=(3.4, 2.6), layout="constrained")  # pyplot would change the backend of a notebook
    axes = figure.subplots()
    for label, record in records.items():
        axes.semilogy(record.bits_up() / 1e3, record._loss() - floor, label=label or None)
    axes.set_xlabel("kilobits sent by one client")
    axes.set_ylabel("loss" if floor == 0 else r"$f(x^t) - f^\star$")
    if any(records):
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=200, format="png")
    write_atomically(path, buffer.getvalue())
