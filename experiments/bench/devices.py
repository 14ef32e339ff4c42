"""The cost of devices: shard_map, pmap and sharded jit on one device against plain jit, and the bytes between devices.

    python -m experiments.bench.devices                      about 1 minute on 2 cores

The algorithm is EF-BV as in experiments.bench.ef_bv (n = 1000, d = 112, comp-(1, 56), float32), with one round per
call. On one device `shard_step` and `pmap_step` are `jit_step`.
`runner.run` with a mesh uses shard_map on one device too; it is compared with `runner.run` without.

Goals: a ratio of at most 1.05 on one device. The bytes of the compiled program's collectives are those of the formula.
"""

from dataclasses import dataclass
from typing import Any

import jax

from commjax.core import runner
from commjax.devices.collectives import bytes_up, collectives
from commjax.devices.mesh import client_mesh, jit_step, pmap_step, shard, shard_rows, shard_step
from experiments.bench import ef_bv as bench
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    rounds: int = 50  # rounds per timed block
    repeats: int = 9  # timed blocks per side
    # Numbers of devices, simulated on a CPU. Their speed means nothing; the bytes of their programs are exact.
    devices: tuple[int, ...] = (1, 2, 4, 8)


QUICK = Settings(rounds=20, repeats=5)


def tables(settings: Settings) -> list[Table]:
    """Measure all sides on one device, and print the bytes of collectives."""
    algorithm, state, data = bench.ours(bench.Settings())
    key, mesh = jax.random.key(0), client_mesh(1)

    def block(step, state, data):
        def rounds():
            held = state
            for _ in range(settings.rounds):
                held, _ = step(key, bench.HPARAMS, held, data)
            return jax.block_until_ready(held)

        return Side(rounds, settings.rounds)

    def whole(run):
        return Side(run, settings.rounds)

    placed, rows = shard(state, mesh), shard_rows(data, mesh)
    sides = {
        "plain jit": block(jax.jit(algorithm.step), state, data),
        "shard_step (= jit_step)": block(shard_step(algorithm, mesh), placed, rows),
        "pmap_step (= jit_step)": block(pmap_step(algorithm, 1), state, data),
        "jit_step": block(jit_step(algorithm, mesh), placed, rows),
        "runner.run": whole(lambda: runner.run(key, algorithm, bench.HPARAMS, state, data, settings.rounds)),
        "runner.run (shard_map)": whole(
            lambda: runner.run(key, algorithm, bench.HPARAMS, placed, rows, settings.rounds, mesh=mesh)
        ),
    }
    seconds = take_turns(sides, settings.repeats)
    ratios = {}
    for name in sides:
        against = "runner.run" if "run" in name else "plain jit"
        if name != against:
            ratios[f"{name} / {against}"] = Ratio(name, against, 1.05)
    formula = bytes_up(algorithm, bench.HPARAMS, state, data)
    print(f"collectives of the compiled round; formula: one message, its bits, one loss = {formula} bytes")
    for devices in settings.devices:
        step: Any = shard_step(algorithm, client_mesh(devices))  # a jitted function
        found = collectives(step.lower(key, bench.HPARAMS, state, data).compile())
        moved = 2 * (devices - 1) / devices * found.bytes
        print(
            f"  {devices} devices: {found.counts}, {found.bytes} bytes in, {moved:.0f} moved by each device in a ring"
        )
    setting = "EF-BV, n = 1000, d = 112, comp-(1, 56), one device"
    says = "On one device `shard_step` and `pmap_step` are `jit_step`."
    return [Table("What devices cost where there is one", setting, says, seconds, ratios, ("ms a round", 1e3))]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", max(Settings().devices))
    command(Settings, QUICK, tables)
