"""What identifies a program or a function: everything it computes with, wherever that is hidden."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import commjax as cj
from commjax.algorithms import ef_bv
from commjax.compressors import comp, top_k
from commjax.core import code, identity
from commjax.core.files import CheckpointError
from commjax.models import fast_on_cpu


def _custom_vjp(model):
    """Only the rule of the gradient knows the model."""
    function = jax.custom_vjp(lambda x: jnp.sum(x))
    function.defvjp(lambda x: (jnp.sum(x), x), lambda x, g: (g * jax.grad(model)(x),))
    return jax.grad(function)


def _custom_vmap(model):
    function = jax.custom_batching.custom_vmap(lambda x: jnp.sum(x))
    function.def_vmap(lambda size, batched, x: (jax.vmap(model)(x), True))
    return lambda x: jax.vmap(function)(x[None])


def _shard_map(model):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda x: model(x)[None], mesh=mesh, in_specs=P("a"), out_specs=P("a"))


NESTED = {
    "jit": lambda model: model,
    "jit in jit": lambda model: jax.jit(lambda x: model(x) + model(2 * x)),
    "cond": lambda model: lambda x: jax.lax.cond(x[0] > 0, model, jnp.sum, x),
    "scan": lambda model: lambda x: jax.lax.scan(lambda c, _: (c, model(c)), x, length=2),
    "while": lambda model: lambda x: jax.lax.while_loop(lambda c: model(c) > 9, lambda c: c / 2, x),
    "custom_vjp": _custom_vjp,
    "custom_vmap": _custom_vmap,
    "remat": lambda model: jax.grad(jax.checkpoint(model)),
    "shard_map": _shard_map,
    "callback": lambda model: lambda x: jax.pure_callback(model, jax.ShapeDtypeStruct((), x.dtype), x),
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("size", [3, 3000])
def test_a_constant_of_a_nested_program_is_part_of_the_program(nest, size):
    def program(*target):
        target = jnp.concatenate([jnp.zeros(size - 1), jnp.asarray(target)])
        model = jax.jit(lambda x: jnp.sum((x - target) ** 2))
        return identity.digest(code.of_program(jax.jit(nest(model)).trace(jnp.ones(size)).jaxpr))

    assert program(1.0) == program(1.0) != program(-5.0)


def test_a_checkpoint_of_a_run_with_another_captured_constant_is_refused(tmp_path):
    def train(target, rounds):
        model = jax.jit(lambda p: jnp.sum((p - target) ** 2))
        value_and_grad = jax.value_and_grad(lambda p, data: model(p) + 0 * jnp.sum(data))
        algorithm = ef_bv.ef_bv(value_and_grad, top_k(1))
        start = algorithm.init(jnp.zeros(3), jnp.arange(2))
        arguments = algorithm, ef_bv.HParams(0.1, 1.0, 1.0), start, jnp.zeros((2, 1)), rounds
        return cj.loop(jax.random.key(0), *arguments, checkpoint=tmp_path / "run", progress=False)

    train(jnp.array([1.0, 2.0, 3.0]), 3)
    train(jnp.array([1.0, 2.0, 3.0]), 4)
    with pytest.raises(CheckpointError, match="belongs to another run: program"):
        train(jnp.array([-5.0, 2.0, 3.0]), 5)


def test_a_digest_of_functions_sees_what_they_close_over():
    def of(value, default=1):
        def inner(x, y=default):
            return inner if value is None else x + y

        return inner

    same = [of(2), of((1, {"b": 2, "a": np.ones(2)})), of(None), partial(of(2), y=3), of(top_k(2)), jax.jit(of(2))]
    again = [of(2), of((1, {"a": np.ones(2), "b": 2})), of(None), partial(of(2), y=3), of(top_k(2)), jax.jit(of(2))]
    digests = [code.of_function(thing) for thing in same]
    assert digests == [code.of_function(thing) for thing in again] and len(set(digests)) == 6
    others = [of(3), of((1, {"b": 2, "a": np.zeros(2)})), of(2, 2), partial(of(2), y=4), of(top_k(3)), jax.jit(of(3))]
    assert not set(digests) & {code.of_function(thing) for thing in others}
    bare = eval("lambda x: x + 1", {})  # no source
    assert code.of_function(bare) == code.of_function(eval("lambda x: x + 1", {}))
    assert code.of_function(bare) != code.of_function(eval("lambda x: x * 2 + x", {}))
    assert code.of_function(bare) != code.of_function(eval("lambda x: x + 2", {}))
    assert code.of_function(top_k(2).compress) != code.of_function(comp(2, 3).compress)


class Loss:
    """A callable object."""

    def __init__(self, target):
        self.target = target

    def __call__(self, x):
        return jnp.sum((x - self.target) ** 2)


class Slotted(Loss):
    __slots__ = ("scale",)


class Other(Loss):
    def __call__(self, x):
        return 2 * super().__call__(x)


def slotted(scale):
    loss = Slotted(jnp.ones(2))
    loss.scale = scale
    return loss


def of_rule(target):
    function = jax.custom_vjp(lambda x: jnp.sum(x))
    function.defvjp(lambda x: (jnp.sum(x), x), lambda x, g: (g * (x - target),))
    return function


def test_a_digest_of_functions_sees_attributes_classes_and_rules():
    def things():
        return [
            Loss(jnp.ones(2)),
            Loss(jnp.zeros(2)),
            Other(jnp.ones(2)),
            slotted(1.0),
            slotted(2.0),
            SimpleNamespace(target=np.ones(2000), power=2),
            SimpleNamespace(target=np.arange(2000.0), power=2),
            SimpleNamespace(target=np.ones(2000), power=3),
            Loss(jnp.ones(2)).__call__,
            jax.jit(Loss(jnp.full(2, 3.0))),
            jax.jit(Loss(jnp.full(2, 4.0))),
            of_rule(jnp.ones(2)),
            of_rule(jnp.zeros(2)),
            {1, 2},
            {1, 3},
        ]

    first, second = ([code.of_function(thing) for thing in things()] for _ in range(2))
    assert first == second and len(set(first)) == len(first)


def test_a_digest_does_not_change_when_a_function_is_used():
    def loss(target):
        return fast_on_cpu(lambda x: jnp.sum(jax.lax.conv_general_dilated(x, target, (1,), "SAME")))

    one, other, used = (loss(jnp.full((1, 1, 3), value)) for value in (1.0, 2.0, 1.0))
    jax.grad(used)(jnp.ones((1, 1, 5)))
    assert code.of_function(used) == code.of_function(one) != code.of_function(other)
