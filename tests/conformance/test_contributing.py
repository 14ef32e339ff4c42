"""The three examples of docs/contributing.md are complete: each has the properties of its kind."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors
from commjax.core import runner
from commjax.devices.mesh import client_mesh
from commjax.federation import exchange
from tests import registry

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs/contributing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
KEY = jax.random.key(3)


def example(name):
    """What the block that defines `name` defines."""
    (code,) = [block for block in BLOCKS if f"def {name}(" in block]
    found = {"__name__": f"contributing.{name}"}
    exec(compile(code, f"docs/contributing.md: {name}", "exec"), found)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(('"""', "import", "from"))]
    assert f"\n{len(lines)} lines." in PAGE, (name, len(lines))
    return found


def test_the_compressor_is_certified_and_sends_what_it_says():
    window = example("window")["window"]
    certificate = compressors.certify(window(3), d=6, n=2)
    assert certificate.method == "enumeration"
    compressors.check(window(3), jnp.linspace(1, 2, 9))
    with pytest.raises(ValueError, match="window: k must be at most the dimension d = 2, got 3"):
        window(3).compress(KEY, jnp.ones(2))


def test_the_sampling_has_the_constants_of_its_outcomes():
    sampling, n = example("neighbours")["neighbours"](7, 3), 7
    rng = np.random.default_rng(0)
    outcomes = list(sampling.outcomes())
    member = np.array([[i in ids for i in range(n)] for _, ids in outcomes], float)
    chance = np.array([p for p, _ in outcomes])
    np.testing.assert_allclose(chance @ member, sampling.probabilities, rtol=1e-14)
    weights = member / (n * sampling.probabilities)
    mu, L, a = rng.uniform(1, 2, n), rng.uniform(1, 2, n), rng.standard_normal((n, 4))
    a -= a.mean(axis=0)
    assert sampling.mu(mu) == pytest.approx((weights @ mu).min())
    assert sampling.variance(a) == pytest.approx(chance @ np.sum((weights @ a) ** 2, axis=1))
    given = [(chance * member[:, i]) @ (weights @ L) / (chance @ member[:, i]) for i in range(n)]
    assert sampling.smoothness(L) == pytest.approx(max(given))
    drawn = {tuple(sorted(sampling.sample(key).ids.tolist())) for key in jax.random.split(KEY, 100)}
    assert drawn == {ids for _, ids in outcomes}


def test_the_algorithm_converges_on_one_device_on_two_and_as_a_federation():
    found = example("fedavg_momentum")
    algorithm = found["fedavg_momentum"](registry.VALUE_AND_GRAD, steps=2)
    hparams = found["HParams"](stepsize=0.02, momentum=0.5)
    state = algorithm.init(registry.start(jnp.float64), jnp.asarray(registry.IDS))
    inputs = (KEY, algorithm, hparams, state, registry.PROBLEM, 40)
    one, metrics = runner.run(*inputs)
    assert metrics.loss[-1] < metrics.loss[0] and (metrics.bits_up == 64 * registry.D).all()
    two, _ = runner.run(*inputs, mesh=client_mesh(2))
    np.testing.assert_allclose(two.server.params, one.server.params, rtol=1e-10)
    contract = exchange.Contract(
        algorithm, hparams, lambda ids: algorithm.init(registry.start(jnp.float64), ids), registry.N, KEY, rounds=1
    )
    server = exchange.start(contract, jnp.asarray(registry.IDS)).server
    downloads = exchange.downloads(contract, server, {})
    uploads = {
        i: exchange.answer(
            contract,
            i,
            jax.tree.map(lambda leaf, i=i: leaf[i], registry.PROBLEM),
            exchange.first_memory(contract, i),
            downloads[i],
            None,
        )[1]
        for i in range(registry.N)
    }
    server, report = exchange.close(contract, server, uploads)
    assert report.bits_up == 64 * registry.D and server.round == 1
    with pytest.raises(ValueError, match=r"momentum=2\.0; allowed: 0 to 1"):
        runner.run(KEY, algorithm, hparams._replace(momentum=2.0), state, registry.PROBLEM, 1)
