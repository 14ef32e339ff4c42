"""Trackers: one call a round, in order; JSON lines that continue after a kill without a gap and without repeats."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core import runner, trackers
from tests.registry import build

CASE = build("ef-bv m-nice")
KEY = jax.random.key(11)


class Kept:
    """A tracker that keeps what it gets, and may stop the run."""

    def __init__(self, stop=None):
        self.rows, self.stop = {}, stop

    def log(self, round, values):
        if round == self.stop:
            raise KeyboardInterrupt
        self.rows.setdefault(round, []).append(dict(values))


def norm(state):
    return {"norm": jnp.linalg.norm(state.server.params, axis=-1)}


def loop(rounds, tracker, key=KEY, hparams=CASE.hparams, **options):
    inputs = key, CASE.algorithm, hparams, CASE.init(), CASE.data, rounds
    return runner.loop(*inputs, tracker=tracker, progress=False, **{"chunk": 2, "evaluate": norm, **options})[1]


def test_each_round_is_logged_once_with_its_metrics_and_the_evaluation_before_it():
    kept = Kept()
    record = loop(5, kept)
    assert list(kept.rows) == [0, 1, 2, 3, 4, 5] and {len(rows) for rows in kept.rows.values()} == {1}
    for t in range(5):
        assert {name: kept.rows[t][0][name] for name in record.metrics} == {
            name: values[t] for name, values in record.metrics.items()
        }
    evaluated = {t: rows[0]["eval/norm"] for t, rows in kept.rows.items() if "eval/norm" in rows[0]}
    assert evaluated == dict(zip(record.evaluations["round"], record.evaluations["norm"], strict=True))
    assert kept.rows[5][0].keys() == {"eval/norm"}


def test_a_sweep_logs_every_setting_and_key():
    kept = Kept()
    record = loop(2, kept, jax.random.split(KEY, 3), runner.stack([CASE.hparams] * 2))
    assert kept.rows[1][0]["loss[1,2]"] == record.metrics["loss"][1, 2, 1]
    assert kept.rows[2][0]["eval/norm[0,1]"] == record.evaluations["norm"][0, 1, -1]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_round(path):
    rounds = {}
    for row in lines(path):
        merged = rounds.setdefault(row.pop("round"), {})
        assert not merged.keys() & row.keys()  # no number twice
        merged.update(row)
    return rounds


@pytest.mark.parametrize("left", ["", '{"round": 3, "lo'])
def test_json_lines_go_on_after_a_stop_without_a_gap_and_without_repeats(tmp_path, left):
    loop(5, trackers.json_lines(tmp_path / "whole" / "log"))
    path = tmp_path / "log"
    loop(2, trackers.json_lines(path), checkpoint=tmp_path / "run")
    with path.open("a") as file:
        file.write(left)  # of a process that was killed while it wrote
    loop(5, trackers.json_lines(path), checkpoint=tmp_path / "run")
    assert [row["round"] for row in lines(path)] == [0, 1, 2, 2, 3, 4, 5]  # the evaluation of the end that was, first
    assert by_round(path) == by_round(tmp_path / "whole" / "log")
    content = path.read_text()
    loop(5, trackers.json_lines(path), checkpoint=tmp_path / "run")  # complete: nothing is written
    assert path.read_text() == content


def test_rounds_that_were_logged_and_not_saved_are_not_repeated(tmp_path):
    path = tmp_path / "log"
    writer = trackers.json_lines(path)

    class Killed:
        def log(self, round, values):
            writer.log(round, values)
            if round == 3:
                raise SystemExit

    with pytest.raises(SystemExit):
        loop(5, Killed(), checkpoint=tmp_path / "run")
    assert [row["round"] for row in lines(path)] == [0, 1, 2, 3]
    loop(5, trackers.json_lines(path), checkpoint=tmp_path / "run")
    assert [row["round"] for row in lines(path)] == [*range(6)]


def test_numbers_that_are_not_finite_are_null_and_other_files_are_refused(tmp_path):
    trackers.json_lines(tmp_path / "log").log(0, {"loss": np.nan, "norm": 1.5})
    assert lines(tmp_path / "log") == [{"round": 0, "loss": None, "norm": 1.5}]
    (tmp_path / "notes").write_text("mine\n")
    with pytest.raises(ValueError, match=r"notes does not hold JSON lines with a round: .*; allowed: a new file"):
        trackers.json_lines(tmp_path / "notes").log(0, {})
    assert (tmp_path / "notes").read_text() == "mine\n"
