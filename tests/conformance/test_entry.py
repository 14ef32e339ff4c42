"""What a run refuses before it begins, over `tests/registry.py`, which has every method.  Nothing is compiled."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from commjax import algorithms
from commjax.algorithms import ef_bv, fedavg, scafflix, sppm_as
from commjax.core import checks, runner
from commjax.core.base import Algorithm, State
from commjax.devices import host_clients
from commjax.devices.mesh import client_mesh
from tests import registry, registry_cases
from tests.registry import build

pytestmark = pytest.mark.slow

KEY = jax.random.key(7)
ALL = pytest.mark.parametrize("name", registry.NAMES)


@pytest.fixture(autouse=True)
def types_unchecked():
    """As in production: our own errors, not those of the types that tests check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def public_functions():
    """The name and the annotated result of every public function that a module of commjax.algorithms defines."""
    for info in pkgutil.walk_packages(algorithms.__path__, "commjax.algorithms."):
        module = importlib.import_module(info.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            plain = inspect.unwrap(function)
            if plain.__module__ == module.__name__ and not name.startswith("_"):
                yield name, plain.__annotations__.get("return")


def test_the_registry_calls_every_public_factory_of_algorithms():
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (registry, registry_cases)]
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {f.attr for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)}
    factories = [name for name, result in public_functions() if result in (Algorithm, "Algorithm")]
    assert len(factories) == len(set(factories))  # so that a name says which
    assert {"gd", "ef_bv", "fedcr_layers", "scafflix", "iterations", "fedp3", "released"} < set(factories)
    assert set(factories) - called == set()


def test_what_returns_hparams_says_so_in_its_name():
    tuned = {name for name, result in public_functions() if "HParams" in getattr(result, "__name__", str(result))}
    assert {"theoretical", "ef21_hparams", "scaffnew_hparams"} < tuned
    assert {name for name in tuned if name != "theoretical" and not name.endswith("_hparams")} == set()


class Other(NamedTuple):
    gamma: float = 0.1


@ALL
def test_another_method_s_hparams_or_state_a_dict_and_an_int_are_refused_by_every_run(name):
    case, spec = build(name), build(name).algorithm.spec
    state = case.init()
    other = State(Other(), state.clients), State(state.server, Other())
    kind = spec.hparams.__module__.removesuffix(".method").rpartition(".")[2] + ".HParams"
    runs = [runner.run, lambda *inputs: runner.loop(*inputs, progress=False)]
    runs += [lambda *inputs: runner.run(*inputs, mesh=client_mesh(2))]
    for run in runs:
        for hparams, got in (
            (dict(case.hparams._asdict()), "dict"),
            (Other(), r"test_entry.Other\(gamma\)"),
            (0.1, "float 0.1"),
        ):
            with pytest.raises(
                TypeError, match=rf"hparams must be {kind}\({', '.join(case.hparams._fields)}\), got {got}"
            ):
                run(KEY, case.algorithm, hparams, state, case.data, 1)
        for wrong in other:
            with pytest.raises(TypeError, match=r"state\.(server|clients) must be .*of another method|algorithm.init"):
                run(KEY, case.algorithm, case.hparams, wrong, case.data, 1)
        for wrong in (state.server.params, None, (state.server, state.clients)):
            with pytest.raises(TypeError, match=r"state must be what algorithm.init\(params, ids\) makes, got "):
                run(KEY, case.algorithm, case.hparams, wrong, case.data, 1)
        for key in (0, jnp.zeros(2, jnp.uint32), None):
            with pytest.raises(TypeError, match=r"key must be one key, jax.random.key\(seed\), got "):
                run(key, case.algorithm, case.hparams, state, case.data, 1)
        for rounds in (-1, 2.0, True, None):
            with pytest.raises(ValueError, match="num_rounds must be an integer of at least 0, got "):
                run(KEY, case.algorithm, case.hparams, state, case.data, rounds)
        with pytest.raises(TypeError, match="algorithm must be an Algorithm"):
            run(KEY, case.algorithm.step, case.hparams, state, case.data, 1)
    with pytest.raises(TypeError, match="hparams must be"):
        runner.sweep(KEY[None], case.algorithm, runner.stack([Other()]), state, case.data, 1)
    for ids in (8, np.float64(8), jnp.zeros(8), [0, 1], jnp.zeros((2, 2), int)):
        with pytest.raises(TypeError, match=r"ids must be a vector of client numbers, such as jnp.arange\(n\), got "):
            case.algorithm.init(case.params, ids, **case.per_client)


@ALL
def test_ids_that_are_not_each_client_once_are_refused_at_init_and_at_the_entry(name):
    case = build(name)
    state, n = case.init(), len(case.init().clients.id)
    wrong = [np.arange(n) + 10, np.arange(n) - 1, np.zeros(n, np.int32), np.arange(n)[:0]]
    for ids in wrong:
        with pytest.raises(ValueError, match=r"ids(=\[|: no clients).*allowed: "):
            case.algorithm.init(case.params, jnp.asarray(ids), **case.per_client)
        clients = state.clients._replace(id=jnp.asarray(ids))
        with pytest.raises(ValueError, match=r"state.clients.id(=\[|: no clients).*allowed: "):
            runner.run(KEY, case.algorithm, case.hparams, State(state.server, clients), case.data, 1)
    with pytest.raises(ValueError, match=r"ids=\[-1\]; allowed: "):
        case.algorithm.init(case.params, jnp.array([-1]), **case.per_client)


def concrete(hparams):
    return [(name, value) for name, value in hparams._asdict().items() if np.ndim(value) == 0]


@ALL
def test_hparams_that_are_not_finite_are_refused_by_name_also_inside_a_sweep(name):
    case = build(name)
    for field, value in concrete(case.hparams):
        wrong = case.hparams._replace(**{field: float("nan")})
        with pytest.raises(ValueError, match=rf"{field}=nan; allowed: "):
            runner.run(KEY, case.algorithm, wrong, case.init(), case.data, 1)
        if not isinstance(value, int):
            grid = runner.stack([case.hparams, wrong])
            with pytest.raises(ValueError, match=rf"{field}=nan; allowed: "):
                runner.sweep(KEY[None], case.algorithm, grid, case.init(), case.data, 1)


@ALL
def test_inside_jit_and_vmap_only_types_are_checked(name):
    case = build(name)
    strong = jax.tree.map(lambda leaf: jnp.asarray(leaf), case.hparams)

    def run(hparams, state, data):
        return runner.run(KEY, case.algorithm, hparams, state, data, 1)

    state, metrics = jax.eval_shape(run, strong, case.init(), case.data)
    assert state.server.round.shape == () and metrics.loss.shape == (1,)


WRONG = [
    ("scafflix", {"p": 2.0}, r"p=2.0; allowed: 0 < p <= 1"),
    ("scafflix", {"alpha": -0.5}, r"alpha=-0.5; allowed: 0 to 1"),
    ("scafflix", {"gamma": np.ones(3)}, r"gamma has shape \(3,\); allowed: one number, or one for each of 8 clients"),
    ("ef-bv comp", {"gamma": -1.0}, r"gamma=-1.0; allowed: positive and finite"),
    ("ef-bv comp", {"gamma": np.ones(2)}, r"gamma has shape \(2,\); allowed: one number"),
    ("ef-bv comp", {"nu": "one"}, r"nu must be a number, got 'one'"),
    ("fedprox", {"mu": -1.0}, r"mu=-1.0; allowed: at least 0 and finite"),
    ("fedcr", {"mix": 1.5}, r"mix=1.5; allowed: 0 to 1"),
    ("ldp-fedp3", {"rate": 0.0}, r"rate=0.0; allowed: 0 < rate <= 1"),
    ("sppm-as", {"rounds": 1.5}, r"rounds=1.5; allowed: a whole number of at least 1"),
    ("mb-local-gd", {"steps": 0}, r"steps=0; allowed: a whole number of at least 1"),
]


@pytest.mark.parametrize("name, change, message", WRONG)
def test_raw_hparams_are_validated(name, change, message):
    case = build(name)
    with pytest.raises((ValueError, TypeError), match=message):
        runner.run(KEY, case.algorithm, case.hparams._replace(**change), case.init(), case.data, 1)


def test_a_federation_and_a_method_without_a_spec_are_checked_as_far_as_possible():
    algorithm = fedavg.fedavg(registry.VALUE_AND_GRAD, steps=1, cohort=2)
    many = host_clients.start(algorithm, jnp.ones(registry.D), 4)

    good = fedavg.HParams(0.1)

    def run(key=KEY, hparams=good, rounds=1, many=many):
        return host_clients.run(key, algorithm, hparams, many, lambda ids: None, rounds)

    with pytest.raises(TypeError, match=r"hparams must be fedavg.HParams\(stepsize, server\), got scafflix.HParams"):
        run(hparams=scafflix.HParams(0.1, 1.0, 1.0))
    with pytest.raises(ValueError, match="num_rounds must be an integer of at least 0, got -1"):
        run(rounds=-1)
    with pytest.raises(TypeError, match="key must be one key"):
        run(key=0)
    other = ef_bv.ef_bv(registry.VALUE_AND_GRAD, registry.COMPRESSORS["comp"])
    with pytest.raises(TypeError, match=r"state.server must be fedavg.Server\(round, params\), got ef_bv.Server"):
        run(many=host_clients.start(other, jnp.ones(registry.D), 4))
    checks.hparams_of(algorithm._replace(spec=None), {"anything": 1}, 4)


def test_a_solver_of_sppm_as_may_have_two_rates():
    sppm_as.check(sppm_as.HParams(1.0, 3, rate=(0.1, 0.01)), 4)
    with pytest.raises(ValueError, match="rate=nan; allowed: finite"):
        sppm_as.check(sppm_as.HParams(1.0, 3, rate=(0.1, np.nan)), 4)
    with pytest.raises(ValueError, match=r"gamma has shape \(2,\); allowed: one number"):
        sppm_as.check(sppm_as.HParams((1.0, 2.0), 3), 4)
