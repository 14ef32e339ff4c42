"""Train the small Llama that comes with the package (`commjax.llm.embedded`), and write its folder.

    python -m experiments.symwanda.embedded_llm --out topics        500 steps, 9 CPU minutes

Expected: 1.27 nats per character on held-out topics. The text is the help topics of the running Python
(`pydoc_data.topics`), with characters as tokens. The optimizer is AdamW with a cosine schedule.
"""

import json
import platform
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from commjax import llm
from commjax.core.progress import progress_bar
from commjax.llm import embedded, export, perplexity, tokens
from commjax.llm.config import Config


@dataclass(frozen=True)
class Settings:
    out: Path = Path("topics")  # folder to write; it must not exist
    steps: int = 500  # steps of AdamW
    batch: int = 16  # windows per step
    window: int = 256  # characters per window
    rate: float = 3e-3  # peak learning rate
    weight_decay: float = 0.1  # weight decay of matrices
    seed: int = 0  # seed of weights and windows
    progress: bool = True  # show a bar


CONFIG = Config(
    "llama",
    vocab_size=128,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def loss(model, params, batch):
    """Return the mean next-token cross-entropy of ids [batch, length + 1]."""
    logits = llm.forward(model, params, batch[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))


def held_out(model, params, ids, window: int) -> float:
    """Return the loss on held-out ids in nats per token."""
    found = perplexity.losses(model, params.outer, params.blocks, tokens.evaluation_windows(list(ids), window))
    return perplexity.nats_per_token(found)


def main(settings: Settings) -> None:
    """Train the model and write its folder."""
    export.refuse_existing(settings.out)
    model, corpus = llm.model(CONFIG), embedded.corpus()
    params = llm.init(jax.random.key(settings.seed), model)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.rate, 50, settings.steps, 0.05 * settings.rate)
    decayed = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=settings.weight_decay, mask=decayed)
    )
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = jax.value_and_grad(partial(loss, model))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng, began, seen = np.random.default_rng(settings.seed), time.time(), []
    with progress_bar("steps", settings.steps, 0, enabled=settings.progress) as advance:
        for number in range(settings.steps):
            starts = rng.integers(0, len(corpus.train) - settings.window - 1, settings.batch)
            batch = jnp.asarray(np.stack([corpus.train[s : s + settings.window + 1] for s in starts]))
            params, state, value = step(params, state, batch)
            seen.append(float(value))
            advance(number + 1, {"loss": seen[-1]})
            if (number + 1) % 100 == 0 and not settings.progress:
                print(
                    f"step {number + 1}: training {np.mean(seen[-100:]):.4f}, {time.time() - began:.0f} s", flush=True
                )
    params = jax.tree.map(np.asarray, params)
    final = held_out(model, params, corpus.held_out, settings.window)
    print(
        f"{size} parameters; training {np.mean(seen[-100:]):.4f}, held out {final:.4f} nats a character, "
        f"windows of {settings.window}"
    )
    llm.save(settings.out, model, params)
    about = {
        "parameters": size,
        "steps": settings.steps,
        "batch": settings.batch,
        "window": settings.window,
        "seed": settings.seed,
        "training_nats": float(np.mean(seen[-100:])),
        "held_out_nats": final,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "text": "pydoc_data.topics",
        "training_characters": len(corpus.train),
        "held_out_characters": len(corpus.held_out),
    }
    (settings.out / "training.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
