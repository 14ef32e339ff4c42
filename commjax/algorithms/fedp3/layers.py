"""A network's params as named layers, and what each client does with a layer.

`commjax.algorithms.fedp3.plans` makes the plans.

A part of a tree has None for each leaf that is left out.  `jax.tree` functions and gradients skip None.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from commjax.core.base import Params


class Layers(NamedTuple):
    """The layers of a network.

    Attributes:
        names: names of the layers; the final layer is last.
        of: for every leaf of the params, in the order of `jax.tree.leaves`, the number of its layer.
    """

    names: tuple[str, ...]
    of: tuple[int, ...]


def paths_of(params: Params) -> list[str]:
    """The path of every leaf, such as "fc1/kernel"."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]


def _order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts Dense_10 after Dense_9."""
    digits = ""
    parts: list[tuple[int, int, str]] = []
    for letter in name + "\0":
        if letter.isdigit():
            digits += letter
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, letter))
    return parts


def named(params: Params, *, final: str, groups: Mapping[str, Sequence[str]] | None = None) -> Layers:
    """The top-level modules of Flax params as layers, in natural order (Dense_2 before Dense_10).

    Args:
        params: the params.
        final: name of the output layer.
        groups: layers with other names, in order.  Each is a list of paths ("block/conv", "block/norm") and holds the
            leaves at or under them.  Every leaf must be in exactly one layer.

    Returns:
        The layers, with `final` last.

    >>> import jax.numpy as jnp
    >>> params = {"body": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "head": {"kernel": jnp.ones((3, 1))}}
    >>> named(params, final="head")
    Layers(names=('body', 'head'), of=(0, 0, 1))
    """
    paths = paths_of(params)
    if groups is None:
        groups = {name: [name] for name in sorted({path.split("/")[0] for path in paths}, key=_order)}
    check_names(tuple(groups), [final], "final")
    names = (*(name for name in groups if name != final), final)
    under = {path: name for name, given in groups.items() for path in given}
    unused = set(under)

    def layer(leaf: str) -> int:
        prefixes = [leaf[:end] for end, letter in enumerate(leaf + "/") if letter == "/"]
        matches = [prefix for prefix in prefixes if prefix in under]
        if len(matches) != 1:
            raise ValueError(f"groups: {leaf} is in {[under[match] for match in matches]}; allowed: exactly one layer")
        unused.difference_update(matches)
        return names.index(under[matches[0]])

    of = tuple(map(layer, paths))
    if unused:
        raise ValueError(f"groups: no leaf at {sorted(unused)}; allowed: paths of the params, such as {paths[0]!r}")
    return Layers(names, of)


def check_names(known: Sequence[str], given: Iterable[str], argument: str = "layers") -> None:
    """Raise a ValueError for a name that no layer has.

    Args:
        known: names of the layers.
        given: names to check.
        argument: name of the argument, for the error text.
    """
    for name in given:
        if name not in known:
            raise ValueError(f"{argument}: no layer {name!r}; allowed: {', '.join(map(repr, known))}")


def chosen(layers: Layers, given: Iterable[str]) -> np.ndarray:
    """The named layers as a mask over all layers.

    Args:
        layers: all layers.
        given: names of layers.

    Returns:
        A bool for each layer.

    >>> chosen(Layers(("body", "head"), (0, 1)), ["head"]).tolist()
    [False, True]
    """
    names = list(given)
    check_names(layers.names, names)
    return np.array([name in names for name in layers.names])


def by_leaf(layers: Layers, params: PyTree, values: Sequence[Any] | np.ndarray | Array) -> PyTree:
    """A tree that has at every leaf the value of its layer.

    Args:
        layers: the layers.
        params: the params; only their structure is used.
        values: one value per layer.

    Returns:
        A tree like `params`.

    >>> by_leaf(Layers(("body", "head"), (0, 0, 1)), {"a": 0, "b": 0, "c": 0}, [10, 20])
    {'a': 10, 'b': 10, 'c': 20}
    """
    return jax.tree.structure(params).unflatten([values[number] for number in layers.of])


def split(layers: Layers, params: Params, mask: Sequence[bool] | np.ndarray) -> tuple[PyTree, PyTree]:
    """Split params into the layers inside a mask and the others.

    Args:
        layers: the layers.
        params: the params.
        mask: a bool for each layer.

    Returns:
        The layers inside the mask and the layers outside it, each a part of the tree.

    >>> split(Layers(("body", "head"), (0, 1)), {"body": 1.0, "head": 2.0}, [False, True])
    ({'body': None, 'head': 2.0}, {'body': 1.0, 'head': None})
    """
    leaves, structure = jax.tree.flatten(params)
    inside = [leaf if mask[number] else None for leaf, number in zip(leaves, layers.of, strict=True)]
    outside = [None if mask[number] else leaf for leaf, number in zip(leaves, layers.of, strict=True)]
    return structure.unflatten(inside), structure.unflatten(outside)


def head(layers: Layers, params: Params) -> PyTree:
    """The final layer, as a part of the tree.

    >>> head(Layers(("body", "head"), (0, 1)), {"body": 1.0, "head": 2.0})
    {'body': None, 'head': 2.0}
    """
    return split(layers, params, chosen(layers, layers.names[-1:]))[0]


def join(part: PyTree, other: PyTree) -> Params:
    """Put two parts of a tree together; a leaf of `part` takes precedence over one of `other`.

    >>> join({"body": None, "head": 2.0}, {"body": 1.0, "head": None})
    {'body': 1.0, 'head': 2.0}
    """
    return jax.tree.map(lambda a, b: b if a is None else a, part, other, is_leaf=lambda leaf: leaf is None)


def sizes(layers: Layers, params: Params) -> np.ndarray:
    """Number of params of each layer.

    >>> sizes(Layers(("body", "head"), (0, 0, 1)), [np.ones((2, 3)), np.ones(3), np.ones((3, 1))]).tolist()
    [9, 3]
    """
    return _totals(layers, [np.size(leaf) for leaf in jax.tree.leaves(params)])


def bits(layers: Layers, params: Params) -> np.ndarray:
    """Bits of each layer, sent uncompressed."""
    return _totals(layers, [8 * leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(params)])


def _totals(layers: Layers, amounts: Sequence[int]) -> np.ndarray:
    total = np.zeros(len(layers.names), np.int64)
    np.add.at(total, list(layers.of), amounts)
    return total


class Plan(NamedTuple):
    """What the server specifies before the first round.  The functions of `plans` make validated plans.

    Attributes:
        layers: the layers of the network.
        trained: L_i, whether client i trains layer l.
        keep: keep ratio of P_i, for the layers outside L_i.
    """

    layers: Layers
    trained: Bool[np.ndarray, "n l"]
    keep: Float[np.ndarray, "n"]


class Assignment(NamedTuple):
    """What a plan tells each client, as data of the round.

    A compiled program has a branch for each distinct layer set and a mask for each distinct ratio.  The numbers say
    which of them a client uses.

    Attributes:
        trained: L_i, whether the client trains layer l.
        layer_set: number of L_i in `layer_sets`.
        ratio: number of the keep ratio in `ratios`.
        low: number of the smallest ratio of local pruning in `local_pruning.lows`.
    """

    trained: Bool[Array, "*n l"]
    layer_set: Int[Array, "*n"]
    ratio: Int[Array, "*n"]
    low: Int[Array, "*n"]


def layer_sets(plan: Plan) -> Bool[np.ndarray, "s l"]:
    """The distinct layer sets L_i of a plan."""
    return np.unique(plan.trained, axis=0)


def ratios(plan: Plan) -> Float[np.ndarray, "r"]:
    """The distinct keep ratios of a plan, in ascending order."""
    return np.unique(plan.keep)


def assigned(compiled: Plan, plan: Plan, low: Int[np.ndarray, "n"], ids: Int[Array, "m"]) -> Assignment:
    """A plan as data of a program.

    Args:
        compiled: the plan that the program is compiled for.  Its layer sets and keep ratios must include those of
            `plan`.
        plan: the plan of this run.
        low: for each client of `plan`, the number of its smallest ratio of local pruning.
        ids: the clients whose rows are wanted.

    Returns:
        The rows of these clients.
    """
    if plan.layers != compiled.layers:
        raise ValueError(f"plan has the layers {plan.layers}; allowed: those of the method, {compiled.layers}")
    same_set = (plan.trained[:, None] == layer_sets(compiled)[None]).all(axis=-1)
    same_ratio = plan.keep[:, None] == ratios(compiled)[None]
    for client in np.flatnonzero(~same_set.any(axis=1)):
        names = [name for name, yes in zip(plan.layers.names, plan.trained[client], strict=True) if yes]
        raise ValueError(f"plan: client {client} trains {names}; allowed: the layer sets of the method's plan")
    for client in np.flatnonzero(~same_ratio.any(axis=1)):
        raise ValueError(f"plan: client {client} has keep={plan.keep[client]}; allowed: {ratios(compiled).tolist()}")
    numbers = (same_set.argmax(axis=1), same_ratio.argmax(axis=1), low)
    columns = (jnp.asarray(plan.trained), *(jnp.asarray(column, jnp.int32) for column in numbers))
    return Assignment(*(column[ids] for column in columns))


def check_clients(plan: Plan, clients: int) -> None:
    """Raise a ValueError unless the plan is for this number of clients."""
    if clients != len(plan.keep):
        raise ValueError(f"ids: {clients} clients, but the plan is for {len(plan.keep)}")


def kept(size: int, ratio: float) -> int:
    """Number of weights that a keep ratio leaves: floor(ratio * size), at least 1.

    >>> kept(10, 0.7), kept(3, 0.1)
    (7, 1)
    """
    return max(1, int(ratio * size + 1e-9))
