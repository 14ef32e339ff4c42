"""Validation of the arguments of a run: `entry` validates all of them, the other functions one each.

Most functions take the name of an argument, which the error shows, and its value: a number or an array.

A value that JAX traces has no number yet and is skipped: inside `jit`, `vmap` and `shard_map` only types and shapes are
validated.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from commjax.core.base import Algorithm, InitFn, State


def _number(name: str, value: Any) -> np.ndarray | None:
    """The value as an array of float64, or None if it is traced."""
    if isinstance(value, Tracer):
        return None
    try:
        return np.asarray(value).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error


def _refuse_unless(holds: Callable[[np.ndarray], Any], name: str, value: Any, allowed: str) -> None:
    number = _number(name, value)
    if number is not None and not np.all(holds(number)):
        raise ValueError(f"{name}={value}; allowed: {allowed}")


def is_positive(values: Any) -> Any:
    """Whether 0 < value < infinity, elementwise, for NumPy arrays and for JAX arrays that may be traced."""
    return (values > 0) & (values < np.inf)


def is_count(values: Any) -> Any:
    """Whether a value is a whole number of at least 1, elementwise, for NumPy and JAX arrays."""
    return (values >= 1) & (values % 1 == 0)


def positive(name: str, value: Any) -> None:
    """Raise a ValueError unless 0 < value < infinity.

    >>> positive("gamma", -1.0)
    Traceback (most recent call last):
    ValueError: gamma=-1.0; allowed: positive and finite
    """
    _refuse_unless(is_positive, name, value, "positive and finite")


def at_least_zero(name: str, value: Any) -> None:
    """Raise a ValueError unless 0 <= value < infinity."""
    _refuse_unless(lambda x: (x >= 0) & (x < np.inf), name, value, "at least 0 and finite")


def above_zero(name: str, value: Any) -> None:
    """Raise a ValueError unless value > 0; infinity is allowed."""
    _refuse_unless(lambda x: x > 0, name, value, "positive")


def finite(name: str, value: Any) -> None:
    """Raise a ValueError unless the value is finite."""
    _refuse_unless(np.isfinite, name, value, "finite")


def share(name: str, value: Any) -> None:
    """Raise a ValueError unless 0 <= value <= 1."""
    _refuse_unless(lambda x: (x >= 0) & (x <= 1), name, value, "0 to 1")


def probability(name: str, value: Any) -> None:
    """Raise a ValueError unless 0 < value <= 1."""
    _refuse_unless(lambda x: (x > 0) & (x <= 1), name, value, f"0 < {name} <= 1")


def count(name: str, value: Any) -> None:
    """Raise a ValueError unless the value is a whole number of at least 1."""
    _refuse_unless(is_count, name, value, "a whole number of at least 1")


def scalars(hparams: Any) -> None:
    """Raise a ValueError unless every field is one number."""
    for name, value in hparams._asdict().items():
        scalar(name, value)


def scalar(name: str, value: Any) -> None:
    """Raise a ValueError unless the value is one number.

    Args:
        name: name of the argument, for the error.
        value: a number, or an array, which may be traced.
    """
    if np.ndim(value):
        raise ValueError(f"{name} has shape {np.shape(value)}; allowed: one number (for a sweep: runner.sweep)")


def per_client(name: str, value: Any, n: int) -> None:
    """Raise a ValueError unless the value is one number or has one entry for each of n clients."""
    if jnp.ndim(value) and jnp.shape(value) != (n,):
        raise ValueError(f"{name} has shape {jnp.shape(value)}; allowed: one number, or one for each of {n} clients")


def ids_of(ids: Any) -> None:
    """Raise an error unless `ids` are the numbers of all n clients, 0 to n - 1, or of one client; values may be traced.

    >>> ids_of(np.array([0, 1, 3]))
    Traceback (most recent call last):
    ValueError: ids=[0, 1, 3]; allowed: each of 0 to 2 once, such as jnp.arange(3)
    """
    if not (hasattr(ids, "dtype") and jnp.ndim(ids) == 1 and jnp.issubdtype(ids.dtype, jnp.integer)):
        raise TypeError(f"ids must be a vector of client numbers, such as jnp.arange(n), got {_shown(ids)}")
    # A remote client begins with its own number alone.
    if len(ids) != 1 or (not isinstance(ids, Tracer) and int(ids[0]) < 0):
        whole_range("ids", ids, len(ids))


def whole_range(name: str, ids: Any, n: int) -> None:
    """Raise a ValueError unless the first n ids are each of 0 to n - 1 once.  Traced and distributed ids pass."""
    if n < 1 or len(ids) < 1:
        raise ValueError(f"{name}: no clients; allowed: at least one, such as jnp.arange(1)")
    if isinstance(ids, Tracer) or not getattr(ids, "is_fully_addressable", True):
        return
    numbers = np.asarray(ids)[:n]  # the others are padding
    if len(numbers) != n or not np.array_equal(np.sort(numbers), np.arange(n)):
        many = f"{len(numbers)} ids from {numbers.min(initial=0)} to {numbers.max(initial=0)}"
        text = numbers.tolist() if len(numbers) <= 20 else many
        raise ValueError(f"{name}={text}; allowed: each of 0 to {n - 1} once, such as jnp.arange({n})")


def checked_init(init: InitFn) -> InitFn:
    """Let an `init` function validate its ids (`ids_of`).

    Args:
        init: (params, ids, **per_client) -> State.

    Returns:
        The same function with the check before it.
    """

    @wraps(init)
    def checked(params: Any, ids: Any, *rest: Any, **per_client: Any) -> State:
        ids_of(ids)
        return init(params, ids, *rest, **per_client)

    return checked


def _shown(value: Any) -> str:
    """The text of a value in an error: its type with its shape, or with its shortened repr."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} of {value.dtype}{list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _name(kind: type) -> str:
    """The text of a type in an error, such as `ef_bv.HParams(gamma, lam, nu)`."""
    fields = getattr(kind, "_fields", None)
    # A method that is a folder is called by the folder's name: scafflix.HParams, not method.HParams.
    module = kind.__module__.removeprefix("commjax.algorithms.").partition(".method")[0].partition(".communication")[0]
    return f"{module.rpartition('.')[2]}.{kind.__name__}" + (f"({', '.join(fields)})" if fields else "")


def _type(value: Any) -> str:
    kind = type(value)
    return _name(kind) if hasattr(kind, "_fields") else _shown(value)


def typed_key(key: Any) -> bool:
    """Whether this is a key of `jax.random.key`, or an array of them."""
    return hasattr(key, "dtype") and bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))


def key_of(key: Any, swept: bool = False) -> None:
    """Raise a TypeError unless `key` is a typed key, or with `swept` a vector of them."""
    if not typed_key(key) or key.ndim != int(swept):
        allowed = "a row of keys, jax.random.split(key, number)" if swept else "one key, jax.random.key(seed)"
        raise TypeError(f"key must be {allowed}, got {_shown(key)}")


def rounds_of(num_rounds: Any) -> None:
    """Raise a ValueError unless `num_rounds` is an integer of at least 0."""
    if isinstance(num_rounds, bool) or not isinstance(num_rounds, int | np.integer) or num_rounds < 0:
        raise ValueError(f"num_rounds must be an integer of at least 0, got {num_rounds!r}")


def hparams_of(algorithm: Algorithm, hparams: Any, n: int, swept: bool = False) -> None:
    """Raise a TypeError for HParams of another method, and a ValueError for values that the method does not allow.

    Args:
        algorithm: the method.  Nothing is checked if its `spec` is None.
        hparams: hyperparameters of one run, or with `swept` of several runs.
        n: number of clients.
        swept: whether the leaves of `hparams` have a leading axis of settings; every setting is then checked.
    """
    if (spec := algorithm.spec) is None:
        return
    if not isinstance(hparams, spec.hparams):
        raise TypeError(f"hparams must be {_name(spec.hparams)}, got {_type(hparams)}")
    if not swept:
        return spec.check(hparams, n)
    leaves = jax.tree.leaves(hparams)
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    known = hparams if traced else jax.tree.map(np.asarray, hparams)
    for setting in range(1 if traced else len(leaves[0])):
        spec.check(jax.tree.map(lambda leaf, at=setting: leaf[at], known), n)


def server_of(algorithm: Algorithm, server: Any) -> None:
    """Raise a TypeError unless `server` has the type of this algorithm's server state."""
    if (spec := algorithm.spec) is not None and not isinstance(server, spec.server):
        raise TypeError(f"state.server must be {_name(spec.server)}, got {_type(server)}: it is of another method")


def state_of(algorithm: Algorithm, state: Any) -> None:
    """Raise a TypeError unless `state` has the types that this algorithm's `init` returns."""
    if not isinstance(state, State) or not hasattr(state.server, "round") or not hasattr(state.clients, "id"):
        raise TypeError(f"state must be what algorithm.init(params, ids) makes, got {_type(state)}")
    server_of(algorithm, state.server)
    if (spec := algorithm.spec) is not None and not isinstance(state.clients, spec.client):
        raise TypeError(
            f"state.clients must be {_name(spec.client)}, got {_type(state.clients)}: it is of another method"
        )


def entry(
    key: Any, algorithm: Any, hparams: Any, state: Any, num_rounds: Any, *, n: int | None = None, swept: bool = False
) -> None:
    """Validate the arguments of a run, before anything is compiled.

    Args:
        key: a typed key; with `swept` a vector of them.
        algorithm: an `Algorithm`.
        hparams: hyperparameters of the type and with the values that the algorithm accepts.
        state: a state of the types that the algorithm's `init` returns.
        num_rounds: an integer of at least 0.
        n: number of clients; by default the rows of `state.clients`.
        swept: whether the leaves of `hparams` have a leading axis of settings.

    Returns:
        None.  Raises a TypeError or ValueError that names the argument, what was given and what is allowed.
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm must be an Algorithm, such as fedavg.fedavg(...), got {_shown(algorithm)}")
    key_of(key, swept)
    rounds_of(num_rounds)
    state_of(algorithm, state)
    rows = len(state.clients.id)
    n = rows if n is None else n
    if rows and not 1 <= n <= rows:
        raise ValueError(f"n must be between 1 and the {rows} rows, got {n}")
    whole_range("state.clients.id", state.clients.id, n)
    hparams_of(algorithm, hparams, n, swept)


def minibatch_of(size: int, data: PyTree) -> None:
    """Raise a ValueError if the leaves [n, rows, ...] of `data` have fewer than `size` rows; padding counts as rows."""
    rows = min((leaf.shape[1] for leaf in jax.tree.leaves(data) if jnp.ndim(leaf) > 1), default=size)
    if size > rows:
        raise ValueError(f"minibatches: size={size}, but a client has {rows} rows; allowed: 1 to {rows}")


def finite_tree(tree: PyTree) -> bool:
    """Whether every number of every floating-point leaf is finite, as a Python bool."""

    def is_finite(leaf: Array) -> bool:
        inexact = jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)
        return not inexact or bool(np.all(np.isfinite(np.asarray(leaf, np.float64))))

    return all(is_finite(leaf) for leaf in jax.tree.leaves(tree))
