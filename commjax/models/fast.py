"""Networks that are fast on a CPU."""

from jax import lax
from jax.extend.core.primitives import (
    conv_general_dilated_p,
    reduce_window_max_p,
    select_and_gather_add_p,
    select_and_scatter_add_p,
)

from commjax.core.replacing import Function, replacing
from commjax.models import convolution, pooling

_replaced = replacing(
    {
        conv_general_dilated_p: convolution.program,
        reduce_window_max_p: None,
        select_and_gather_add_p: None,
        select_and_scatter_add_p: pooling.scattered,
    }
)


def fast_on_cpu(function: Function) -> Function:
    """Make the convolutions and maximum poolings of a function fast on a CPU.

    XLA compiles the gradients of convolutions badly on CPUs if they are in a loop, and local training is a loop.  This
    transformation traces the function, as `jax.jit` does, and gives each convolution and each maximum pooling another
    program, also in the functions that it calls and in their derivatives.  Results differ by rounding only.

    Networks of any library (Flax linen and nnx, Haiku, Equinox) gain without a change.  A function without convolutions
    and poolings stays as it is.  On a GPU or TPU the compiled program is that of lax.  The transformation does not see
    the rules of a `jax.custom_vjp`, callbacks to the host, and a program that is compiled already.

    `commjax.models.networks.classification` applies it.  The algorithms do not: they run your loss as it is.

    Args:
        function: A loss, `jax.value_and_grad(loss)`, or any function of arrays.  Arguments that are not arrays, such as
            flags, keep their values.

    Returns:
        The function with the same arguments and results.

    >>> import jax, jax.numpy as jnp
    >>> def loss(kernel, images):
    ...     return jnp.sum(lax.conv_general_dilated(images, kernel, (1, 1), "SAME") ** 2)
    >>> kernel, images = jnp.ones((2, 3, 3, 3)), jnp.ones((1, 3, 5, 5))
    >>> slow, fast = jax.grad(loss)(kernel, images), jax.grad(fast_on_cpu(loss))(kernel, images)
    >>> bool(jnp.allclose(slow, fast))
    True
    """
    return _replaced(function)


conv_general_dilated = fast_on_cpu(lax.conv_general_dilated)
conv_general_dilated.__doc__ = """Compute `jax.lax.conv_general_dilated`, with the same arguments, fast on a CPU.

A layer `flax.linen.Conv` takes it as `conv_general_dilated=`.  See `fast_on_cpu`.
"""
