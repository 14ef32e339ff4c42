"""What the parties of the Flower app know: the configuration, and a client its own rows."""

import runpy
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from commjax.data import embedded, libsvm, libsvm_text, partition
from commjax.federation import exchange
from commjax.federation.envelope import RefusedError
from commjax.problems import logistic

APP = Path(__file__).parents[2] / "experiments" / "flower_ef_bv"
sys.path.insert(0, str(APP))
from flower_ef_bv import task  # pyright: ignore[reportMissingImports]  # noqa: E402

pytestmark = pytest.mark.slow

DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def spoiled(path, own):
    """Twenty rows, of which all but client `own`'s cannot be parsed"""
    rng = np.random.default_rng(0)
    whole = libsvm.Dataset(rng.standard_normal((20, 6)), np.where(np.arange(20) < 14, 1.0, -1.0), "twenty")
    libsvm.write(path, whole)
    lines, parts = path.read_text().splitlines(), partition.blocks(20, 4, seed=0)
    for row in set(range(20)) - set(parts[own].tolist()):
        lines[row] = lines[row].split()[0] + " 1:rubbish 6:1"
    path.write_text("\n".join(lines))
    return {**DEFAULTS, "dataset": str(path), "features": 6, "smoothness": 5.0, "n": 4}, whole, parts[own]


@pytest.mark.parametrize("id", [0, 3])
def test_a_client_parses_its_own_rows_only(tmp_path, id):
    config, whole, rows = spoiled(tmp_path / f"for{id}", id)
    found = task.data(config, id)
    np.testing.assert_array_equal(found.features, whole.features[rows])
    np.testing.assert_array_equal(found.labels, whole.labels[rows])
    assert task.own(config["dataset"], 4, id, 0.1, 0)[1] == logistic.constants(whole, [rows], 0.1).L_i[0]
    with pytest.raises(ValueError, match="value rubbish"):
        task.data(config, 1)


def test_the_contract_needs_no_rows(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("rows were read")

    for module, name in ((libsvm, "scan"), (libsvm_text, "_lines"), (embedded, "breast_cancer")):
        monkeypatch.setattr(module, name, never)
    for dataset in ("mushrooms", "breast_cancer"):
        contract = task.contract(DEFAULTS | {"dataset": dataset, "features": 12})
        assert contract.init(jax.numpy.arange(1)).server.params.shape == (12,) and exchange.fingerprint(contract)


def test_the_configuration_that_ships_is_a_bound_of_the_embedded_data_and_not_a_loose_one():
    L_i = np.array([task.own("breast_cancer", 4, i, DEFAULTS["mu"], DEFAULTS["seed"])[1] for i in range(4)])
    assert np.sqrt(np.mean(L_i**2)) <= DEFAULTS["smoothness"] <= 1.01 * np.sqrt(np.mean(L_i**2))
    dataset = embedded.breast_cancer()
    assert dataset.features.shape[1] == DEFAULTS["features"]
    parts = partition.blocks(len(dataset.labels), 4, seed=DEFAULTS["seed"])
    np.testing.assert_array_equal(L_i, logistic.constants(dataset, parts, DEFAULTS["mu"]).L_i)


def test_a_client_refuses_numbers_that_its_own_rows_contradict(tmp_path):
    config, whole, rows = spoiled(tmp_path / "w", 2)
    L = logistic.constants(whole, [rows], 0.1).L_i[0]
    task.data(config | {"smoothness": 0.501 * L}, 2)
    with pytest.raises(RefusedError, match=rf"allowed: at least {L / 2:.4g}: L_2 alone is {L:.4g}"):
        task.data(config | {"smoothness": 0.499 * L}, 2)
    with pytest.raises(RefusedError, match="features=7; allowed: 6, which client 2's have"):
        task.data(config | {"features": 7}, 2)


@pytest.mark.parametrize("more, mu", [([], 0.1), (["0.3"], 0.3)])
def test_a_client_can_tell_its_constant(tmp_path, monkeypatch, capsys, more, mu):
    config, whole, rows = spoiled(tmp_path / "w", 2)
    monkeypatch.setattr(sys, "argv", ["task", config["dataset"], "4", "2", *more])
    runpy.run_path(str(APP / "flower_ef_bv" / "task.py"), run_name="__main__")
    wanted = logistic.constants(whole, [rows], mu).L_i[0]
    assert capsys.readouterr().out == f"client 2 of 4: L_i = {wanted:.6g}\n"
