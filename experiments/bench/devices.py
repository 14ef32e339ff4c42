"""The cost of devices: shard_map, pmap and sharded jit on one device against plain jit, and the bytes between devices.

    python -m experiments.bench.devices                      about 1 minute on 2 cores

The algorithm is EF-BV as in experiments.bench.ef_bv (n = 1000, d = 112, comp-(1, 56), float32), with one round per
call. The sides take turns, and the best time counts. On one device `shard_step` and `pmap_step` are `jit_step`.
`runner.run` with a mesh uses shard_map on one device too; it is compared with `runner.run` without.

Goals: a ratio of at most 1.05 on one device. The bytes of the compiled program's collectives are those of the formula.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import tyro

from commjax.core import runner
from commjax.devices.collectives import bytes_up, collectives
from commjax.devices.mesh import client_mesh, jit_step, pmap_step, shard, shard_rows, shard_step
from experiments.bench import ef_bv as bench


@dataclass(frozen=True)
class Settings:
    rounds: int = 50  # rounds per timed block
    repeats: int = 15  # timed blocks per side; the best counts
    # Numbers of devices, simulated on a CPU. Their speed means nothing; the bytes of their programs are exact.
    devices: tuple[int, ...] = (1, 2, 4, 8)


def main(settings: Settings) -> dict[str, float]:
    """Time all sides on one device, and print ratios and the bytes of collectives."""
    algorithm, state, data = bench.ours(bench.Settings())
    key, mesh = jax.random.key(0), client_mesh(1)

    def block(step, state, data):
        def rounds():
            held = state
            for _ in range(settings.rounds):
                held, _ = step(key, bench.HPARAMS, held, data)
            return jax.block_until_ready(held)

        return rounds, settings.rounds

    def whole(run):
        return lambda: jax.block_until_ready(run()), settings.rounds

    placed, rows = shard(state, mesh), shard_rows(data, mesh)
    sides: dict[str, tuple[Callable[[], object], int]] = {
        "plain jit": block(jax.jit(algorithm.step), state, data),
        "shard_step (= jit_step)": block(shard_step(algorithm, mesh), placed, rows),
        "pmap_step (= jit_step)": block(pmap_step(algorithm, 1), state, data),
        "jit_step": block(jit_step(algorithm, mesh), placed, rows),
        "runner.run": whole(lambda: runner.run(key, algorithm, bench.HPARAMS, state, data, settings.rounds)),
        "runner.run (shard_map)": whole(
            lambda: runner.run(key, algorithm, bench.HPARAMS, placed, rows, settings.rounds, mesh=mesh)
        ),
    }
    seconds = bench.best(sides, settings.repeats)
    print(f"{os.cpu_count()} cores, jax {jax.__version__}, one device")
    ratios = {}
    for name, value in seconds.items():
        against = "runner.run" if "run" in name else "plain jit"
        ratios[name] = value / seconds[against]
        print(f"  {name:24} {value * 1e3:8.3f} ms a round, {ratios[name]:.3f} of {against}   goal: at most 1.05")
    formula = bytes_up(algorithm, bench.HPARAMS, state, data)
    print(f"collectives of the compiled round; formula: one message, its bits, one loss = {formula} bytes")
    for devices in settings.devices:
        step: Any = shard_step(algorithm, client_mesh(devices))  # a jitted function
        found = collectives(step.lower(key, bench.HPARAMS, state, data).compile())
        moved = 2 * (devices - 1) / devices * found.bytes
        print(
            f"  {devices} devices: {found.counts}, {found.bytes} bytes in, {moved:.0f} moved by each device in a ring"
        )
    return ratios


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    jax.config.update("jax_num_cpu_devices", max(chosen.devices))
    main(chosen)
