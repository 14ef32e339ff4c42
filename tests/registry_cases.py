"""The problems of `tests/registry.py`, and what makes a `Case` of an algorithm on one of them."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from commjax import compressors, prox
from commjax.algorithms import ef_bv, fedcr, fedp3
from commjax.algorithms.fedcr import layers as fedcr_layers
from commjax.algorithms.fedp3 import aggregation, layers, ldp_fedp3, local_pruning, plans, submodels
from commjax.core import local
from commjax.core.base import Algorithm, Compressor, State
from commjax.data.stacked import Examples
from commjax.problems import quadratic

N, D = 8, 11  # eleven coordinates: no number of clients or devices divides it


class Case(NamedTuple):
    """`ids`, and every leaf of `data` and `per_client`, has one row per client.

    `floating`: how many floating leaves the state has, at least; `silent`: rounds that send nothing are part of the
    method.
    """

    name: str
    algorithm: Algorithm
    hparams: Any
    params: Any
    data: Any
    ids: jax.Array
    per_client: dict[str, Any]
    floating: int = 3
    silent: bool = False

    def init(self) -> State:
        return self.algorithm.init(self.params, self.ids, **self.per_client)


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(self.width)(x))


class Network(nn.Module):
    """Params nested three deep, as real models have them."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(Block(3)(x))


COMPRESSORS: dict[str, Compressor] = {
    "comp": compressors.comp(2, 5),
    "top-k": compressors.top_k(3),
    "m-nice": compressors.m_nice(3),
    "perm-k": compressors.perm_k(),
    "dithering": compressors.dithering(4),
    "rand-k": compressors.rand_k(2),
    "leafwise": compressors.leafwise(lambda d: compressors.top_k(max(1, d // 3))),
    "identity": compressors.identity(),
}
VALUE_AND_GRAD = jax.value_and_grad(quadratic.loss)
PROBLEM = quadratic.random(0, N, D, mu=0.5, L=2.0)
IDS = np.arange(N)


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def start(dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(D), dtype)


@cache
def compressed(compressor: str, weight: float | None) -> Algorithm:
    """Methods that differ in their hparams only are one object, and are compiled once."""
    return ef_bv.ef_bv(VALUE_AND_GRAD, COMPRESSORS[compressor], None if weight is None else prox.l1(weight))


def on_quadratics(
    name: str,
    compressor: str,
    tuned: Callable | None,
    dtype: Any,
    *,
    shifted: bool = False,
    weight: float | None = None,
) -> Case:
    """An EF-BV with its theoretical stepsize; `shifted`: h_i^0 is the client's first gradient."""
    constants = COMPRESSORS[compressor].constants(D, N)
    hparams = (tuned or ef_bv.theoretical)(constants, quadratic.constants(PROBLEM))
    algorithm = compressed(compressor, weight)
    data, params = cast(PROBLEM, dtype), start(dtype)
    per_client = {"shift": jax.vmap(VALUE_AND_GRAD, (None, 0))(params, data)[1]} if shifted else {}
    return Case(name, algorithm, hparams, params, data, jnp.asarray(IDS), per_client)


def on_gradient_descent(name: str, dtype: Any) -> Case:
    hparams = ef_bv.gd_hparams(quadratic.constants(PROBLEM))
    return Case(name, ef_bv.gd(VALUE_AND_GRAD), hparams, start(dtype), cast(PROBLEM, dtype), jnp.asarray(IDS), {})


def tree_loss(params: Any, data: quadratic.Quadratic) -> jax.Array:
    return quadratic.loss(ravel_pytree(params)[0], data)


def on_a_pytree(name: str, dtype: Any) -> Case:
    flat = start(dtype)
    params = {"bias": flat[:3], "layers": [flat[3:5], {"kernel": flat[5:].reshape(2, 3)}]}
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    hparams = ef_bv.theoretical(COMPRESSORS["leafwise"].constants(sizes, N), quadratic.constants(PROBLEM))
    algorithm = ef_bv.ef_bv(jax.value_and_grad(tree_loss), COMPRESSORS["leafwise"])
    return Case(name, algorithm, hparams, params, cast(PROBLEM, dtype), jnp.asarray(IDS), {})


def network_loss(params: Any, data: tuple[jax.Array, jax.Array]) -> jax.Array:
    inputs, targets = data
    return jnp.mean((Network().apply(params, inputs)[:, 0] - targets) ** 2)


def on_a_network(name: str, dtype: Any) -> Case:
    rng = np.random.default_rng(2)
    data = cast((rng.standard_normal((N, 5, 2)), rng.standard_normal((N, 5))), dtype)
    params = cast(Network().init(jax.random.key(3), jnp.ones((1, 2), jnp.float32)), dtype)
    algorithm = ef_bv.ef_bv(jax.value_and_grad(network_loss), COMPRESSORS["comp"])
    return Case(name, algorithm, ef_bv.HParams(0.05, 0.4, 0.7), params, data, jnp.asarray(IDS), {})


def on_local_steps(name: str, algorithm: Algorithm, hparams: Any, dtype: Any, floating: int, **options: Any) -> Case:
    """A method with local steps, its algorithm one object for all dtypes."""
    data = cast(PROBLEM, dtype)
    per_client = {"optimum": data.c} if options.pop("personal", False) else {}
    return Case(name, algorithm, hparams, start(dtype), data, jnp.asarray(IDS), per_client, floating, **options)


L_I, MU_I = np.linalg.eigvalsh(PROBLEM.H)[:, [-1, 0]].T
ALPHA = np.linspace(0.3, 1.0, N)
CLUSTERS = [np.array([0, 3, 5]), np.array([1, 2]), np.array([4, 6, 7])]


def rows_loss(params: jax.Array, data: dict[str, jax.Array]) -> jax.Array:
    """A mean over rows, for methods that look at single ones."""
    return 0.5 * jnp.mean((data["a"] @ params - data["b"]) ** 2)


def on_rows(name: str, algorithm: Algorithm, dtype: Any) -> Case:
    rng = np.random.default_rng(4)
    data = cast({"a": rng.standard_normal((N, 6, D)), "b": 3 * rng.standard_normal((N, 6))}, dtype)
    hparams = ldp_fedp3.HParams(0.1, 5.0, 0.05, 0.7)
    return Case(name, algorithm, hparams, start(dtype), data, jnp.asarray(IDS), {}, 1)


def by_layers(name: str, dtype: Any) -> Case:
    """FedP3, its params in three layers: half of the clients train two of them, masks are drawn from the key."""
    flat = start(dtype)
    params = {"a": {"kernel": flat[:6].reshape(2, 3)}, "b": {"bias": flat[6:8]}, "head": {"kernel": flat[8:]}}
    network = layers.named(params, final="head")
    if name == "fedp3 released":
        plan = plans.plan(network, [["a", "b", "head"], ["b", "head"]] * (N // 2), 0.67)
        algorithm = fedp3.released(tree_loss, plan, local.all_rows, steps=2, pruning=submodels.random())
        return Case(name, algorithm, fedp3.HParams(0.2), params, cast(PROBLEM, dtype), jnp.asarray(IDS), {})
    if name == "fedp3":
        plan = plans.plan(network, [["a", "b", "head"], ["b", "head"]] * (N // 2), 0.67)
        how = {"pruning": submodels.random(), "local_pruning": local_pruning.ordered(0.9, 2), "cohort": 6}
        how["aggregate"] = aggregation.weighted()
    else:
        plan = plans.plan(network, [["a", "b", "head"], ["a", "head"]] * (N // 2))
        held = jax.tree.map(lambda leaf: leaf[0], cast(PROBLEM, dtype))
        attention = aggregation.attention(held, steps=2, stepsize=0.5)
        how = {"aggregate": attention, "others": "masked", "local_head": True, "over": jax.vmap}
    algorithm = fedp3.fedp3(tree_loss, plan, steps=2, **how)
    return Case(name, algorithm, fedp3.HParams(0.2), params, cast(PROBLEM, dtype), jnp.asarray(IDS), {})


CLASSES = fedcr.Network(lambda body, x: fedcr.gaussian(x @ body["a"]["w"]), lambda head, z: z @ head["w"], 2, 1)


def on_classes(name: str, dtype: Any) -> Case:
    """FedCR, its body one layer (of three inputs, to a mean and a deviation) and its head another."""
    rng = np.random.default_rng(6)
    inputs, weights = cast((rng.standard_normal((N, 4, 3)), np.full((N, 4), 0.25)), dtype)
    data = Examples(inputs, jnp.asarray(rng.integers(0, 2, (N, 4)), jnp.int32), weights)
    flat = start(dtype)
    # The head is small, so that the noise, which every dtype draws anew, hardly matters.
    params = {"body": {"a": {"w": flat[:6].reshape(3, 2) / 2}}, "head": {"w": flat[6:8].reshape(1, 2) / 8}}
    algorithm = fedcr.fedcr(CLASSES, steps=2, cohort=6)
    if name == "fedcr layers":
        network = layers.named(params, final="head", groups={"a": ["body/a/w"], "head": ["head/w"]})
        plan = plans.plan(network, [["a", "head"], ["head"]] * (N // 2), 0.67)
        algorithm = fedcr_layers.fedcr_layers(CLASSES, plan, steps=2, pruning=submodels.random())
    return Case(name, algorithm, fedcr.HParams(0.1, 0.05), params, data, jnp.asarray(IDS), {})
