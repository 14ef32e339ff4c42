"""Bad input is refused with the name of the argument, what was given and what is allowed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import comp, dithering, leafwise, m_nice, mix, rand_k, scaled, ternary, top_k, wire
from commjax.core import conventions

KEY, X = jax.random.key(0), jnp.ones(4)


def unchecked(function):
    """Without the hook that checks types under pytest, for users have none"""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize(
    "build,name", [(top_k, "top_k"), (rand_k, "rand_k"), (m_nice, "m_nice"), (dithering, "dithering")]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, "2"])
def test_counts_are_integers_of_at_least_one(build, name, value):
    argument = {"m_nice": "m", "dithering": "levels"}.get(name, "k")
    with pytest.raises(ValueError) as error:
        unchecked(build)(value)
    assert str(error.value) == f"{name}: {argument} must be an integer of at least 1, got {value!r}"


@pytest.mark.parametrize("build,name", [(comp, "comp"), (mix, "mix")])
def test_both_counts_of_a_mixture_are_checked(build, name):
    with pytest.raises(ValueError, match=f"^{name}: k must be an integer of at least 1, got 0$"):
        build(0, 2)
    with pytest.raises(ValueError, match=f"^{name}: k' must be an integer of at least 1, got 2.5$"):
        unchecked(build)(1, 2.5)


def test_comp_needs_at_least_k_to_choose_from():
    with pytest.raises(ValueError, match=r"^comp: k' must be at least k = 3, got 2$"):
        comp(3, 2)
    assert comp(3, 3).constants(4).omega == 0


@pytest.mark.parametrize(
    "name,argument,build", [("top_k", "k", top_k), ("rand_k", "k", rand_k), ("comp", "k'", lambda k: comp(1, k))]
)
def test_k_above_the_dimension_is_refused_while_tracing(name, argument, build):
    message = rf"^{name}: {argument} must be at most the dimension d = 4, got 5(\n|$)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(build(5).compress, KEY, X)
    with pytest.raises(ValueError, match=message):
        jax.jit(build(5).compress)(KEY, {"a": X[:2], "b": X[2:]})
    with pytest.raises(ValueError, match=message):
        build(5).constants(4)
    with pytest.raises(ValueError, match=message):
        build(5).encode(KEY, X)
    jax.eval_shape(build(4).compress, KEY, X)


def test_mix_needs_room_for_both():
    message = r"^mix: k \+ k' must be at most the dimension d = 4, got 2 \+ 3(\n|$)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mix(2, 3).compress, KEY, X)
    with pytest.raises(ValueError, match=message):
        mix(2, 3).constants(4)
    assert mix(2, 2).constants(4) == (0, 0, 0)  # the identity (E9)


def test_no_more_clients_take_part_than_there_are():
    message = r"^m_nice: m must be at most the number of clients n = 3, got 4(\n|$)"
    for call in (
        lambda: jax.eval_shape(lambda: m_nice(4).compress(KEY, X, 0, 3)),
        lambda: m_nice(4).constants(4, 3),
        lambda: m_nice(4).encode(KEY, X, 0, 3),
        lambda: m_nice(4).decode(KEY, b"", X, 0, 3),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_leaf_too_small_is_refused():
    with pytest.raises(ValueError, match=r"^top_k: k must be at most the dimension d = 1, got 2(\n|$)"):
        jax.eval_shape(leafwise(top_k(2)).compress, KEY, {"a": X, "b": jnp.ones(())})


@pytest.mark.parametrize("factor", [0.0, -0.5, 1.0001, math.nan, math.inf])
def test_a_scaling_is_in_the_unit_interval(factor):
    with pytest.raises(ValueError, match=rf"^scaled: factor must be in \(0, 1\], got {factor}$"):
        scaled(factor, rand_k(1))


@pytest.mark.parametrize("norm", [0.99, 0.0, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("build", [lambda p: dithering(2, p), ternary], ids=["dithering", "ternary"])
def test_a_norm_is_one_at_least(build, norm):
    with pytest.raises(ValueError, match=rf"^dithering: norm must be at least 1 \(or inf\), got {norm}$"):
        build(norm)


def test_a_client_that_does_not_take_part_sends_nothing():
    silent = next(i for i in range(3) if not m_nice(1).encode(KEY, X, i, 3))
    with pytest.raises(ValueError, match=f"^m_nice: client {silent} does not take part in this round, got 2 bytes$"):
        m_nice(1).decode(KEY, b"ab", X, silent, 3)


def test_an_unknown_convention_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^convention must be one of \['32k', .*'d\+32k'\], got '31k'$"):
        conventions.legacy_bits("31k", 10, 1)


def test_fields_of_the_wrong_length_are_refused_with_both_lengths():
    with pytest.raises(ValueError, match=r"^a field of 9 bits has 2 bytes, got 1$"):
        wire.from_bytes(b"a", 9)
    with pytest.raises(ValueError, match=r"^3 values of float32 have 12 bytes, got 11$"):
        wire.decode_values(b"a" * 11, 3, np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"^6 digits of base 3 have 2 bytes, got 3$"):
        wire.decode_digits(b"abc", 6, 3)
    with pytest.raises(ValueError, match=r"^leafwise\(top-1\): a message of 18 bytes was expected, got 19$"):
        leafwise(top_k(1)).decode(KEY, b"\0" * 19, {"a": X, "b": X})
