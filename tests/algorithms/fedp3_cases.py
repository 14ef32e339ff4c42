"""A linear network, four clients and their plan, and FedP3's round in NumPy: what the tests of FedP3 share."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import layers, plans
from commjax.core import rounds

N, ROWS, WIDTHS = 4, 6, (5, 4, 3, 2)
KEY, IDS = jax.random.key(3), jnp.arange(N)
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((N, ROWS, WIDTHS[0])), RNG.standard_normal((N, ROWS, WIDTHS[-1]))
DATA = {"x": jnp.asarray(X), "y": jnp.asarray(Y)}
PARAMS = {
    name: {"bias": jnp.asarray(RNG.standard_normal(b) / 2), "kernel": jnp.asarray(RNG.standard_normal((a, b)) / 2)}
    for name, a, b in zip(("a", "b", "c"), WIDTHS, WIDTHS[1:])
}
LAYERS = layers.named(PARAMS, final="c")
MIXED = plans.plan(LAYERS, [["a", "c"], ["c"], ["b", "c"], ["a", "b", "c"]], np.array([0.5, 0.7, 0.7, 1.0]))
GAMMA = 0.05


def loss(params, rows):
    """A linear network: its gradients are three matrix products."""
    h = rows["x"]
    for name in ("a", "b", "c"):
        h = h @ params[name]["kernel"] + params[name]["bias"][None]
    return jnp.sum((h - rows["y"]) ** 2) / (2 * len(h))


def numpy_gradient(params, x, y):
    inputs = [x]
    for name in ("a", "b", "c"):
        inputs.append(inputs[-1] @ params[name]["kernel"] + params[name]["bias"])
    back, found = (inputs[-1] - y) / len(x), {}
    for name, h in zip(("c", "b", "a"), inputs[-2::-1]):
        found[name] = {"bias": back.sum(axis=0), "kernel": h.T @ back}
        back = back @ params[name]["kernel"].T
    return found


def as_numpy(params):
    return jax.tree.map(lambda leaf: np.array(leaf), params)


def numpy_prune(kernel, ratio):
    k = int(ratio * kernel.size + 1e-9)
    threshold = np.sort(np.abs(kernel).ravel())[kernel.size - k]
    return np.where(np.abs(kernel) >= threshold, kernel, 0.0)


def numpy_client(params, plan, i, steps, train_others=None):
    """`train_others`: None, "masked" or "free"."""
    model = as_numpy(params)
    names = [name for name, yes in zip(LAYERS.names, plan.trained[i]) if yes]
    masks = {}
    for name in set(LAYERS.names) - set(names):
        pruned = numpy_prune(model[name]["kernel"], plan.keep[i])
        masks[name] = pruned != 0
        model[name]["kernel"] = pruned
    for _ in range(steps):
        grad = numpy_gradient(model, X[i], Y[i])
        for name in LAYERS.names:
            if name not in names and train_others is None:
                continue
            mask = masks[name] if name in masks and train_others == "masked" else 1.0
            model[name]["bias"] -= GAMMA * grad[name]["bias"]
            model[name]["kernel"] -= GAMMA * grad[name]["kernel"] * mask
    return model, names


def numpy_round(params, plan, steps, weight=lambda names: 1.0, train_others=None, members: Any = range(N)):
    sent = [numpy_client(params, plan, i, steps, train_others) for i in members]
    out = as_numpy(params)
    for name in LAYERS.names:
        holders = [(weight(names), model[name]) for model, names in sent if name in names]
        total = sum(w for w, _ in holders)
        for part in ("bias", "kernel"):
            if holders:
                out[name][part] = sum(w * layer[part] for w, layer in holders) / total
    return out


def played(plan_name="mixed", steps=2, over: Any = rounds.one_by_one, **how):
    plan = MIXED if plan_name == "mixed" else plans.everything(LAYERS, N)
    algorithm = fedp3.fedp3(loss, plan, steps=steps, over=over, **how)
    return jax.jit(algorithm.step)(KEY, fedp3.HParams(GAMMA), algorithm.init(PARAMS, IDS), DATA)


one_round = cache(played)


def close(found, wanted, rtol=1e-11):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-13)


HELD = {"x": DATA["x"][1], "y": DATA["y"][1]}
