"""The time that compression adds to a training step. Both sides run in one call on one machine.

    python -m experiments.bench.optax                   about 2 minutes on 2 cores

The model is a transformer of about 10 million parameters, with Adam, float32 and one device. One side is plain; the
other compresses the gradient with EF21 to the largest 1 % of every leaf (`commjax.integrations.optax.ef_bv`). The sides
take turns, and the best time counts, because machines are shared. Goal: at most 20 % more time.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from commjax.core import tree
from commjax.integrations import optax as cj_optax
from experiments import transformer
from experiments.bench.ef_bv import best


@dataclass(frozen=True)
class Settings:
    width: int = 384  # with 5 layers: 9.1 million parameters in the layers
    layers: int = 5
    heads: int = 6
    vocabulary: int = 1024
    batch: int = 8  # windows per step
    length: int = 128  # tokens per window
    share: float = 0.01  # share of every leaf that is sent
    repeats: int = 5  # timed steps per side; the best counts


def main(settings: Settings) -> dict[str, float]:
    """Time both sides, and print times and ratio."""
    model = transformer.Transformer(
        settings.vocabulary, settings.width, settings.layers, settings.heads, settings.length
    )
    loss = transformer.loss_of(model)
    key = jax.random.key(0)
    params = model.init(key, jnp.zeros((1, settings.length), jnp.int32))
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.integers(0, settings.vocabulary, (settings.batch, settings.length + 1)), jnp.int32)

    def side(first: optax.GradientTransformation, lift):
        tx = optax.chain(first, optax.adam(1e-4))

        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(lift(grads), state, params)
            return optax.apply_updates(params, updates), state, value

        held = [params, tx.init(params)]

        def one():
            held[0], held[1], value = jax.block_until_ready(step(*held))
            return value

        return one, 1

    mean = cj_optax.ef_bv(cj_optax.top_share(settings.share), 1, key, lam=1.0, nu=1.0)
    sides: dict[str, tuple[Callable[[], object], int]] = {
        "plain": side(optax.identity(), lambda grads: grads),
        "EF21, top": side(mean, lambda grads: jax.tree.map(lambda leaf: leaf[None], grads)),
    }
    seconds = best(sides, settings.repeats)
    ratio = seconds["EF21, top"] / seconds["plain"]
    print(
        f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}, jax {jax.__version__}, {tree.size(params)} "
        "parameters,"
    )
    print(f"  {settings.batch} x {settings.length} tokens a step, {settings.share:.1%} of every leaf sent")
    for name, value in seconds.items():
        print(f"  {name:12} {value * 1e3:9.1f} ms a step")
    print(f"  compressed / plain {ratio:8.3f}   goal: at most 1.2")
    return {"compressed / plain": ratio, **seconds}


if __name__ == "__main__":
    main(tyro.cli(Settings))
