"""The ServerApp and the ClientApp of `task`. BUILD.md has the commands."""

from pathlib import Path

import jax
import numpy as np

from commjax.federation import flower
from flower_ef_bv import task

jax.config.update("jax_enable_x64", True)


def keep(config, server, report) -> None:
    """Write params, loss, bits and absent clients of a round to one file, for comparison with other runs."""
    if config["out"]:
        np.savez(
            Path(config["out"]) / f"{int(server.round):03}.npz",
            params=server.params,
            loss=report.loss,
            bits=(report.bits_up, report.bits_down),
            absent=sorted(report.absent),
        )


client = flower.client_app(task.contract, task.data)
server = flower.server_app(
    task.contract, rounds=lambda c: int(c["rounds"]), timeout=lambda c: float(c["timeout"]), on_round=keep
)
