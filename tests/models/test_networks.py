"""Networks: parameter counts of the papers, the patch form of a convolution, losses against NumPy, sums that add up."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from commjax.core import runner, tree
from commjax.data import embedded, partition, stacked
from commjax.data.stacked import Examples
from commjax.models import networks

pytestmark = pytest.mark.long

IMAGE = jnp.ones((2, 28, 28, 1), jnp.float32)
DIGIT = jnp.ones((2, 8, 8, 1), jnp.float32)
TOKENS = jnp.ones((2, 5), jnp.int32)
TINY_LSTM = networks.ShakespeareLstm(vocabulary=7, embedding=3, widths=(4, 4))

SMALL = {
    "small_cnn": (networks.SmallCnn(), DIGIT),
    "mlp": (networks.Mlp(widths=(6, 5)), DIGIT),
    "thesis_cnn": (networks.ThesisCnn(), jnp.ones((2, 12, 12, 1), jnp.float32)),
    "fedjax_cnn": (networks.FedjaxCnn(), DIGIT),
    "lstm": (TINY_LSTM, TOKENS),
}


def inputs_like(example, rows, seed=0):
    rng = np.random.default_rng(seed)
    shape = (rows, *example.shape[1:])
    if jnp.issubdtype(example.dtype, jnp.integer):
        return jnp.asarray(rng.integers(1, 7, shape), jnp.int32)
    return jnp.asarray(rng.random(shape), example.dtype)


def examples_for(module, example, rows=4, seed=0):
    inputs = inputs_like(example, rows, seed)
    targets = inputs if inputs.ndim == 2 else jnp.arange(rows, dtype=jnp.int32) % 3
    return Examples(inputs, targets, jnp.full(rows, 1 / rows, jnp.float32))


@pytest.mark.parametrize(
    ("module", "example", "count"),
    [
        (networks.FedjaxCnn(), IMAGE, 1_206_590),
        (networks.ThesisCnn(), IMAGE, 879_422),
        (networks.ShakespeareLstm(), TOKENS, 820_522),
        (networks.SmallCnn(), DIGIT, (9 * 8 + 8) + (9 * 8 * 16 + 16) + (2 * 2 * 16 * 10 + 10)),
        (networks.SmallCnn(classes=62, widths=(4,)), IMAGE, (9 * 4 + 4) + (14 * 14 * 4 * 62 + 62)),
        (networks.Mlp(), DIGIT, (64 * 64 + 64) + (64 * 10 + 10)),
        (networks.Mlp(classes=3, widths=()), DIGIT, 64 * 3 + 3),
    ],
)
def test_parameters_are_as_many_as_published(module, example, count):
    assert tree.size(jax.eval_shape(module.init, jax.random.key(0), example)) == count


def test_the_thesis_cnn_has_the_layers_of_its_table():
    params = jax.eval_shape(networks.ThesisCnn().init, jax.random.key(0), IMAGE)["params"]
    assert [tree.size(layer) for layer in params.values()] == [832, 51_264, 819_328, 7_998]


@pytest.mark.parametrize("padding, size, stride, bias", [("VALID", 3, 1, True), ("SAME", 2, 2, False)])
def test_a_convolution_is_that_of_flax(padding, size, stride, bias):
    image = jax.random.normal(jax.random.key(0), (2, 7, 9, 3), jnp.float64)
    flax = nn.Conv(4, (size, size), stride, padding=padding, use_bias=bias, param_dtype=jnp.float64)
    params = jax.tree.map(lambda leaf: leaf + 0.1, jax.jit(flax.init)(jax.random.key(1), image))  # a bias is not zero
    ours = networks.conv(4, size, padding, jnp.float64, stride, bias)
    np.testing.assert_allclose(ours.apply(params, image), flax.apply(params, image), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", SMALL)
def test_float32_stays_float32_under_x64_and_strict_promotion(name):
    module, example = SMALL[name]
    problem = networks.classification(module)
    data = examples_for(module, example)
    params = problem.init(jax.random.key(0), data.inputs)
    value, grads = jax.jit(jax.value_and_grad(problem.loss))(params, data)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, value, grads))} == {jnp.dtype("float32")}
    assert value.shape == () and np.isfinite(value) and value > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert all(count.dtype == jnp.int32 for count in problem.accuracy_sums(params, data))


def test_other_dtypes_are_a_field_and_integer_images_are_cast():
    module = networks.SmallCnn(dtype=jnp.bfloat16)
    images = jnp.full((2, 8, 8, 1), 3, jnp.uint8)
    scores, params = jax.jit(module.init_with_output)(jax.random.key(0), images)
    assert {leaf.dtype for leaf in jax.tree.leaves((scores, params))} == {jnp.dtype("bfloat16")}
    lstm = networks.ShakespeareLstm(vocabulary=7, embedding=3, widths=(4,), dtype=jnp.float64)
    scores, params = jax.jit(lstm.init_with_output)(jax.random.key(0), TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves((scores, params))} == {jnp.dtype("float64")}


def test_dropout_acts_only_with_a_key_named_dropout():
    module = networks.FedjaxCnn(classes=5)
    problem = networks.classification(module)
    data = examples_for(module, DIGIT)
    params = problem.init(jax.random.key(0), data.inputs)
    loss = jax.jit(problem.loss)
    value = loss(params, data)
    assert value == loss(params, data)
    first, again, other = (loss(params, data, jax.random.key(k)) for k in (1, 1, 2))
    assert first == again and len({float(value), float(first), float(other)}) == 3


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_the_dropout_rates_are_those_of_fedjax(rate):
    module = networks.FedjaxCnn(classes=5)
    params = jax.jit(module.init)(jax.random.key(0), DIGIT)
    captured = module.apply(params, DIGIT, rngs={"dropout": jax.random.key(1)}, capture_intermediates=True)[1]
    before, after = {0.25: ("Conv_1", "Dropout_0"), 0.5: ("Dense_0", "Dropout_1")}[rate]
    whole, dropped = (np.asarray(captured["intermediates"][layer]["__call__"][0]) for layer in (before, after))
    if before == "Conv_1":
        whole = whole.reshape(2, 2, 2, 2, 2, 64).max(axis=(2, 4))
    live = whole > 0  # relu has set the others to zero
    assert abs(np.mean(dropped[live] == 0) - rate) < 0.12
    survivors = live & (dropped != 0)
    np.testing.assert_allclose(dropped[survivors], whole[survivors] / (1 - rate), rtol=1e-5)


def log_softmax(scores):
    scores = np.asarray(scores, np.float64)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def test_the_loss_of_images_is_the_weighted_cross_entropy():
    module = networks.Mlp(classes=3)
    problem = networks.classification(module)
    data = examples_for(module, DIGIT, rows=5)
    data = data._replace(weights=jnp.array([0.5, 0.2, 0.3, 0.0, 0.0], jnp.float32))
    params = problem.init(jax.random.key(0), data.inputs)
    scores = np.asarray(module.apply({"params": params}, data.inputs))
    expected = -sum(float(data.weights[j]) * log_softmax(scores)[j, data.targets[j]] for j in range(5))
    np.testing.assert_allclose(problem.loss(params, data), expected, rtol=1e-6)
    right, total = problem.accuracy_sums(params, data)
    assert total == 3  # class 0 counts, rows of weight 0 do not
    assert int(right) == (scores.argmax(axis=-1) == np.asarray(data.targets))[:3].sum()


def test_the_loss_of_a_sequence_is_the_mean_over_its_targets_that_are_not_padding():
    problem = networks.classification(TINY_LSTM)
    inputs = jnp.array([[1, 2, 3, 4, 5], [6, 1, 0, 0, 0], [0, 0, 0, 0, 0], [2, 2, 2, 2, 2]], jnp.int32)
    targets = jnp.array([[2, 3, 4, 5, 6], [1, 2, 0, 0, 0], [0, 0, 0, 0, 0], [2, 2, 2, 2, 2]], jnp.int32)
    data = Examples(inputs, targets, jnp.array([0.25, 0.5, 0.25, 0.0], jnp.float32))
    params = problem.init(jax.random.key(0), inputs)
    scores = np.asarray(TINY_LSTM.apply({"params": params}, inputs))
    entropy = -np.take_along_axis(log_softmax(scores), np.asarray(targets)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        problem.loss(params, data), 0.25 * entropy[0].mean() + 0.5 * entropy[1, :2].mean(), rtol=1e-6
    )
    grads = jax.jit(jax.grad(problem.loss))(params, data)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    right, total = problem.accuracy_sums(params, data)
    assert total == 7
    hits = scores.argmax(axis=-1) == np.asarray(targets)
    assert int(right) == hits[0].sum() + hits[1, :2].sum()


def test_the_lstm_is_causal_and_uses_its_past():
    params = jax.jit(TINY_LSTM.init)(jax.random.key(0), TOKENS)
    tokens = jnp.array([[1, 2, 3, 4, 5]], jnp.int32)
    changed = tokens.at[0, 2].set(6)
    difference = np.abs(TINY_LSTM.apply(params, tokens) - TINY_LSTM.apply(params, changed)).max(axis=-1)[0]
    assert (difference[:2] == 0).all() and (difference[2:] > 0).all()


def lstm_by_hand(params, x):
    """Layers of h, c = o tanh(c), f c + i g with gates i, f, g, o."""

    def sigmoid(t):
        return 1 / (1 + np.exp(-t))

    for name in ("OptimizedLSTMCell_0", "OptimizedLSTMCell_1"):
        p = jax.tree.map(np.asarray, params[name])
        width = p["hi"]["bias"].size
        h, c, out = np.zeros((len(x), width)), np.zeros((len(x), width)), []
        for t in range(x.shape[1]):
            i, f, g, o = (
                x[:, t] @ p[f"i{k}"]["kernel"] + h @ p[f"h{k}"]["kernel"] + p[f"h{k}"]["bias"] for k in "ifgo"
            )
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            out.append(h)
        x = np.stack(out, axis=1)
    return x


def test_the_lstm_is_the_one_of_the_textbook():
    module = TINY_LSTM.clone(dtype=jnp.float64)
    tokens = jnp.array([[1, 2, 3, 4, 5], [6, 5, 4, 1, 1]], jnp.int32)
    params = jax.jit(module.init)(jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.05, params)
    x = lstm_by_hand(params, np.asarray(params["Embed_0"]["embedding"])[tokens])
    expected = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"].reshape(1, 1, -1)
    np.testing.assert_allclose(module.apply({"params": params}, tokens), expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["small_cnn", "mlp", "lstm"])
def test_clients_by_vmap_one_by_one_and_on_devices_agree(name):
    module, example = SMALL[name]
    problem = networks.classification(module)
    rows = [examples_for(module, example, rows=3, seed=seed) for seed in range(4)]
    data = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    params = jax.vmap(problem.init, (0, None))(jax.random.split(jax.random.key(0), 4), rows[0].inputs)
    clients = jax.vmap(jax.value_and_grad(problem.loss))
    found = jax.jit(clients)(params, data)
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    on_devices = jax.jit(jax.shard_map(clients, mesh=mesh, in_specs=P("clients"), out_specs=P("clients")))
    others = [
        jax.lax.map(lambda both: jax.value_and_grad(problem.loss)(*both), (params, data)),
        on_devices(params, data),
    ]
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), found, other)


def test_accuracy_sums_add_up_over_clients():
    digits = embedded.digits()
    problem = networks.classification(networks.Mlp())
    params = problem.init(jax.random.key(0), digits.test)
    labels = jnp.asarray(digits.test_labels)
    everything = Examples(jnp.asarray(digits.test), labels, jnp.full(len(labels), 1 / len(labels), jnp.float32))
    rows = partition.quantity_wise(len(labels), 5)
    clients = jax.tree.map(jnp.asarray, stacked.examples(digits.test, digits.test_labels, rows))
    right, total = jax.vmap(problem.accuracy_sums, (None, 0))(params, clients)
    assert total.tolist() == [len(ids) for ids in rows]
    assert [int(right.sum()), int(total.sum())] == [int(count) for count in problem.accuracy_sums(params, everything)]
    # The losses average with the clients' sizes.
    losses = jax.vmap(problem.loss, (None, 0))(params, clients)
    mean = np.average(losses, weights=total)
    np.testing.assert_allclose(mean, problem.loss(params, everything), rtol=1e-5)


@pytest.mark.parametrize("module", [networks.SmallCnn(), networks.Mlp()])
def test_a_network_learns_the_digits_from_minibatches(module):
    digits = embedded.digits()
    problem = networks.classification(module)
    rows = partition.blocks(len(digits.train), 1)
    data = jax.tree.map(jnp.asarray, stacked.examples(digits.train, digits.train_labels, rows))
    batches = runner.minibatches(64)

    @jax.jit
    def train(params):
        def step(params, key):
            batch = jax.tree.map(lambda leaf: leaf[0], batches(key, jnp.arange(1), data))
            return tree.add_scaled(params, -0.3, jax.grad(problem.loss)(params, batch)), None

        return jax.lax.scan(step, params, jax.random.split(jax.random.key(1), 300))[0]

    params = train(problem.init(jax.random.key(0), data.inputs[0]))
    weights = jnp.ones(len(digits.test), jnp.float32)
    test = Examples(jnp.asarray(digits.test), jnp.asarray(digits.test_labels), weights)
    right, total = problem.accuracy_sums(params, test)
    assert right / total > 0.9


def test_any_flax_module_will_do_if_it_has_params_alone():
    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x)

    problem = networks.classification(Linear())
    data = Examples(jnp.ones((3, 2), jnp.float32), jnp.array([0, 1, 3]), jnp.full(3, 1 / 3, jnp.float32))
    params = problem.init(jax.random.key(0), data.inputs)
    assert problem.loss(params, data).dtype == jnp.float32

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(x)

    with pytest.raises(ValueError, match=r"Normed has variables \['batch_stats', 'params'\]; allowed: 'params' alone"):
        networks.classification(Normed()).init(jax.random.key(0), data.inputs)


def test_outputs_that_do_not_fit_the_targets_are_refused():
    problem = networks.classification(networks.Mlp())
    data = Examples(DIGIT, jnp.ones((2, 3), jnp.int32), jnp.ones(2, jnp.float32))
    params = problem.init(jax.random.key(0), DIGIT)
    for function in (problem.loss, problem.accuracy_sums):
        with pytest.raises(ValueError, match=r"Mlp gives outputs of shape \(2, 10\) for targets of shape \(2, 3\)"):
            function(params, data)
