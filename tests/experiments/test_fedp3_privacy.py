"""The driver of private FedP3 at toy size, its arithmetic, and its claims."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core.records import Record
from commjax.privacy import accounting
from experiments.fedp3 import privacy as driver
from experiments.fedp3 import theory as fedp3_theory
from experiments.scorecard.claims import privacy as claims

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return driver.Settings(
        clients=4,
        epsilons=(2.0, 8.0),
        rounds=4,
        every=2,
        stepsizes=(3.0,),
        seeds=2,
        trials=300,
        rate=0.3,
        variants=("clipped part", "LDP-SGD"),
        out=tmp_path_factory.mktemp("private"),
        progress=False,
    )


@pytest.fixture(scope="module")
def found(settings):
    jax.config.update("jax_enable_x64", False)  # as the command runs
    yield driver.curve(settings)
    jax.config.update("jax_enable_x64", True)


def test_every_variant_has_a_row_for_no_privacy_and_for_every_target(found, settings):
    assert [(row["variant"], row["target"]) for row in found] == [
        (name, target) for name in settings.variants for target in (math.inf, *settings.epsilons)
    ]
    for row in found:
        assert row["parameters"] == 650 and 0 <= row["accuracy"] <= 100 and row["stepsize"] in settings.stepsizes
        if row["target"] < math.inf:
            assert row["audit"] <= row["certified"] <= row["target"] == pytest.approx(row["certified"], rel=0.01)
            assert row["pld replace-one"] == row["certified"] > row["pld add-remove"]
            assert row["rdp replace-one"] > row["pld replace-one"] and row["noise"] > 0


def test_deviations_are_those_of_a_sample(found, settings):
    record = Record.load(settings.out / "digits_private_clipped_part")
    seeds = 100 * record.evaluations["test"][0, 1:, -1]
    assert found[0]["std"] == pytest.approx(abs(seeds[0] - seeds[1]) / math.sqrt(2), rel=1e-5)


def test_bits_are_a_share_of_the_parameters_or_all_of_them(found, settings):
    for row in found:
        share = 1 if row["variant"] == "LDP-SGD" else settings.clients
        assert row["bits_up"] == pytest.approx(settings.rounds * 32 * 650 / share)


def test_the_driver_leaves_a_table_a_figure_and_records(found, settings):
    rows = json.loads((settings.out / "digits_private.json").read_text())
    assert rows == found and "Infinity" in (settings.out / "digits_private.json").read_text()
    text = (settings.out / "digits_private.txt").read_text()
    assert "attack <= certificate <= target in every row: True" in text and "4 clients of 323 rows" in text
    assert (settings.out / "digits_private.png").read_bytes().startswith(b"\x89PNG")
    record = Record.load(settings.out / "digits_private_clipped_part")
    assert record.metrics["loss"].shape == (3, 3, 4) and record.evaluations["test"].shape == (3, 3, 3)
    assert record.config["clip"] == pytest.approx(settings.clip / 2)  # sqrt(4 clients)


def test_a_finished_command_is_not_run_twice(found, settings, no_sweep):
    no_sweep()
    assert driver.curve(settings) == found


def test_without_noise_it_learns(found):
    plain = [row["accuracy"] for row in found if row["target"] == math.inf]
    assert min(plain) > 25  # ten classes, four rounds


def test_the_capacity_holds_all_rows_but_once_in_a_very_long_while(settings):
    most = driver.capacity(settings, 323)
    assert most is not None and 97 < most < 323
    assert (
        accounting.overflow(most, 323, settings.rate, 1) <= 1e-14 < accounting.overflow(most - 3, 323, settings.rate, 1)
    )
    assert driver.capacity(driver.Settings(rate=1.0), 50) is None


def test_every_client_has_as_many_rows_and_the_parts_are_disjoint():
    task = driver.load("digits", 0, 10)
    assert task.train.inputs.shape[:2] == (10, 129) and np.allclose(task.train.weights, 1 / 129)
    assert len(task.validation.targets) == 143 and len(task.test.targets) == 359
    seen = {row.tobytes() for row in np.asarray(task.train.inputs).reshape(-1, 64)}
    held = {row.tobytes() for row in np.asarray(task.validation.inputs).reshape(-1, 64)}
    assert not seen & held
    hidden = driver.load("digits", 8, 10).problem.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    assert len(jax.tree.leaves(hidden)) == 4


def test_the_attack_s_table(settings):
    rows = driver.audit(dataclasses.replace(settings, canaries=200))
    assert [(row["relation"], row["target"]) for row in rows] == [
        (relation, epsilon) for relation in ("add-remove", "replace-one") for epsilon in settings.epsilons
    ]
    assert all(max(row["audit"], row["one_run"]) <= row["certified"] <= row["target"] for row in rows)
    assert (settings.out / "audit.txt").read_text().count("\n") == 6


def test_the_table_of_the_theory(settings):
    rows = driver.theory(settings)
    assert {row["errata"] for row in rows} == {"F11", "F14", "F18", "F19", "F20", "F21"}
    text = (settings.out / "theory.txt").read_text()
    assert "5.26" in text and "0.1 times" in text
    found, exact, printed = fedp3_theory.noise_floor(0.1, 60, 500)
    assert found == pytest.approx(exact, rel=0.15) and printed < found


@pytest.mark.long
def test_the_claims_hold():
    verdicts = [claim().verdict for claim in claims.CLAIMS]
    assert verdicts == ["corrected"] * 4
