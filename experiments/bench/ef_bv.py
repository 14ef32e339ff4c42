"""The speed of EF-BV.

    python -m experiments.bench.ef_bv                    about 1 minute on 2 cores

The compressor is comp-(1, 56), with n = 1000 clients, d = 112, 8 rows per client and float32, similar to mushrooms.
Every side computes the loss too.  torch takes part if it is installed.  The sweep is also timed at the size of w8a
(d = 300, 50 rows per client): the runs of a sweep share the reading of the data, which fit into the cache at the first
size and do not at the second.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.compressors import candidates
from commjax.core import rounds, runner
from commjax.core.base import Message
from commjax.data.stacked import ClientData
from commjax.problems import logistic
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    n: int = 1000  # clients
    d: int = 112  # dimension
    rows: int = 8  # rows of data per client
    rounds: int = 1000  # rounds per timed call of a compiled side
    repeats: int = 5  # timed calls per side


QUICK = Settings(rounds=200, repeats=3)
W8A = Settings(d=300, rows=50, rounds=20)
MU, K, GAMMA, LAM, NU = 0.1, 1, 1e-3, 5e-3, 1.0


def data_of(settings: Settings) -> ClientData:
    """Return random sparse data of n clients."""
    rng = np.random.default_rng(0)
    shape = (settings.n, settings.rows)
    features = (rng.random((*shape, settings.d)) < 0.19).astype(np.float32)
    labels = np.where(rng.random(shape) < 0.5, -1, 1).astype(np.float32)
    return ClientData(features, labels, np.full(shape, 1 / settings.rows, np.float32))


def plain_gradient(value_and_grad):
    """Return the same algorithm without compression or control variates.

    The round is x <- x - gamma (1/n) sum_i grad f_i(x).
    """

    def client_step(round, hparams, server, client, data):
        loss, grad = value_and_grad(server.params, data)
        return client, Message(grad, jnp.zeros(())), loss

    def server_step(hparams, server, grad):
        return server._replace(round=server.round + 1, params=server.params - hparams.gamma * grad)

    def init(params, ids):
        return ef_bv.State(ef_bv.Server(jnp.zeros((), jnp.int32), params, params), ef_bv.Client(ids, ids))

    return rounds.federated(init, client_step, server_step, bits_down=lambda server: 0.0)


def loop_numpy(data: ClientData, k_top: int):
    """Return a round of EF-BV in NumPy, one worker after another, as simulations are usually written."""
    n, d = len(data.labels), data.features.shape[2]
    rng = np.random.default_rng(0)
    x, h, shift = np.zeros(d, np.float32), np.zeros((n, d), np.float32), np.zeros(d, np.float32)

    def round():
        nonlocal x, shift
        total, loss = np.zeros(d, np.float32), 0.0
        for i in range(n):
            a, b, w = data.features[i], data.labels[i], data.weights[i]
            margin = b * (a @ x)
            loss += (w @ np.logaddexp(0, -margin) + MU / 2 * x @ x) / n
            grad = a.T @ (-b * w / (1 + np.exp(margin))) + MU * x
            delta = grad - h[i]
            top = np.argpartition(-np.abs(delta), k_top)[:k_top]
            pick = rng.choice(top, K, replace=False)
            message = np.zeros(d, np.float32)
            message[pick] = delta[pick] * (k_top / K)
            h[i] += LAM * message
            total += message / n
        x = x - GAMMA * (shift + NU * total)
        shift = shift + LAM * total
        return loss

    return round


def batched_numpy(data: ClientData, k_top: int):
    """Return a round of EF-BV in NumPy, all workers at once."""
    n, d = len(data.labels), data.features.shape[2]
    rng = np.random.default_rng(0)
    x, h, shift = np.zeros(d, np.float32), np.zeros((n, d), np.float32), np.zeros(d, np.float32)
    row = np.arange(n)

    def round():
        nonlocal x, shift
        margin = data.labels * (data.features @ x)
        loss = (data.weights * np.logaddexp(0, -margin)).sum() / n + MU / 2 * x @ x
        slope = -data.labels * data.weights / (1 + np.exp(margin))
        delta = np.matmul(slope[:, None, :], data.features)[:, 0] + MU * x - h
        top = np.argpartition(-np.abs(delta), k_top, axis=1)[:, :k_top]
        pick = top[row, rng.integers(0, k_top, n)]
        values = delta[row, pick] * (k_top / K)
        h[row, pick] += LAM * values
        total = np.bincount(pick, values, d).astype(np.float32) / n
        x = x - GAMMA * (shift + NU * total)
        shift = shift + LAM * total
        return loss

    return round


def batched_torch(data: ClientData, k_top: int):
    """Return a round of EF-BV in torch with two threads, all workers at once."""
    torch: Any = import_module("torch")
    a, b, w = (torch.from_numpy(part) for part in data)
    n, _, d = a.shape
    x, h, shift = torch.zeros(d), torch.zeros(n, d), torch.zeros(d)
    row = torch.arange(n)

    def round():
        nonlocal x, shift
        margin = b * (a @ x)
        loss = (w * torch.nn.functional.softplus(-margin)).sum() / n + MU / 2 * x @ x
        slope = -b * w * torch.sigmoid(-margin)
        delta = torch.bmm(slope[:, None, :], a)[:, 0] + MU * x - h
        top = torch.topk(delta.abs(), k_top, dim=1, sorted=False).indices
        pick = top[row, torch.randint(0, k_top, (n,))]
        values = delta[row, pick] * (k_top / K)
        h[row, pick] += LAM * values
        total = torch.zeros(d).index_add_(0, pick, values) / n
        x = x - GAMMA * (shift + NU * total)
        shift = shift + LAM * total
        return loss

    return round


FIRST_ROUND = """
import time; began = time.perf_counter()
import jax
from experiments.bench import ef_bv as bench
settings = bench.Settings()
algorithm, state, data = bench.ours(settings)
jax.block_until_ready(jax.jit(algorithm.step)(jax.random.key(0), bench.HPARAMS, state, data))
print(time.perf_counter() - began)
"""

HPARAMS = ef_bv.HParams(GAMMA, LAM, NU)


def ours(settings: Settings):
    """Return algorithm, initial state and data of our side."""
    data = jax.tree.map(jnp.asarray, data_of(settings))
    algorithm = ef_bv.ef_bv(jax.value_and_grad(partial(logistic.loss, mu=MU)), compressors.comp(K, settings.d // 2))
    return algorithm, algorithm.init(jnp.zeros(settings.d), jnp.arange(settings.n)), data


def compiled(function, settings: Settings, *args) -> Side:
    """Return a side that runs all of its rounds in one call."""
    return Side(lambda: function(jax.random.key(0), *args, settings.rounds), settings.rounds)


def run_and_sweep(settings: Settings) -> dict[str, Side]:
    """Return two sides: one run, and a sweep over 16 stepsizes as one program."""
    algorithm, state, data = ours(settings)
    grid = runner.stack([HPARAMS._replace(gamma=GAMMA * 2.0**-power) for power in range(16)])

    def sweep(key, *args):
        return runner.sweep(key[None], *args)

    return {
        "EF-BV": compiled(runner.run, settings, algorithm, HPARAMS, state, data),
        "sweep of 16": compiled(sweep, settings, algorithm, grid, state, data),
    }


def repeated(take_round: Callable[[], object], rounds: int) -> Side:
    """Return a side that takes several rounds, one after another."""
    return Side(lambda: [take_round() for _ in range(rounds)], rounds)


def others(settings: Settings) -> dict[str, Side]:
    """Return the plain gradient method, and EF-BV in NumPy and torch."""
    gradient = plain_gradient(jax.value_and_grad(partial(logistic.loss, mu=MU)))
    start = gradient.init(jnp.zeros(settings.d), jnp.arange(settings.n))
    data, k_top = data_of(settings), settings.d // 2
    arrays = jax.tree.map(jnp.asarray, data)
    sides = {
        "plain gradient": compiled(runner.run, settings, gradient, HPARAMS, start, arrays),
        "NumPy, worker by worker": repeated(loop_numpy(data, k_top), 5),
        "NumPy, batched": repeated(batched_numpy(data, k_top), 100),
    }
    return (
        sides if find_spec("torch") is None else sides | {"torch, batched": repeated(batched_torch(data, k_top), 100)}
    )


def roofline(settings: Settings) -> Table:
    """Time the parts of a round and of a sweep's round by themselves, in loops as in a run, and the machine's peaks."""
    n, d, rows, rounds = settings.n, settings.d, settings.rows, 100
    data = jax.tree.map(jnp.asarray, data_of(settings))
    grads = jax.vmap(jax.grad(partial(logistic.loss, mu=MU)), (None, 0))
    noise = jax.random.normal(jax.random.key(2), (16, n, d))
    some = jax.vmap(jax.vmap(lambda key, row: candidates.k_of_top_mask(key, row, K, d // 2)))
    matrix = jnp.ones((1024, 1024))

    def gradients(x: jax.Array, number: jax.Array) -> jax.Array:
        return x - 1e-9 * jnp.mean(jax.vmap(grads, (0, None))(x, data), axis=1)

    def selection(x: jax.Array, number: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), number), (len(x), n))
        return x + jnp.sum(some(keys, noise[: len(x)] + 1e-9 * x[:, None]), axis=1)

    def control_variates(h: jax.Array, number: jax.Array) -> jax.Array:
        return h + 0.1 * (noise[: len(h)] - h)

    def looped(step: Callable[..., jax.Array], start: jax.Array) -> Side:
        run = jax.jit(lambda start: jax.lax.scan(lambda x, t: (step(x, t), None), start, jnp.arange(rounds))[0])
        return Side(partial(run, start), rounds)

    sides = {}
    for name, step, start in (
        ("gradients", gradients, jnp.zeros((16, d))),
        ("selection", selection, jnp.zeros((16, d))),
        ("control variates", control_variates, jnp.zeros((16, n, d))),
    ):
        sides |= {f"{name}, {count} of 16 runs": looped(step, start[:count]) for count in (1, 16)}
    sides["peak: 2.1 GFLOP of a matrix product"] = looped(lambda a, t: (a @ matrix) / 1024, matrix)
    sides["peak: 4.2 MB read and written"] = looped(lambda a, t: a + 1, matrix)
    return Table(
        "What a round of EF-BV is made of",
        f"as above; a run has {4e-6 * n * rows * d:.1f} MFLOP and twice {4e-6 * n * rows * d:.1f} MB of data for its "
        f"gradients, and {4e-6 * n * d:.2f} MB of control variates",
        "A sweep shares the reading of the data, and nothing of the selection and the control variates.",
        take_turns(sides, settings.repeats),
        {},
        ("ms a round", 1e3),
    )


def first_round() -> float:
    """Return the seconds of the first round in a new process, import and compilation included."""
    command = [sys.executable, "-c", FIRST_ROUND]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def tables(settings: Settings) -> list[Table]:
    """Measure all tables."""
    ratios = {
        "EF-BV / plain gradient": Ratio("EF-BV", "plain gradient", 1.8),
        "NumPy, batched / EF-BV": Ratio("NumPy, batched", "EF-BV", 4, at_least=True),
        "NumPy, worker by worker / EF-BV": Ratio("NumPy, worker by worker", "EF-BV", 80, at_least=True),
        "torch, batched / EF-BV": Ratio("torch, batched", "EF-BV", 3, at_least=True),
        "sweep of 16 / one run": Ratio("sweep of 16", "EF-BV", 8),
    }
    seconds = take_turns(run_and_sweep(settings) | others(settings), settings.repeats)
    large = take_turns(run_and_sweep(W8A), settings.repeats)
    first = {"EF-BV": [first_round() for _ in range(2)]}
    return [
        Table(
            "EF-BV on a small problem",
            f"n = {settings.n}, d = {settings.d}, {settings.rows} rows a client, comp-(1, {settings.d // 2}), float32",
            "All sides compute the loss too. The runs of a sweep share the data, which fit into the cache already.",
            seconds,
            {name: ratio for name, ratio in ratios.items() if ratio.over in seconds},
            ("ms a round", 1e3),
        ),
        Table(
            "A sweep of EF-BV at the size of w8a",
            f"n = {W8A.n}, d = {W8A.d}, {W8A.rows} rows a client",
            "The data (60 MB) do not fit into the cache, so that sharing them helps.",
            large,
            {"sweep of 16 / one run": Ratio("sweep of 16", "EF-BV", 8)},
            ("ms a round", 1e3),
        ),
        roofline(settings),
        Table(
            "The first round", "a new process; import and compilation included", "", first, {}, ("s", 1), {"EF-BV": 6}
        ),
    ]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
