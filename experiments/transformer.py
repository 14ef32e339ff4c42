"""Train a Flax transformer on text with gradients that EF21 compresses to 1 %, inside an ordinary Optax loop.

    python -m experiments.transformer                                       about 2 CPU minutes, no network, no files
    JAX_NUM_CPU_DEVICES=4 python -m experiments.transformer --devices 4     the same on 4 devices

The text is the help topics of the running Python, with characters as tokens. Each client has an equal part of it. The
loop is an ordinary data-parallel loop with two additions: `commjax.integrations.optax.ef_bv`, and the momentum of each
client before it (EF21-SGDM). Without momentum, the noise of a stochastic gradient would stay in h_i for about 100
steps.

Expected: the compressed run needs more steps. With `longer` = 4 times the steps it reaches the held-out loss of the
plain run within `margin`, and each client has sent about 20 times fewer bits. The exit status is 1 if it does not.
"""

import sys
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from commjax import compressors
from commjax.core import tree
from commjax.core.progress import progress_bar
from commjax.devices.mesh import AXIS, client_mesh
from commjax.integrations import optax as cj_optax
from commjax.llm import embedded


@dataclass(frozen=True)
class Settings:
    clients: int = 4  # number of clients; each has its own part of the text
    batch: int = 8  # windows per client and step
    length: int = 32  # characters per window
    width: int = 64  # width of the transformer
    layers: int = 2
    heads: int = 4
    steps: int = 500  # steps of the plain run
    longer: int = 4  # the compressed run has this many times the steps
    learning_rate: float = 3e-3  # Adam's, after warm-up; it decays to zero as a cosine
    compressed_learning_rate: float = 1e-3  # lower, because the compressed direction is older
    momentum: float = 0.9  # momentum of each client, before compression
    share: float = 0.01  # share of every leaf that is sent
    margin: float = 0.05  # nats per character by which the compressed run may be worse
    devices: int = 1  # devices, simulated on a CPU
    seed: int = 0
    progress: bool = True  # show a bar


class Transformer(nn.Module):
    """A causal transformer with pre-layer normalization and learned positions."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int

    @nn.compact
    def __call__(self, ids):
        h = nn.Embed(self.vocabulary, self.width)(ids)
        h = h + self.param("positions", nn.initializers.normal(0.02), (self.length, self.width))[None, : ids.shape[1]]
        mask = nn.make_causal_mask(ids)
        for _ in range(self.layers):
            h = h + nn.SelfAttention(self.heads)(nn.LayerNorm()(h), mask)
            h = h + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(h))))
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(h))


def loss_of(model: nn.Module):
    """Return loss(params, windows): the mean next-character cross-entropy of int windows [batch, length + 1]."""

    def loss(params, windows):
        logits: Any = model.apply(params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    return loss


def windows(rng: np.random.Generator, parts: np.ndarray, batch: int, length: int) -> np.ndarray:
    """Draw windows of characters [clients, batch, length + 1], those of each client from its own part.

    Args:
        rng: Generator of the starts.
        parts: Text of each client [clients, characters].
        batch: Windows per client.
        length: Characters per window, without the last target.
    """
    starts = rng.integers(0, parts.shape[1] - length, (len(parts), batch, 1)) + np.arange(length + 1)
    return parts[np.arange(len(parts))[:, None, None], starts]


def train(settings: Settings, compressed: bool) -> dict[str, float]:
    """Train one model.

    Returns:
        The last training loss, the held-out loss, the bits per client and step, the number of steps, and the number d
        of parameters.
    """
    corpus = embedded.corpus()
    share = len(corpus.train) // settings.clients
    parts = corpus.train[: share * settings.clients].reshape(settings.clients, share)
    model = Transformer(128, settings.width, settings.layers, settings.heads, settings.length)
    loss = loss_of(model)
    key = jax.random.key(settings.seed)
    params = model.init(key, jnp.zeros((1, settings.length), jnp.int32))
    n, steps = settings.clients, settings.steps * (settings.longer if compressed else 1)
    rate = settings.compressed_learning_rate if compressed else settings.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    if compressed:
        tx = optax.chain(
            cj_optax.per_client(optax.ema(settings.momentum), n),
            cj_optax.ef_bv(cj_optax.top_share(settings.share), n, key, lam=1.0, nu=1.0),
            optax.adam(schedule, b1=0.0, b2=0.99),
        )
    else:
        tx = optax.chain(cj_optax.compressed_mean(compressors.identity(), n, key), optax.adam(schedule))

    mesh = client_mesh(settings.devices)
    state = tx.init(params)
    state = jax.device_put(state, cj_optax.shardings(state, mesh))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    rows = NamedSharding(mesh, P(AXIS))

    @jax.jit
    def step(params, state, batch):
        values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    rng, value = np.random.default_rng(settings.seed), jnp.nan
    label = "top-1 %" if compressed else "plain"
    with progress_bar(label, steps, enabled=settings.progress) as advance:
        for number in range(1, steps + 1):
            batch = jax.device_put(windows(rng, parts, settings.batch, settings.length), rows)
            params, state, value = step(params, state, batch)
            advance(number, {"loss": float(value)})
    held_out = windows(np.random.default_rng(1), corpus.held_out[None], 256, settings.length)[0]
    return {
        "training loss": float(value),
        "held-out loss": float(jax.jit(loss)(params, held_out)),
        "bits": float(cj_optax.bits(state)),
        "steps": steps,
        "d": tree.size(params),
    }


def gap_of(results: dict[str, dict[str, float]]) -> float:
    """Return by how many nats per character the compressed run is worse than the plain run."""
    return results["compressed"]["held-out loss"] - results["plain"]["held-out loss"]


def status(settings: Settings) -> int:
    """Return 0 if the compressed run is within the margin, else 1 (also if its loss is not a number)."""
    return 0 if gap_of(main(settings)) <= settings.margin else 1


def main(settings: Settings) -> dict[str, dict[str, float]]:
    """Train the plain and the compressed model, and print their losses and bits."""
    if settings.devices > 1 and jax.default_backend() == "cpu" and jax.device_count() < settings.devices:
        raise ValueError(f"devices={settings.devices}: set JAX_NUM_CPU_DEVICES={settings.devices} for simulated ones")
    results = {name: train(settings, compressed) for name, compressed in (("plain", False), ("compressed", True))}
    d = int(results["plain"]["d"])
    print(f"{d} parameters, {settings.clients} clients, {settings.share:.0%} of every leaf")
    for name, result in results.items():
        print(
            f"  {name:12} {result['steps']:6.0f} steps, held-out {result['held-out loss']:.4f} nats a character, "
            f"{result['bits']:9.0f} bits a client and step"
        )
    gap = gap_of(results)
    sent = {name: result["bits"] * result["steps"] for name, result in results.items()}
    saved = sent["plain"] / sent["compressed"]
    verdict = "within" if gap <= settings.margin else "NOT within"
    print(
        f"  {saved:.1f} times fewer bits in all; "
        f"the loss differs by {gap:+.4f}, {verdict} the margin of {settings.margin}"
    )
    return results


if __name__ == "__main__":
    sys.exit(status(tyro.cli(Settings)))
