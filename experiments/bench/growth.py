"""How time and memory grow with clients, dimension, local steps, rounds and devices; the first round of every method.

    python -m experiments.bench.growth          about 2 minutes on 2 cores; the largest program reserves 5.2 GB

One size is changed at a time.  The exponent is the slope of log(time) over log(size), over all sizes: small ones have
fixed costs, large ones do not fit into the cache.  Memory is what XLA reserves for the compiled round (arguments,
results and temporary arrays), or the rows of all clients on the host.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv, fedavg, scafflix
from commjax.core import runner
from commjax.core.base import Algorithm
from commjax.devices import host_clients
from commjax.devices.mesh import client_mesh, shard, shard_rows, shard_step
from experiments.bench.measure import Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    clients: tuple[int, ...] = (100, 1_000, 10_000, 100_000)  # in one program
    host: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)  # on the host, with cohorts of 100
    dimensions: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
    steps: tuple[int, ...] = (1, 4, 16, 64, 256)  # local steps, or K
    rounds: tuple[int, ...] = (10, 100, 1_000, 10_000)
    devices: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 3


QUICK = replace(
    Settings(),
    clients=(100, 1_000, 10_000),
    host=(1_000, 100_000),
    dimensions=(10_000, 100_000, 1_000_000),
    rounds=(10, 1_000),
    repeats=2,
)


class Point(NamedTuple):
    """A program at one size, and the bytes that it needs."""

    side: Side
    bytes: int


def exponent(sizes: Sequence[int] | np.ndarray, seconds: Sequence[float] | np.ndarray) -> float:
    """Return the slope of log(seconds) over log(size)."""
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(seconds), 1)[0])


def squares(x: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return value and gradient of |x - data|^2 / 2."""
    error = x - data
    return jnp.vdot(error, error) / 2, error


def round_of(algorithm: Algorithm, hparams: Any, n: int, d: int, **per_client: Any) -> Point:
    """A round with the state of the run donated, as a run has it."""
    data = jax.random.normal(jax.random.key(0), (n, d), jnp.float32)
    state = algorithm.init(jnp.zeros(d, jnp.float32), jnp.arange(n), **per_client)
    state = jax.tree.map(jnp.copy, state)
    step = jax.jit(partial(algorithm.step, jax.random.key(1)), donate_argnums=1).lower(hparams, state, data).compile()
    about: Any = step.memory_analysis()
    held = [state]
    reserved = about.argument_size_in_bytes + about.output_size_in_bytes + about.temp_size_in_bytes

    def run() -> None:
        held[0] = jax.block_until_ready(step(hparams, held[0], data)[0])

    return Point(Side(run), reserved - about.alias_size_in_bytes)


# Stepsizes so small that a later round has as much to do as the first: nothing converges, no entries are tied.
EF_BV = ef_bv.HParams(np.float32(1e-6), np.float32(1e-6), np.float32(1.0))


def by_clients(n: int) -> Point:
    """EF-BV with top 1 %, all clients in one program."""
    return round_of(ef_bv.ef_bv(squares, compressors.top_k(10)), EF_BV, n, 1000)


def by_dimension(d: int) -> Point:
    """EF-BV with top 1 % and two clients."""
    return round_of(ef_bv.ef_bv(squares, compressors.top_k(d // 100)), EF_BV, 2, d)


def random_by_dimension(d: int) -> Point:
    """EF-BV with rand 1 % and two clients."""
    return round_of(ef_bv.ef_bv(squares, compressors.rand_k(d // 100)), EF_BV, 2, d)


def by_steps(steps: int) -> Point:
    """FedAvg with local steps, 16 clients."""
    return round_of(fedavg.fedavg(squares, steps=steps), fedavg.HParams(jnp.float32(0.01)), 16, 10_000)


def scafflix_by_steps(steps: int) -> Point:
    """Scafflix with 1/p local steps in expectation, 16 clients."""
    hparams = scafflix.HParams(jnp.float32(0.01), jnp.float32(0.5), jnp.float32(1 / steps))
    point = round_of(scafflix.scafflix(squares), hparams, 16, 10_000, optimum=jnp.ones((16, 10_000), jnp.float32))
    many = 256  # rounds of a turn, so that the numbers of steps average out

    def run() -> None:
        for _ in range(many):
            point.side.run()

    return Point(Side(run, many), point.bytes)


def by_rounds(rounds: int) -> Point:
    """A whole run of EF-BV as one program."""
    algorithm = ef_bv.ef_bv(squares, compressors.top_k(10))
    data = jax.random.normal(jax.random.key(0), (10, 1000), jnp.float32)
    state = algorithm.init(jnp.zeros(1000, jnp.float32), jnp.arange(10))
    metrics = 3 * 4 * rounds
    return Point(Side(partial(runner.run, jax.random.key(0), algorithm, EF_BV, state, data, rounds)), metrics)


def on_host(n: int) -> Point:
    """EF-BV with cohorts of 100 of n clients on the host, ten rounds."""
    d = 100
    algorithm = ef_bv.ef_bv(squares, compressors.rand_k(10))
    held = [host_clients.start(algorithm, jnp.zeros(d, jnp.float32), n)]
    pool = np.random.default_rng(0).standard_normal((256, d)).astype(np.float32)

    def run() -> None:
        held[0], _ = host_clients.run(
            jax.random.key(0), algorithm, EF_BV, held[0], lambda ids: pool[ids % 256], 10, size=100
        )

    return Point(Side(run, 10), n * (d * 4 + 4))


def on_devices(count: int) -> Point:
    """EF-BV, 1000 clients on several devices; those of a CPU share its cores."""
    mesh = client_mesh(count)
    algorithm = ef_bv.ef_bv(squares, compressors.top_k(10))
    data = shard_rows(jax.random.normal(jax.random.key(0), (1000, 1000), jnp.float32), mesh)
    state = shard(algorithm.init(jnp.zeros(1000, jnp.float32), jnp.arange(1000)), mesh)
    step: Any = shard_step(algorithm, mesh)  # a jitted function
    about = step.lower(jax.random.key(1), EF_BV, state, data).compile().memory_analysis()
    reserved = about.argument_size_in_bytes + about.output_size_in_bytes + about.temp_size_in_bytes
    return Point(Side(lambda: step(jax.random.key(1), EF_BV, state, data)), reserved)


def growth(
    name: str, make: Callable[[int], Point], sizes: Sequence[int], repeats: int, most: float
) -> tuple[Table, dict[str, list[float]]]:
    """Measure the sizes one after another, because large ones do not fit into memory together.

    Returns:
        The table of times, and the bytes of each size.
    """
    seconds, reserved = {}, {}
    for size in sizes:
        point = make(size)
        seconds[f"{size:,}"] = take_turns({"": point.side}, repeats)[""]
        reserved[f"{name}: {size:,}"] = [float(point.bytes)]
    slopes = [exponent(sizes, [values[turn] for values in seconds.values()]) for turn in range(repeats)]
    doc = (make.__doc__ or "").strip().rstrip(".")
    values = {"exponent": (slopes, most)}
    return Table(f"Growth with {name}", doc, "", seconds, {}, ("ms", 1e3), {}, values), reserved


def first_rounds() -> Table:
    """Time the first round of every method of the tests' registry, with its compilation."""
    registry = import_module("tests.registry")
    seconds: Mapping[str, list[float]] = {}
    for name in registry.NAMES:
        case = registry.build(name, jnp.float32)
        state = case.init()
        begin = time.perf_counter()
        jax.block_until_ready(jax.jit(case.algorithm.step)(jax.random.key(0), case.hparams, state, case.data))
        seconds[name] = [time.perf_counter() - begin]
        jax.clear_caches()
    slowest = max(seconds, key=lambda name: seconds[name])
    return Table(
        "The first round of every method",
        "float32, the small problems of tests/registry.py, compilation included",
        f"The slowest is {slowest}.",
        {slowest: seconds[slowest], "all methods together": [sum(value[0] for value in seconds.values())]},
        {},
        ("s", 1),
        {slowest: 6},
    )


def tables(settings: Settings) -> list[Table]:
    """Measure all sizes."""
    chosen: list[tuple[str, Callable[[int], Point], tuple[int, ...], float]] = [
        ("clients in one program", by_clients, settings.clients, 1.1),
        ("clients on the host", on_host, settings.host, 0.1),
        ("dimension, top 1 %", by_dimension, settings.dimensions, 1.1),
        ("dimension, rand 1 %", random_by_dimension, settings.dimensions, 1.1),
        ("local steps, FedAvg", by_steps, settings.steps, 1.1),
        ("local steps, Scafflix", scafflix_by_steps, settings.steps, 1.1),
        ("rounds", by_rounds, settings.rounds, 1.1),
        ("devices", on_devices, settings.devices, 1.1),
    ]
    found = [growth(name, make, sizes, settings.repeats, most) for name, make, sizes, most in chosen]
    reserved = {name: value for _, part in found for name, value in part.items()}
    says = "Rows of clients on the host are counted there; of a whole run, only what its metrics need."
    memory = Table("Memory", "as above", says, reserved, {}, ("MB", 1e-6))
    return [*(table for table, _ in found), memory, first_rounds()]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", max(Settings().devices))
    command(Settings, QUICK, tables)
