"""`check` passes every compressor of the package in every precision, and refuses one that is broken in any of its
ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import WireFormatError, certify, check, perm_k, rand_k, top_k
from commjax.core.base import Message
from tests.compressors.zoo import ZOO

pytestmark = pytest.mark.slow


def nested(dtype):
    shapes = {"b": {"c": (2,), "s": ()}, "w": (3, 3)}
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=lambda s: isinstance(s, tuple))


# float64: `test_wire.py` and `conformance/test_sent.py`.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_every_compressor_has_its_bits_and_comes_back_bit_for_bit(name, dtype):
    check(ZOO[name], nested(dtype), 3, keys=1)


def altered(**changes):
    """top-2 whose `compress`, `encode` or `decode` is passed through a function"""

    def after(function, change):
        return lambda *args: change(function(*args), *args)

    return top_k(2)._replace(**{name: after(getattr(top_k(2), name), change) for name, change in changes.items()})


def flipped(value, *args):
    value = np.array(value)
    value.view(np.uint32)[7] ^= 1
    return value


BROKEN = {
    "1 bit": (
        altered(compress=lambda message, *_: Message(message.value, jnp.float32(1))),
        r"top-2: bits: compress counts 1, encode gave 9 bytes = 72 bits \(key 0, client 0 of 2, Gaussian\)",
    ),
    "a byte too many": (altered(encode=lambda data, *_: data + b"!"), "bits: compress counts 72, encode gave 10 bytes"),
    "the last bit": (
        altered(decode=flipped),
        r"value: decode\(encode\(x\)\) has .* at position 7 of leaf 0, compress\(x\) has .*; 1 of 20 entries differ",
    ),
    "a zero without its sign": (
        altered(decode=lambda value, *_: value + np.float32(0)),
        r"has np.float32\(0.0\) at .* has np.float32\(-0.0\); .* zeros\)",
    ),
    "another dtype of decode": (
        altered(decode=lambda value, *_: value.astype(np.float64)),
        "dtype: decode gave float64 for leaf 0, the input has float32",
    ),
    "another dtype of compress": (
        altered(compress=lambda message, *_: Message(message.value.astype(jnp.float16), message.bits)),
        "dtype: compress gave float16 for leaf 0",
    ),
    "another shape": (
        altered(decode=lambda value, *_: value[None]),
        r"shape: decode gave \(1, 20\) for leaf 0, the input has \(20,\)",
    ),
    "another structure": (
        altered(compress=lambda message, *_: Message([message.value], message.bits)),
        r"structure: compress gave PyTreeDef\(\[\*\]\), the input has PyTreeDef\(\*\)",
    ),
    "only the first client": (
        rand_k(2)._replace(decode=lambda key, data, like, id=0, n=1: rand_k(2).decode(key, data, like, 0, n)),
        "client 1 of 2",
    ),
    "only two clients": (
        perm_k()._replace(decode=lambda key, data, like, id=0, n=1: perm_k().decode(key, data, like, id, 2)),
        "of 3|values of float32",
    ),
    "only the first key": (
        rand_k(20)._replace(
            encode=lambda key, x, id=0, n=1: (
                rand_k(20).encode(key, x, id, n)
                if bool(
                    jnp.all(jax.random.key_data(key) == jax.random.key_data(jax.random.fold_in(jax.random.key(0), 0)))
                )
                else b""
            )
        ),
        "encode gave 0 bytes = 0 bits .key 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_and_both_values_are_shown(name):
    compressor, text = BROKEN[name]
    with pytest.raises(ValueError, match=text) as error:
        check(compressor, jnp.zeros(20, jnp.float32))
    assert name == "only two clients" or isinstance(error.value, WireFormatError)


def test_certify_looks_at_the_wire():
    honest = top_k(1)
    one_bit = honest._replace(compress=lambda *args: honest.compress(*args)._replace(bits=jnp.ones(())))
    with pytest.raises(WireFormatError, match="top-1: bits: compress counts 1, encode gave 9 bytes"):
        certify(one_bit, d=4, trials=1)
    wrong = honest._replace(decode=lambda *args: -honest.decode(*args))
    with pytest.raises(WireFormatError, match="top-1: value"):
        certify(wrong, d=9, trials=1, samples=20)
