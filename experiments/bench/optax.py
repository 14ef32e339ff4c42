"""The time that compression adds to a training step.

    python -m experiments.bench.optax                   about 2 minutes on 2 cores

The model is a transformer of about 10 million parameters, with Adam, float32 and one device. One side is plain; the
other compresses the gradient with EF21 to the largest 1 % of every leaf (`commjax.integrations.optax.ef_bv`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from commjax.core import tree
from commjax.integrations import optax as cj_optax
from experiments import transformer
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    width: int = 384  # with 5 layers: 9.1 million parameters in the layers
    layers: int = 5
    heads: int = 6
    vocabulary: int = 1024
    batch: int = 8  # windows per step
    length: int = 128  # tokens per window
    share: float = 0.01  # share of every leaf that is sent
    repeats: int = 5  # timed steps per side


QUICK = Settings(repeats=3)


def tables(settings: Settings) -> list[Table]:
    """Measure both sides."""
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

        return Side(one)

    mean = cj_optax.ef_bv(cj_optax.top_share(settings.share), 1, key, lam=1.0, nu=1.0)
    sides = {
        "plain": side(optax.identity(), lambda grads: grads),
        "EF21, top": side(mean, lambda grads: jax.tree.map(lambda leaf: leaf[None], grads)),
    }
    return [
        Table(
            "Compression inside Optax",
            f"a transformer of {tree.size(params):,} parameters, {settings.batch} x {settings.length} tokens a step, "
            f"{settings.share:.0%} of every leaf sent",
            "Both sides end with Adam.",
            take_turns(sides, settings.repeats),
            {"compressed / plain": Ratio("EF21, top", "plain", 1.15)},
            ("ms a step", 1e3),
        )
    ]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
