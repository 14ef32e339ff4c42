"""Perplexity as the pruning papers measure it, computed block by block."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from commjax.llm.base import Hidden, Layers, Model, advance_once, embed_once

# The number of positions whose logits are held at once.
_POSITIONS = 512


class Losses(NamedTuple):
    """The losses of n windows.

    Attributes:
        nats: For each window, the sum of -log p(token | tokens before it), in nats.
        targets: For each window, the number of predicted tokens.
    """

    nats: Float[np.ndarray, "n"]
    targets: Int[np.ndarray, "n"]


def losses(
    model: Model,
    outer: Layers,
    blocks: Iterable[Layers],
    windows: Int[np.ndarray, "n t"],
    lengths: Int[np.ndarray, "m"] | None = None,
    *,
    batch_size: int = 8,
) -> Losses:
    """Compute the losses of windows, block by block.

    Every token of a window except the first is predicted from the tokens before it in the window. The activations of
    all windows are in memory, but only one block at a time. Embedding, block and head are compiled once each.

    Args:
        model: The model.
        outer: The outer layers.
        blocks: The layers of each block, in order. The iterable is read once, so it may load the blocks from the disk:
            ``(read_block(checkpoint, i) for i in ...)``.
        windows: The ids of the tokens.
        lengths: The number of real tokens of each window, at least 2; the tokens after them are padding. The default is
            t.
        batch_size: The number of windows that go through a block at once.

    Returns:
        The loss of each window.
    """
    count, time = windows.shape
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; allowed: at least 1")
    if count < 1 or time < 2:
        raise ValueError(f"windows has shape {windows.shape}; allowed: at least one window of at least 2 tokens")
    if windows.min() < 0 or windows.max() >= model.config.vocab_size:
        raise ValueError(
            f"windows has tokens {windows.min()}..{windows.max()}; allowed: 0..{model.config.vocab_size - 1}"
        )
    lengths = np.full(count, time) if lengths is None else lengths
    if lengths.shape != (count,) or lengths.min() < 2 or lengths.max() > time:
        raise ValueError(f"lengths={lengths}; allowed: {count} whole numbers in 2..{time}")

    # The last batch is filled up with copies of the first window, so that all batches have the same shape.
    batch_size = min(batch_size, count)
    rows = np.resize(np.arange(count), -(-count // batch_size) * batch_size)
    rows[count:] = 0
    batches = [jnp.asarray(windows[part], jnp.int32) for part in rows.reshape(-1, batch_size)]
    hidden = [embed_once(model.embed, outer, tokens) for tokens in batches]
    read = 0
    for block in blocks:
        for i, h in enumerate(hidden):
            hidden[i] = advance_once(model.block, block, h)
        read += 1
    if read != model.config.num_hidden_layers:
        raise ValueError(f"blocks gave {read} blocks; allowed: num_hidden_layers={model.config.num_hidden_layers}")
    each = [np.asarray(_entropies(model.head, outer, h, tokens), np.float64) for h, tokens in zip(hidden, batches)]
    real = np.arange(1, time) < lengths[:, None]
    nats = np.sum(np.concatenate(each)[:count], axis=1, where=real)
    return Losses(nats, lengths - 1)


def nats_per_token(losses: Losses) -> float:
    """Divide the loss of all windows by the number of predicted tokens, in nats per token.

    Args:
        losses: The losses.

    Returns:
        The nats per token.

    >>> nats_per_token(Losses(np.array([2.0, 4.0]), np.array([1, 2])))
    2.0
    """
    return float(losses.nats.sum() / losses.targets.sum())


def perplexity(losses: Losses) -> float:
    """Compute the perplexity exp(nats per token).

    With the windows of `tokens.evaluation_windows`, this is the number in the tables of Wanda, RIA and DSnoT.

    Args:
        losses: The losses.

    Returns:
        The perplexity.

    >>> perplexity(Losses(np.array([0.0]), np.array([3])))
    1.0
    """
    return math.exp(nats_per_token(losses))


@partial(jax.jit, static_argnames="head")
def _entropies(
    head: Callable[[Layers, Hidden], Float[Array, "b t vocab"]], outer: Layers, h: Hidden, tokens: Int[Array, "b t"]
) -> Float[Array, "b s"]:
    """Return -log p of tokens 1, 2, ... of each window.

    The logits of a few positions at a time are computed, because all of them at once would take gigabytes.
    """

    def entropy(pair: tuple[Float[Array, "d"], Int[Array, ""]]) -> Float[Array, ""]:
        h, target = pair
        logits = head(outer, h[None, None])[0, 0].astype(jnp.float32)
        return jax.nn.logsumexp(logits) - logits[target]

    batch, time, width = h.shape
    pairs = h[:, :-1].reshape(-1, width), tokens[:, 1:].reshape(-1)
    return jax.lax.map(entropy, pairs, batch_size=_POSITIONS).reshape(batch, time - 1)
