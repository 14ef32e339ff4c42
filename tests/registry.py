"""Every algorithm once, with tiny inputs: what `tests/conformance` runs its properties over.

A new method adds one entry to `BUILDERS`: a function of the dtype that returns its `Case`.  A public factory of `commjax.algorithms` that
this file does not call fails `tests/conformance/test_entry.py`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from commjax import compressors, prox
from commjax.algorithms import (
    averaged_prox,
    ditto,
    ef_bv,
    fedavg,
    fedcr,
    fedp3,
    fedprox,
    flix,
    local_gd,
    scafflix,
    scaffold,
    sppm_as,
)
from commjax.algorithms.fedcr import layers as fedcr_layers
from commjax.algorithms.fedp3 import aggregation, layers, ldp_fedp3, plans, sketched, submodels
from commjax.core import local
from commjax.core.base import Algorithm, Compressor, State
from commjax.data.stacked import Examples
from commjax.problems import quadratic
from commjax.prox import cohort, solvers
from commjax.sampling import samplings

N, D = 8, 11  # eleven coordinates: no number of clients or devices divides it


class Case(NamedTuple):
    """`ids`, and every leaf of `data` and `per_client`, has one row per client.

    `floating`: how many floating leaves the state has, at least; `silent`: rounds that send nothing are part of the method.
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


def on_local_steps(name: str, algorithm: Algorithm, hparams: Any, dtype: Any, floating: int, **how: Any) -> Case:
    """A method with local steps, its algorithm one object for all dtypes."""
    data = cast(PROBLEM, dtype)
    per_client = {"optimum": data.c} if how.pop("personal", False) else {}
    return Case(name, algorithm, hparams, start(dtype), data, jnp.asarray(IDS), per_client, floating, **how)


L_I, MU_I = np.linalg.eigvalsh(PROBLEM.H)[:, [-1, 0]].T
ALPHA = np.linspace(0.3, 1.0, N)
CLUSTERS = [np.array([0, 3, 5]), np.array([1, 2]), np.array([4, 6, 7])]
LOCAL: dict[str, tuple[Algorithm, Any, int, dict[str, Any]]] = {
    "scafflix": (
        scafflix.scafflix(VALUE_AND_GRAD),
        scafflix.theoretical(L_I, MU_I, ALPHA),
        3,
        {"personal": True},
    ),
    "scafflix cohort": (
        scafflix.scafflix(VALUE_AND_GRAD, cohort=6),
        scafflix.theoretical(L_I, MU_I, ALPHA),
        3,
        {"personal": True},
    ),
    # With the key of the conformance suite the coins of p = 0.6 are 1, 0, 1.
    "scafflix iterations": (
        scafflix.iterations(VALUE_AND_GRAD),
        scafflix.theoretical(L_I, MU_I, ALPHA, p=0.6),
        4,
        {"personal": True, "silent": True},
    ),
    "i-scaffnew": (scafflix.i_scaffnew(VALUE_AND_GRAD), scafflix.theoretical(L_I, MU_I), 2, {}),
    "flix": (flix.flix(VALUE_AND_GRAD), flix.theoretical(L_I, ALPHA), 2, {"personal": True}),
    "fedavg": (fedavg.fedavg(VALUE_AND_GRAD, steps=3), fedavg.HParams(0.2), 1, {}),
    "fedavg cohort": (fedavg.fedavg(VALUE_AND_GRAD, steps=3, cohort=6), fedavg.HParams(0.2), 1, {}),
    "fedprox": (fedprox.fedprox(VALUE_AND_GRAD, steps=3), fedprox.HParams(0.2, 0.3), 1, {}),
    "scaffold": (scaffold.scaffold(VALUE_AND_GRAD, steps=3), scaffold.HParams(0.2), 3, {}),
    "sppm-as": (
        sppm_as.sppm_as(quadratic.loss, samplings.stratified(CLUSTERS), lambda hparams: solvers.gradient_descent(2.5)),
        sppm_as.HParams(2.0, 3),
        1,
        {},
    ),
    "sppm-as hubs": (
        sppm_as.sppm_as(
            quadratic.loss,
            samplings.nice(N, 5),
            lambda hparams: solvers.gradient_descent(2.5),
            cohort.Hubs.make([0, 1, 1, 0, 2, 2, 0, 1]),
        ),
        sppm_as.HParams(2.0, 2),
        1,
        {},
    ),
    "fedprox-sppm-as": (
        averaged_prox.fedprox_sppm_as(
            quadratic.loss, samplings.stratified(CLUSTERS), lambda hparams: solvers.gradient_descent(3.0)
        ),
        averaged_prox.HParams(1.0, 2, 0.0, most=2),
        1,
        {},
    ),
    "fedavg-sppm-as": (
        averaged_prox.fedavg_sppm_as(
            quadratic.loss, samplings.stratified(CLUSTERS), lambda hparams: solvers.gradient_descent(4.0)
        ),
        averaged_prox.HParams(1.0, 2, 0.0, most=2),
        1,
        {},
    ),
    "mb-local-gd": (
        local_gd.mb_local_gd(VALUE_AND_GRAD, samplings.block(CLUSTERS)),
        local_gd.HParams(0.2, 3),
        1,
        {},
    ),
    "ditto": (ditto.ditto(VALUE_AND_GRAD, steps=3), ditto.HParams(0.2, 0.1, 0.3), 2, {}),
    "sketched": (sketched.sketched(VALUE_AND_GRAD), sketched.HParams(0.2), 1, {}),
    "sketched pruned": (
        sketched.sketched(VALUE_AND_GRAD, sketched.uniform(0.9), compressors.identity(), steps=2),
        sketched.HParams(0.2),
        1,
        {},
    ),
}


def rows_loss(params: jax.Array, data: dict[str, jax.Array]) -> jax.Array:
    """A mean over rows, for methods that look at single ones."""
    return 0.5 * jnp.mean((data["a"] @ params - data["b"]) ** 2)


PRIVATE: dict[str, Algorithm] = {
    "ldp-fedp3": ldp_fedp3.ldp_fedp3(rows_loss),
    "ldp-fedp3 sent": ldp_fedp3.ldp_fedp3(rows_loss, clipped="sent", capacity=4),
}


def on_rows(name: str, dtype: Any) -> Case:
    rng = np.random.default_rng(4)
    data = cast({"a": rng.standard_normal((N, 6, D)), "b": 3 * rng.standard_normal((N, 6))}, dtype)
    hparams = ldp_fedp3.HParams(0.1, 5.0, 0.05, 0.7)
    return Case(name, PRIVATE[name], hparams, start(dtype), data, jnp.asarray(IDS), {}, 1)


def by_layers(name: str, dtype: Any) -> Case:
    """FedP3, its params in three layers: half of the clients train two of them, masks are drawn from the key."""
    flat = start(dtype)
    params = {"a": {"kernel": flat[:6].reshape(2, 3)}, "b": {"bias": flat[6:8]}, "head": {"kernel": flat[8:]}}
    found = layers.named(params, final="head")
    if name == "fedp3 released":
        plan = plans.plan(found, [["a", "b", "head"], ["b", "head"]] * (N // 2), 0.67)
        algorithm = fedp3.released(tree_loss, plan, local.all_rows, steps=2, pruning=submodels.random())
        return Case(name, algorithm, fedp3.HParams(0.2), params, cast(PROBLEM, dtype), jnp.asarray(IDS), {})
    if name == "fedp3":
        plan = plans.plan(found, [["a", "b", "head"], ["b", "head"]] * (N // 2), 0.67)
        how = {"pruning": submodels.random(), "local_pruning": submodels.ordered(0.9, 2), "cohort": 6}
    else:
        plan = plans.plan(found, [["a", "b", "head"], ["a", "head"]] * (N // 2))
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
        found = layers.named(params, final="head", groups={"a": ["body/a/w"], "head": ["head/w"]})
        plan = plans.plan(found, [["a", "head"], ["head"]] * (N // 2), 0.67)
        algorithm = fedcr_layers.fedcr_layers(CLASSES, plan, steps=2, pruning=submodels.random())
    return Case(name, algorithm, fedcr.HParams(0.1, 0.05), params, data, jnp.asarray(IDS), {})


BUILDERS: dict[str, Callable[[str, Any], Case]] = {
    "ef-bv comp": lambda name, dtype: on_quadratics(name, "comp", None, dtype),
    "ef-bv top-k": lambda name, dtype: on_quadratics(name, "top-k", None, dtype),
    "ef-bv m-nice": lambda name, dtype: on_quadratics(name, "m-nice", None, dtype),
    "ef-bv perm-k": lambda name, dtype: on_quadratics(name, "perm-k", None, dtype),
    "ef-bv dithering": lambda name, dtype: on_quadratics(name, "dithering", None, dtype),
    "ef-bv l1": lambda name, dtype: on_quadratics(
        name, "comp", partial(ef_bv.theoretical, regime="kl"), dtype, weight=0.1
    ),
    "ef-bv leafwise": on_a_pytree,
    "ef-bv network": on_a_network,
    "ef21": lambda name, dtype: on_quadratics(name, "top-k", ef_bv.ef21_hparams, dtype, shifted=True),
    "diana": lambda name, dtype: on_quadratics(name, "rand-k", ef_bv.diana_hparams, dtype),
    "compressed gd": lambda name, dtype: on_quadratics(name, "rand-k", ef_bv.compressed_gd_hparams, dtype),
    "gd": on_gradient_descent,
    "fedp3": by_layers,
    "fedp3 attention": by_layers,
    "fedp3 released": by_layers,
    "fedcr": on_classes,
    "fedcr layers": on_classes,
    **dict.fromkeys(PRIVATE, on_rows),
    **{
        name: lambda name, dtype: on_local_steps(name, *LOCAL[name][:2], dtype, LOCAL[name][2], **LOCAL[name][3])
        for name in LOCAL
    },
}
NAMES = list(BUILDERS)
# These have the code of another entry, with another compressor, regularizer or hparams.
_LIKE_ANOTHER = {"ef-bv top-k", "ef-bv dithering", "ef-bv l1", "ef-bv leafwise", "diana", "compressed gd"}
DISTINCT = [name for name in NAMES if name not in _LIKE_ANOTHER]
# A method of each kind, for what is dear to test and hardly depends on the method.
KINDS = [
    "ef-bv comp",
    "ef-bv m-nice",
    "ef-bv network",
    "scafflix",
    "scafflix cohort",
    "fedavg cohort",
    "scaffold",
    "sppm-as",
    "fedp3",
    "fedp3 attention",
    "ldp-fedp3",
    "sketched",
]


@cache
def build(name: str, dtype: Any = jnp.float64) -> Case:
    """One object per (name, dtype), so that what one test compiled serves the next."""
    return BUILDERS[name](name, dtype)
