"""Give primitives of JAX another program on CPUs, in all programs of a function."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, xla
from jaxtyping import Array

# (operands, **params of the equation) -> result
Program = Callable[..., Array]
Function = TypeVar("Function", bound=Callable[..., Any])


def replacing(programs: Mapping[Primitive, Program | None]) -> Callable[[Function], Function]:
    """Make a transformation of functions that computes some primitives by other programs on CPUs.

    A primitive is replaced by one with the same parameters, types and rules (derivatives, vmap), in the function and in
    the programs inside it (jit, scan, cond, ...).  In the rules, too, the primitives are replaced.

    Args:
        programs: For each primitive with one result, its program on CPUs; None: only its rules change.

    Returns:
        The transformation.
    """
    twins = {primitive: Primitive(f"fast_{primitive.name}") for primitive in programs}
    # The programs that were seen, so that a function that is called again finds its parts compiled.
    known: weakref.WeakKeyDictionary[ClosedJaxpr, ClosedJaxpr] = weakref.WeakKeyDictionary()

    def closed(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        if jaxpr not in known:
            new = opened(jaxpr.jaxpr)
            known[jaxpr] = jaxpr if new is jaxpr.jaxpr else jaxpr.replace(jaxpr=new)
        return known[jaxpr]

    def opened(jaxpr: Jaxpr) -> Jaxpr:
        equations = []
        for equation in jaxpr.eqns:
            params = {name: inside(value) for name, value in equation.params.items()}
            primitive = twins.get(equation.primitive, equation.primitive)
            same = primitive is equation.primitive and _same(params.values(), equation.params.values())
            equations.append(equation if same else equation.replace(primitive=primitive, params=params))
        return jaxpr if _same(equations, jaxpr.eqns) else jaxpr.replace(eqns=equations)

    def inside(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return closed(value)
        if isinstance(value, Jaxpr):
            return opened(value)
        if type(value) in (tuple, list):
            parts = type(value)(map(inside, value))
            return value if _same(parts, value) else parts
        return value

    def replaced(function: Function) -> Function:
        @wraps(function)
        def new(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = jax.tree.flatten((args, kwargs))
            places = [number for number, leaf in enumerate(leaves) if _is_array(leaf)]

            def of_arrays(*arrays: Any) -> Any:
                given = dict(zip(places, arrays))
                args, kwargs = structure.unflatten([given.get(number, leaf) for number, leaf in enumerate(leaves)])
                return function(*args, **kwargs)

            arrays = [leaves[number] for number in places]
            jaxpr, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
            return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed(jaxpr))(*arrays))

        return cast(Function, new)

    for primitive, program in programs.items():
        _define(twins[primitive], primitive, program, replaced)
    return replaced


def _define(twin: Primitive, primitive: Primitive, program: Program | None, replaced: Any) -> None:
    """Make `twin` a primitive like another one; its rules are those of the other, with twins in them."""

    def original(*operands: Array, **params: Any) -> Array:
        return primitive.bind(*operands, **params)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        none = None  # of integers there are no tangents

        def rule(primals: Any, tangents: Any) -> Any:
            nonlocal none
            value, tangent = ad.primitive_jvps[primitive](primals, tangents, **params)
            none = tangent if type(tangent) is ad.Zero else None
            return value, None if none is not None else tangent

        value, tangent = replaced(rule)(primals, tangents)
        return value, tangent if none is None else none

    def transposed(cotangent: Any, *operands: Any, **params: Any) -> Any:
        def rule(cotangent: Any, *operands: Any) -> Any:
            results = ad.get_primitive_transpose(primitive)(cotangent, *operands, **params)
            return [None if result is None else ad.instantiate_zeros(result) for result in results]

        return replaced(rule)(cotangent, *operands)

    def batched(axis: Any, operands: Any, axes: Any, **params: Any) -> Any:
        result = None

        def rule(*operands: Array) -> Array:
            nonlocal result
            if primitive in batching.fancy_primitive_batchers:
                out, result = batching.fancy_primitive_batchers[primitive](axis, operands, axes, **params)
            else:
                rules: Any = batching.primitive_batchers
                out, result = rules[primitive](operands, axes, **params)
            return out

        return replaced(rule)(*operands), result

    twin.def_impl(partial(xla.apply_primitive, twin))
    twin.def_abstract_eval(lambda *types, **params: primitive.abstract_eval(*types, **params)[0])
    ad.primitive_jvps[twin] = jvp
    ad.primitive_transposes[twin] = transposed
    batching.fancy_primitive_batchers[twin] = batched
    mlir.register_lowering(twin, mlir.lower_fun(original, multiple_results=False))
    if program is not None:
        mlir.register_lowering(twin, mlir.lower_fun(program, multiple_results=False), platform="cpu")


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is traced.  Other leaves, such as a number or a flag, keep their value."""
    return isinstance(leaf, jax.Array | np.ndarray | np.number | np.bool_)
