"""The benchmarks' own arithmetic, the record of a machine and the page that is made of it."""

import dataclasses
import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import __main__ as bench
from experiments.bench import compressors, growth, measure, page
from experiments.bench.measure import Ratio, Side, Table


def table(ours, theirs=(8.0, 4.0, 2.0)):
    ratios = {"theirs / ours": Ratio("theirs", "ours", 2.0, True), "ours / theirs": Ratio("ours", "theirs", 0.5)}
    seconds = {"ours": list(ours), "theirs": list(theirs)}
    return measure.summary(Table("A title", "n = 3", "It says.", seconds, ratios, ("s", 1), {"ours": 3}))


def test_ratios_are_of_the_same_turn():
    found = table([2.0, 2.0, 4.0])
    assert found["ratios"]["theirs / ours"]["values"] == [0.5, 2.0, 4.0]
    assert found["times"]["ours"] == [2.0, 2.0, 4.0] and found["ratios"]["ours, s"]["values"] == [2.0, 2.0, 4.0]
    assert measure.goal(found["ratios"]["theirs / ours"]) == "at least 2"
    assert measure.goal(found["ratios"]["ours / theirs"]) == "at most 0.5"
    assert measure.goal(table([2.1, 2.1, 4])["ratios"]["ours / theirs"]) == "at most 0.5: missed"
    assert measure.goal(table([2.1, 2.1, 4])["ratios"]["theirs / ours"]) == "at least 2: missed"


def test_sides_take_turns_and_the_first_turn_is_not_counted():
    calls = []
    sides = {name: Side(lambda name=name: calls.append(name) or jnp.zeros(()), units=2) for name in "ab"}
    found = measure.take_turns(sides, 3)
    assert calls == ["a", "b"] * 4 and [len(values) for values in found.values()] == [3, 3]


@pytest.mark.parametrize("factor, expected", [(1.1, 0), (1.2, 3), (0.5, 0)])
def test_what_is_more_than_15_percent_worse_than_the_record_is_named(factor, expected):
    old = {"benchmarks": {"x": [table([2.0, 2.0, 2.0], (4.0, 4.0, 4.0))]}}
    new = {"benchmarks": {"x": [table([2.0 * factor] * 3, (4.0, 4.0, 4.0))], "unknown": [table([1, 1, 1])]}}
    assert len(bench.worse(old, new)) == expected


def test_the_command_measures_keeps_a_record_compares_and_makes_the_page(tmp_path, monkeypatch, capsys):
    tables = [table([2.0, 2.0, 2.0], (4.0, 4.0, 4.0))]
    monkeypatch.setattr(bench, "RECORDS", tmp_path)
    monkeypatch.setattr(bench, "measured", lambda name, quick: None if name == "stream" else tables)
    monkeypatch.setattr(page, "PAGE", tmp_path / "speed.md")
    settings = bench.Settings(("ef_bv", "optax"), write=True)
    assert bench.main(settings) == 0 and "there is no record" in capsys.readouterr().out
    assert bench.main(dataclasses.replace(settings, write=False)) == 0
    (file,) = tmp_path.glob("*.json")
    assert set(json.loads(file.read_text())["benchmarks"]) == {"ef_bv", "optax"}
    tables = [table([3.0, 3.0, 3.0], (4.0, 4.0, 4.0))]
    assert bench.main(bench.Settings(("ef_bv",))) == 1
    assert "ef_bv: A title: theirs / ours: 2 in the record, 1.33 now" in capsys.readouterr().out
    assert bench.main(bench.Settings(("stream",))) == 1 and "failed: stream" in capsys.readouterr().out
    assert bench.main(bench.Settings(page=True)) == 0
    text = (tmp_path / "speed.md").read_text()
    assert "| theirs / ours | **2 (2 to 2)** at least 2 |" in text and "It says." in text
    with pytest.raises(SystemExit, match="no benchmark is called nothing"):
        bench.main(bench.Settings(("nothing",)))


def test_every_benchmark_of_the_folder_is_known_and_has_small_sizes():
    others = {"__init__", "__main__", "measure", "page", "fedjax_side"}
    files = {file.stem for file in bench.RECORDS.parent.glob("*.py")} - others
    assert files == set(bench.NAMES)
    for name in bench.NAMES:
        if name != "pruning" or importlib.util.find_spec("torch"):
            module = importlib.import_module(f"experiments.bench.{name}")
            assert isinstance(module.QUICK, module.Settings) and callable(module.tables)


def test_the_records_are_of_known_benchmarks():
    for file in bench.RECORDS.glob("*.json"):
        found = json.loads(file.read_text())
        assert set(found["benchmarks"]) <= set(bench.NAMES) and found["cpu"] and found["versions"]["jax"]


def test_compressors_are_measured_on_rows_and_in_a_round():
    tiny = compressors.Settings(sizes=((2, 300),), clients=2, rows=2, repeats=1, calls=1)
    rows, parts, mlp, cnn = compressors.tables(tiny)
    assert (
        len(rows.seconds) >= 9
        and len(parts.seconds) == 7
        and set(mlp.seconds) == set(cnn.seconds) == {"uncompressed", "top 1 %", "rand 1 %"}
    )


def test_an_exponent_is_the_slope_of_the_logarithms():
    sizes = np.array([10, 100, 1000])
    assert growth.exponent(sizes, 3e-6 * sizes**1.5) == pytest.approx(1.5)
