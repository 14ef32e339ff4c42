"""Convolutions and poolings that are fast on a CPU: values and derivatives are lax's, under every transformation."""

import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from commjax.models import fast, networks

pytestmark = pytest.mark.slow

AXES = ("NHWC", "HWIO", "NHWC")
IMAGES = jax.random.normal(jax.random.key(0), (4, 6, 8, 7, 3), jnp.float64)  # of four clients
KERNELS = jax.random.normal(jax.random.key(1), (4, 3, 2, 3, 5), jnp.float64)


def loss(kernel, images, convolve=lax.conv_general_dilated):
    return jnp.sum(jnp.tanh(convolve(images, kernel, (1, 2), "SAME", dimension_numbers=AXES)))


QUICK = fast.fast_on_cpu(loss)


def close(a, b, rtol=1e-11):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * (1 + np.abs(y).max())), a, b)


@st.composite
def convolutions(draw):
    """Shapes and arguments of `conv_general_dilated`, with 1 to 3 spatial axes."""
    axes = range(draw(st.integers(1, 3)))
    small = lambda most, least=1: tuple(draw(st.integers(least, most)) for _ in axes)  # noqa: E731
    groups, letters = draw(st.sampled_from([1, 1, 2, 4])), "DHW"[: len(axes)]
    depthwise = groups > 1 and draw(st.booleans())
    channels, features = (groups, groups) if depthwise else (2 * groups, 3 * groups)
    padding = draw(st.sampled_from(["SAME", "VALID", "explicit"]))
    options = {"window_strides": small(3), "rhs_dilation": small(2), "feature_group_count": groups}
    if padding == "explicit":
        padding = [draw(st.tuples(st.integers(-1, 3), st.integers(-1, 3))) for _ in axes]
        options["lhs_dilation"] = small(3)
    layouts = [("N" + letters + "C", letters + "IO", "N" + letters + "C"), ("C" + letters + "N", "OI" + letters, None)]
    lhs, rhs, out = draw(st.sampled_from(layouts))
    sizes = {"N": draw(st.integers(1, 2)), "C": channels, "I": channels // groups, "O": features}
    shape = [(sizes | dict(zip(letters, small(8, 3))))[letter] for letter in lhs]
    kernel = [(sizes | dict(zip(letters, small(4))))[letter] for letter in rhs]
    options |= {"padding": padding, "dimension_numbers": (lhs, rhs, out or lhs)}
    return shape, kernel, options


@settings(max_examples=40)
@given(convolutions(), st.sampled_from([jnp.float32, jnp.float64]))
def test_values_and_gradients_of_a_convolution_are_those_of_lax(convolution, dtype):
    shape, kernel, options = convolution
    operands = tuple(
        jax.random.normal(jax.random.key(number), size, dtype) for number, size in enumerate((shape, kernel))
    )
    try:
        out = jax.eval_shape(lambda *operands: lax.conv_general_dilated(*operands, **options), *operands)
    except (TypeError, ValueError):
        assume(False)
        return
    cotangent = jax.random.normal(jax.random.key(2), out.shape, dtype)

    def values(convolve):
        value, pull = jax.vjp(lambda *operands: convolve(*operands, **options), *operands)
        return value, pull(cotangent)

    (fast_values, plain), rtol = (
        jax.jit(lambda: (values(fast.conv_general_dilated), values(lax.conv_general_dilated)))(),
        1e-12,
    )
    assert jax.tree.map(lambda leaf: leaf.dtype, fast_values) == jax.tree.map(lambda leaf: leaf.dtype, plain)
    close(fast_values, plain, rtol if dtype == jnp.float64 else 1e-5)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((0, 1), (2, 0))])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("rows", [12, 90])  # at 90, the shifted images do not fit in the cache
def test_large_images_with_many_channels_are_those_of_lax(padding, dilation, rows):
    images = jax.random.normal(jax.random.key(0), (6, rows, 90, 16), jnp.float32)
    kernel = jax.random.normal(jax.random.key(1), (3, 4, 16, 8), jnp.float32)

    def both(convolve):
        def total(images, kernel):
            out = convolve(images, kernel, (1, 1), padding, None, (dilation, dilation), AXES)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), out

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(images, kernel)

    ours, plain = both(fast.conv_general_dilated), both(lax.conv_general_dilated)
    assert ours[0][1].shape == plain[0][1].shape
    close((ours[0][1], ours[1]), (plain[0][1], plain[1]), 1e-5)


PATHS = {
    "jit": lambda f: jax.jit(jax.value_and_grad(f))(KERNELS[0], IMAGES[0]),
    "eager": lambda f: jax.value_and_grad(f, (0, 1))(KERNELS[0], IMAGES[0]),
    "vmap": lambda f: jax.vmap(jax.value_and_grad(f, (0, 1)))(KERNELS, IMAGES),
    "vmap of images": lambda f: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(KERNELS[0], IMAGES),
    "vmap of kernels": lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None))(KERNELS, IMAGES[0]),
    "vmap twice": lambda f: jax.vmap(jax.vmap(jax.grad(f), (None, 0)), (0, None))(KERNELS, IMAGES),
    "scan": lambda f: lax.scan(lambda k, x: (k - 0.1 * jax.grad(f)(k, x), f(k, x)), KERNELS[0], IMAGES),
    "map": lambda f: lax.map(lambda one: jax.value_and_grad(f)(*one), (KERNELS, IMAGES)),
    "remat": lambda f: jax.grad(jax.checkpoint(f))(KERNELS[0], IMAGES[0]),
    "forward": lambda f: jax.jvp(f, (KERNELS[0], IMAGES[0]), (KERNELS[1], IMAGES[1])),
    "curvature": lambda f: jax.jvp(jax.grad(f), (KERNELS[0], IMAGES[0]), (KERNELS[1], 0 * IMAGES[1])),
    "whole": lambda f: jax.jit(jax.grad(lambda k: f(k, IMAGES[0]) ** 2))(KERNELS[0]),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_loss_has_the_same_derivatives_under_every_transformation(path):
    close(PATHS[path](QUICK), PATHS[path](loss))


def on_mesh(value_and_grad, replicated):
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))

    def client(kernel, images):
        kernel = kernel if replicated else lax.pcast(kernel, "clients", to="varying")
        return jax.tree.map(lambda leaf: leaf[None], value_and_grad(kernel, images[0]))

    mapped = jax.shard_map(client, mesh=mesh, in_specs=(P(), P("clients")), out_specs=P("clients"))
    return jax.jit(mapped)(KERNELS[0], IMAGES)


@pytest.mark.parametrize("replicated", [False, True])
def test_devices_compute_the_same(replicated):
    close(on_mesh(jax.value_and_grad(QUICK), replicated), on_mesh(jax.value_and_grad(loss), replicated))
    if not replicated:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = jax.pmap(jax.value_and_grad(QUICK))(KERNELS, IMAGES)
        close(found, jax.vmap(jax.value_and_grad(loss))(KERNELS, IMAGES))


def primitives(function, *args):
    """Names of the primitives in a program, also in the programs inside it."""
    return {word for word in str(jax.make_jaxpr(function)(*args)).replace("[", " ").split() if word.islower()}


ONE, MANY = (KERNELS[0], IMAGES[0]), (KERNELS, IMAGES)
INSIDE = {
    "value_and_grad": (fast.fast_on_cpu(jax.value_and_grad(loss)), ONE),  # gradients that were taken before
    "jit of vmap": (fast.fast_on_cpu(jax.jit(jax.vmap(jax.grad(loss)))), MANY),
    "vmap of grad": (jax.vmap(jax.grad(fast.fast_on_cpu(jax.jit(loss)))), MANY),
    "scan": (fast.fast_on_cpu(partial(lax.scan, lambda k, x: (jax.grad(loss)(k, x), None))), (KERNELS[0], IMAGES)),
    "cond": (fast.fast_on_cpu(lambda k, x: lax.cond(k.sum() > 0, jax.grad(loss), lambda k, x: k, k, x)), ONE),
    "while": (fast.fast_on_cpu(lambda k, x: lax.while_loop(lambda k: loss(k, x) > 9, lambda k: k, k)), ONE),
}


@pytest.mark.parametrize("where", INSIDE)
def test_no_convolution_of_lax_is_left_in_the_program(where):
    function, operands = INSIDE[where]
    found = primitives(function, *operands)
    assert "fast_conv_general_dilated" in found and "conv_general_dilated" not in found


def test_what_has_no_convolution_stays_as_it_is_and_flags_keep_their_values():
    def function(x, double=False, name="x", scale=2):
        return {name: 2 * x if double else x, "scale": jnp.asarray(scale)}

    found = fast.fast_on_cpu(function)(jnp.ones(2), double=True, name="y")
    assert found["y"].tolist() == [2, 2] and found["scale"] == 2
    assert str(jax.make_jaxpr(fast.fast_on_cpu(jnp.tanh))(1.0)) == str(jax.make_jaxpr(jnp.tanh)(1.0))


def test_a_compiled_part_is_compiled_once(caplog):
    traces = []

    def counted(kernel, images):
        traces.append(1)
        return loss(kernel, images)

    function = fast.fast_on_cpu(jax.jit(counted))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = {float(function(*ONE)) for _ in range(3)}
    compiled = [record for record in caplog.records if "compilation of jit(counted)" in record.getMessage()]
    assert len(traces) == len(found) == len(compiled) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_are_added_up_in_thirty_two(dtype):
    for shape, groups in (((2, 30, 30, 4), 1), ((2, 30, 30, 4), 4)):
        images = jnp.full(shape, 1.0, dtype)
        kernel = jnp.full((3, 3, 4 // groups, 4), 0.25, dtype)

        def total(kernel, images=images, groups=groups):
            out = fast.conv_general_dilated(images, kernel, (1, 1), "VALID", None, None, AXES, groups)
            return jnp.sum(out.astype(jnp.float32)), out

        gradient, out = jax.jit(jax.grad(total, has_aux=True))(kernel)
        assert out.dtype == gradient.dtype == dtype
        assert np.all(np.asarray(out, np.float32) == 9 * 4 // groups / 4)
        assert np.all(np.asarray(gradient, np.float32) == np.float32(jnp.asarray(2 * 28 * 28, dtype)))


@settings(max_examples=30)
@given(
    st.tuples(*[st.integers(1, 3)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.sampled_from(["SAME", "VALID"]),
    st.sampled_from([nn.max_pool, lambda *args: -nn.max_pool(-args[0], *args[1:])]),
    st.integers(0, 99),
)
def test_the_gradient_of_pooling_goes_to_the_first_of_equals(window, stride, padding, pool, seed):
    images = jnp.asarray(np.random.default_rng(seed).integers(0, 3, (2, 6, 7, 2)), jnp.float32)

    def weighted(images):
        out = pool(images, window, stride, padding)
        return jnp.sum(out * jnp.arange(1.0, 1 + out.size, dtype=jnp.float32).reshape(out.shape))

    def both(function):
        return jax.value_and_grad(function)(images), jax.jvp(function, (images,), (images[::-1],))[1]

    close(jax.jit(lambda: both(fast.fast_on_cpu(weighted)))(), jax.jit(lambda: both(weighted))(), 1e-6)
    clients = jnp.stack([images, images[:, ::-1]])
    close(jax.vmap(jax.grad(fast.fast_on_cpu(weighted)))(clients), jax.vmap(jax.grad(weighted))(clients), 1e-6)


def test_the_smallest_of_a_window_and_what_is_no_number_are_as_in_lax():
    images = jnp.asarray(np.random.default_rng(0).integers(0, 3, (1, 6, 6, 1)), jnp.float32).at[0, 1, 1, 0].set(jnp.nan)

    def least(images):
        return jnp.sum(lax.reduce_window(images, jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") * 2)

    np.testing.assert_array_equal(jax.grad(fast.fast_on_cpu(least))(images), jax.grad(least)(images))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.max_pool(nn.Conv(4, (3, 3))(x), (2, 2), (2, 2)).reshape(len(x), -1))


def test_networks_of_linen_and_nnx_gain_without_a_change():
    images = jnp.ones((2, 6, 6, 1), jnp.float32)
    problem = networks.classification(Network())
    params = problem.init(jax.random.key(0), images)
    data = networks.Examples(images, jnp.array([0, 2]), jnp.full(2, 0.5, jnp.float32))
    found = primitives(jax.grad(problem.loss), params, data)
    assert {"fast_conv_general_dilated", "fast_select_and_scatter_add"} <= found and "conv_general_dilated" not in found
    # As an argument of the layer
    layer = nn.Conv(4, (3, 3), conv_general_dilated=fast.conv_general_dilated)
    assert "fast_conv_general_dilated" in primitives(layer.init, jax.random.key(0), images)
    graph, state = nnx.split(nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0)))
    plain = lambda state: jnp.sum(nnx.merge(graph, state)(images) ** 2)  # noqa: E731
    assert "conv_general_dilated" not in primitives(jax.grad(fast.fast_on_cpu(plain)), state)
    close(jax.grad(fast.fast_on_cpu(plain))(state), jax.grad(plain)(state), 1e-5)


def test_what_lax_refuses_is_refused():
    with pytest.raises(ValueError, match="feature_group_count must divide lhs feature"):
        fast.conv_general_dilated(IMAGES[0], KERNELS[0], (1, 1), "SAME", None, None, AXES, 2)
    with pytest.raises(TypeError, match="requires arguments to have the same dtypes"):
        fast.conv_general_dilated(IMAGES[0], KERNELS[0].astype(jnp.float32), (1, 1), "SAME", dimension_numbers=AXES)
    whole = fast.conv_general_dilated(jnp.ones((1, 1, 4), int), jnp.ones((1, 1, 2), int), (1,), "VALID")
    assert whole.tolist() == [[[2, 2, 2]]]


def test_on_other_platforms_the_program_is_that_of_lax():
    lowered = [
        jax.jit(jax.grad(function)).trace(KERNELS[0], IMAGES[0]).lower(lowering_platforms=("tpu",)).as_text()
        for function in (QUICK, loss)
    ]
    assert [text.count("stablehlo.convolution") for text in lowered] == [2, 2] and "dot_general" not in lowered[0]
