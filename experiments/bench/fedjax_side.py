"""The FedJAX side of `experiments.bench.networks`, for its own environment (see there): a round for each line."""

# FedJAX's type annotations do not match its own arguments.
# pyright: reportCallIssue=false, reportArgumentType=false

import argparse
import sys

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np


def model():
    """Return FedJAX's EMNIST network without its dropout, so that both sides do the same work."""

    def forward(batch):
        layers = [
            hk.Conv2D(32, (3, 3), padding="VALID"),
            jax.nn.relu,
            hk.Conv2D(64, (3, 3), padding="VALID"),
            jax.nn.relu,
            hk.MaxPool((2, 2), (2, 2), padding="VALID"),
            hk.Flatten(),
            hk.Linear(128),
            jax.nn.relu,
            hk.Linear(62),
        ]
        return hk.Sequential(layers)(batch["x"])

    transformed = hk.without_apply_rng(hk.transform(forward))
    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.Transformed(
            transformed.init, lambda params, rng, batch: transformed.apply(params, batch)
        ),
        sample_batch={"x": np.zeros((1, 28, 28, 1), np.float32), "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, preds: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], preds),
    )


def main():
    """Take a round of FedAvg for each line of standard input, and answer with a line."""
    parser = argparse.ArgumentParser()
    for name, default in (("clients", 10), ("steps", 20), ("batch", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    network = model()
    grad_fn = fedjax.model_grad(network)
    fedjax.set_for_each_client_backend("jit")
    hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=args.batch, num_steps=args.steps, num_epochs=None)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        grad_fn, fedjax.optimizers.sgd(0.05), fedjax.optimizers.sgd(1.0), hparams
    )
    rng = np.random.default_rng(0)
    rows = 200
    data = [
        fedjax.ClientDataset(
            {"x": rng.random((rows, 28, 28, 1), np.float32), "y": rng.integers(0, 62, rows).astype(np.int32)}
        )
        for _ in range(args.clients)
    ]
    state = algorithm.init(network.init(jax.random.PRNGKey(0)))
    for number, _ in enumerate(sys.stdin):
        keys = jax.random.split(jax.random.PRNGKey(number), args.clients)
        state, _ = algorithm.apply(state, [(f"{i}".encode(), one, keys[i]) for i, one in enumerate(data)])
        jax.block_until_ready(jax.tree_util.tree_leaves(state.params))
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree_util.tree_leaves(state.params))
        print("done", flush=True)


if __name__ == "__main__":
    main()
