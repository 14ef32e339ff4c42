"""Compressors at the sizes of networks, against torch.topk, and what they add to a round of EF-BV.

    python -m experiments.bench.compressors          about 1 minute on 2 cores

One call compresses n rows under `vmap`.  torch.topk takes the same rows, with its default number of threads.  A round
of EF-BV has 8 rows of data a client; "uncompressed" is the same method with the identity.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.compressors import random_sets, selection
from commjax.core import random_words, runner
from commjax.core.base import Compressor
from commjax.models import fast_on_cpu
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    sizes: tuple[tuple[int, int], ...] = ((50, 101_770), (4, 2_000_000))  # (rows n, dimension d)
    share: float = 0.01  # share of the entries that is kept
    clients: int = 50  # clients of EF-BV
    rows: int = 8  # rows of data of a client
    repeats: int = 5
    calls: int = 10  # calls of a turn


QUICK = replace(Settings(), sizes=((50, 101_770),), repeats=3, calls=3)


def kinds(k: int) -> dict[str, Compressor]:
    """Return the compressors of the table, which keep k entries."""
    return {
        "top-k": compressors.top_k(k),
        "rand-k": compressors.rand_k(k),
        "comp-(k, 2k)": compressors.comp(k, 2 * k),
        "mix-(k, k)": compressors.mix(k, k),
        "perm-k": compressors.perm_k(),
        "natural": compressors.natural(),
        "dithering, 4 levels": compressors.dithering(4),
        "scaled sign": compressors.scaled_sign(),
        "identity": compressors.identity(),
    }


def on_rows(n: int, d: int, settings: Settings) -> Table:
    """Time every compressor on n rows of length d."""
    k = max(1, round(settings.share * d))
    x = jax.random.normal(jax.random.key(0), (n, d), jnp.float32)
    calls, units = range(settings.calls), n * d * settings.calls

    def side(compressor: Compressor) -> Side:
        def compressed(id: jax.Array, row: jax.Array) -> jax.Array:
            return compressor.compress(jax.random.key(1), row, id, n).value

        run = jax.jit(jax.vmap(compressed))
        return Side(lambda: [jax.block_until_ready(run(jnp.arange(n), x)) for _ in calls], units)

    sides = {name: side(compressor) for name, compressor in kinds(k).items()}
    ratios: dict[str, Ratio] = {}
    if find_spec("torch") is not None:
        torch: Any = import_module("torch")
        rows = torch.from_numpy(np.array(x))
        sides["torch.topk of magnitudes"] = Side(lambda: [torch.topk(rows.abs(), k) for _ in calls], units)
        goals = {"top-k": 0.6, "comp-(k, 2k)": 0.75}
        ratios = {f"{name} / torch": Ratio(name, "torch.topk of magnitudes", bound) for name, bound in goals.items()}
    goals = {"rand-k": 1.5, "natural": 3, "dithering, 4 levels": 3}
    return Table(
        f"Compressing rows of {d:,} entries",
        f"{n} rows, k = {k}, float32",
        "A threshold for top-k is found with about eight counts of all entries. rand-k draws k positions by a keyed "
        "permutation.",
        take_turns(sides, settings.repeats),
        ratios,
        ("ns an entry", 1e9),
        goals,
    )


def parts(n: int, d: int, settings: Settings) -> Table:
    """Time what top-k and rand-k are made of, and what they were made of before."""
    k = max(1, round(settings.share * d))
    x = jax.random.normal(jax.random.key(0), (n, d), jnp.float32)
    ids = jnp.arange(n)
    bits = jax.jit(jax.vmap(selection.magnitude_bits))(x)
    rows = {
        "top-k: one count of what is above a number": lambda row: selection.count(row > 1 << 29),
        "top-k: two keys of a sample": lambda row: selection.sampled(row, k),
        "top-k: the threshold": lambda row: selection.interpolated(row, k),
        "top-k: the threshold bit by bit (before)": lambda row: selection.bisected(row, k),
    }
    # Rows one after another, as top-k takes them.
    sides: dict[str, tuple[Callable[..., Any], jax.Array]] = {
        name: (jax.jit(partial(jax.lax.map, function)), bits) for name, function in rows.items()
    }
    sides["top-k: the mask"] = jax.jit(jax.vmap(lambda row: selection.top_k_mask(row, k))), x

    def keyed(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.jit(jax.vmap(lambda id: function(jax.random.fold_in(jax.random.key(1), id))))

    sides["rand-k: k positions"] = keyed(lambda key: random_sets.random_positions(key, d, k)), ids
    sides["rand-k: a word an entry (before)"] = keyed(lambda key: random_words.bits(key, (d,))), ids

    def side(function: Callable[[Any], Any], argument: jax.Array) -> Side:
        return Side(
            lambda: [jax.block_until_ready(function(argument)) for _ in range(settings.calls)], n * d * settings.calls
        )

    return Table(
        f"Parts of a selection from {d:,} entries",
        f"{n} rows, k = {k}, float32",
        "The threshold is moved until exactly k entries are above it, which takes about eight counts; bit by bit, it "
        "takes 31. Before, rand-k took the k largest of one random word an entry.",
        take_turns({name: side(*one) for name, one in sides.items()}, settings.repeats),
        {},
        ("ns an entry", 1e9),
    )


class Mlp(nn.Module):
    """784-64-10."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the score of each class."""
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class Cnn(nn.Module):
    """Two convolutions and a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the score of each class."""
        for channels in (16, 32):
            x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def in_ef_bv(name: str, module: nn.Module, settings: Settings) -> Table:
    """Time a round of EF-BV with top-k and rand-k against the uncompressed one."""
    rng = np.random.default_rng(0)
    n, rows = settings.clients, settings.rows
    images = jnp.asarray(rng.random((n, rows, 28, 28, 1)), jnp.float32)
    data = images, jnp.asarray(rng.integers(0, 10, (n, rows)), jnp.int32)
    params = module.init(jax.random.key(0), images[0])

    def loss(params: Any, data: Any) -> jax.Array:
        scores: Any = module.apply(params, data[0])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), data[1][:, None], axis=1))

    gradient = jax.value_and_grad(fast_on_cpu(loss))
    d = sum(leaf.size for leaf in jax.tree.leaves(params))
    k = max(1, round(settings.share * d))

    hparams = ef_bv.HParams(jnp.float32(1e-3), jnp.float32(1), jnp.float32(1))

    def side(compressor: Compressor) -> Side:
        algorithm = ef_bv.ef_bv(gradient, compressor)
        start = algorithm.init(params, jnp.arange(n))
        run = partial(runner.run, jax.random.key(0), algorithm, hparams, start, data, settings.calls)
        return Side(run, settings.calls)

    chosen = {
        "uncompressed": compressors.identity(),
        "top 1 %": compressors.top_k(k),
        "rand 1 %": compressors.rand_k(k),
    }
    seconds = take_turns({label: side(compressor) for label, compressor in chosen.items()}, settings.repeats)
    ratios = {
        f"{label} / uncompressed": Ratio(label, "uncompressed", goal)
        for label, goal in (("top 1 %", 1.3), ("rand 1 %", 1.1))
    }
    setting = f"{n} clients of {rows} rows, d = {d:,}, float32"
    says = "A round computes all gradients, compresses and averages them, and updates the control variates."
    return Table(f"A round of EF-BV with {name}", setting, says, seconds, ratios, ("ms a round", 1e3))


def tables(settings: Settings) -> list[Table]:
    """Measure all tables."""
    networks = {"an MLP": Mlp(), "a CNN": Cnn()}
    rows = [on_rows(n, d, settings) for n, d in settings.sizes] + [parts(*settings.sizes[0], settings)]
    return rows + [in_ef_bv(name, module, settings) for name, module in networks.items()]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
