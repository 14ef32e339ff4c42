"""Entries of a `config.json`: numbers within limits, switches and choices."""

from typing import Any

# The largest sizes that are accepted: 8 to 100 times those of a Llama with 405 billion parameters.
MOST = {
    "vocab_size": 2**22,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "ffn_dim": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**14,
    "max_position_embeddings": 2**27,
    "original_max_position_embeddings": 2**27,
    "word_embed_proj_dim": 2**17,
}
_LARGEST = 1e30  # limit of rope_theta and similar numbers, which are computed in float32


def _entry(content: dict[str, Any], name: str, default: Any) -> Any:
    """The value of an entry, or the default if it is absent or null."""
    return default if content.get(name) is None else content[name]


def whole(content: dict[str, Any], name: str, default: int | None) -> Any:
    """Read a whole number from 1 to `MOST`, and raise a ValueError for anything else.

    Args:
        content: The parsed `config.json`.
        name: Name of the entry.
        default: Value of an entry that is absent or null.

    Returns:
        The value.
    """
    value = _entry(content, name, default)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name}={value!r}; allowed: a whole number of at least 1")
    if value is not None and value > MOST[name]:
        raise ValueError(f"{name}={_shown(value)}; allowed: 1 to {MOST[name]}")
    return value


def _shown(value: int) -> str:
    """A readable form of a number. Python refuses to print very long integers."""
    return str(value) if abs(value) < 10**30 else f"a number of {value.bit_length()} bits"


def positive(content: dict[str, Any], name: str, default: float | None) -> float:
    """Read a positive number, and raise a ValueError for anything else.

    Args:
        content: The parsed `config.json`.
        name: Name of the entry.
        default: Value of an entry that is absent or null.

    Returns:
        The value.
    """
    value = _entry(content, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; allowed: a positive number")
    if not 0 < value <= _LARGEST:
        shown = _shown(value) if isinstance(value, int) else repr(value)
        raise ValueError(f"{name}={shown}; allowed: a positive number, {_LARGEST:g} at most")
    return float(value)


def switch(content: dict[str, Any], name: str, default: bool) -> bool:
    """Read true or false, and raise a ValueError for anything else.

    Args:
        content: The parsed `config.json`.
        name: Name of the entry.
        default: Value of an entry that is absent or null.

    Returns:
        The value.
    """
    value = _entry(content, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; allowed: true or false")
    return value


def one_of(content: dict[str, Any], name: str, default: str, allowed: tuple[str, ...]) -> Any:
    """Read one of the allowed values, and raise a ValueError for anything else.

    Args:
        content: The parsed `config.json`.
        name: Name of the entry.
        default: Value of an entry that is absent or null.
        allowed: The values.

    Returns:
        The value.
    """
    value = _entry(content, name, default)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; allowed: {', '.join(map(repr, allowed))}")
    return value
