"""The scorecard: its page, its exit status, and its claims of the core."""

import json
import os
import re

import pytest

from experiments.scorecard import page as scorecard
from experiments.scorecard import workers as claim_workers
from experiments.scorecard.claims import Claim, core

pytestmark = pytest.mark.long

GOOD = Claim("M", "a < b & so on", "L1", "1", "1", "reproduced", figure=b"\x89PNG fake")
BAD = Claim("M", "other", "L2", "1", "2", "differs")


def test_a_corrected_claim_must_cite_its_erratum():
    with pytest.raises(ValueError, match="errata number"):
        Claim("M", "claim", "L1", "1", "2", "corrected")


def test_the_page_is_self_contained_and_escapes_what_it_shows():
    page = scorecard.page([GOOD, BAD], 3.2)
    assert "a &lt; b &amp; so on" in page and "a < b" not in page
    assert "data:image/png;base64," in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "1 reproduced, 0 corrected, 1 differs" in page


def test_brackets_survive_in_the_terminal():
    assert "E[x]" in scorecard.text([Claim("M", "grows E[x]", "L1", "1", "1", "reproduced")])


def test_every_module_of_claims_is_found_and_a_wrong_filter_is_named():
    names = scorecard.modules()
    assert {"experiments.scorecard.claims.core", "experiments.scorecard.claims.ef_bv"} <= set(
        names
    ) and names == sorted(names)
    assert {f"experiments.scorecard.claims.{name}" for name in scorecard.LONGEST} <= set(names)
    with pytest.raises(ValueError, match="nothing"):
        scorecard.modules("nothing")


def test_claims_are_measured_and_written(tmp_path, monkeypatch):
    # All of them run in the README's first command; here two cheap ones show the way from function to file.
    monkeypatch.setattr(core, "CLAIMS", [core.sweep_is_runs, core.resume_is_exact])
    claims = scorecard.main(scorecard.Settings(out=tmp_path, only="core", progress=False))
    assert [claim.verdict for claim in claims] == ["reproduced"] * 2
    rows = json.loads((tmp_path / "scorecard.json").read_text())["claims"]
    assert [(row["claim"], row["seconds"]) for row in rows] == [(claim.claim, claim.seconds) for claim in claims]
    assert all(0 < row["seconds"] < 1000 for row in rows)
    assert (tmp_path / "index.html").stat().st_size > 1000


MODULE = """
import os, time
import jax.numpy as jnp
from experiments.scorecard.claims import Claim

def one():
    time.sleep({sleep})
    return Claim("{name}", "{name} 1", "L1", str(jnp.zeros(()).dtype), str(os.getpid()), "reproduced")

def two():
    {last}
    return Claim("{name}", "{name} 2", "L1", "-", str(os.getpid()), "differs")

CLAIMS = [one, two]
"""


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """Three modules of two claims; the arguments are last lines of the second one's second claim."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(last="pass"):
        for name, sleep, line in (("toy_a", 0.3, "pass"), ("toy_b", 0, last), ("toy_c", 0, "pass")):
            (tmp_path / f"{name}.py").write_text(MODULE.format(name=name, sleep=sleep, last=line))
        return ["toy_a", "toy_b", "toy_c"]

    return write


def test_processes_share_out_the_modules_and_find_the_same_claims(toys, monkeypatch):
    names = toys()
    found = list(claim_workers.measure_modules(names, 2))
    assert sorted((one.module, one.index) for one in found) == [(name, i) for name in names for i in (0, 1)]
    by_module = {name: {one.claim.measured for one in found if one.module == name} for name in names}
    assert all(len(processes) == 1 for processes in by_module.values())  # a module in one process
    assert len(set.union(*by_module.values())) == 2 and str(os.getpid()) not in set.union(*by_module.values())
    assert {one.claim.thesis for one in found if one.index == 0} == {"float64"}  # as in this process
    assert all(one.claim.seconds >= 0.3 for one in found if (one.module, one.index) == ("toy_a", 0))
    # The scorecard has them in the order of their names.
    monkeypatch.setattr(scorecard, "modules", lambda only: names)
    claims = scorecard.measure(scorecard.Settings(processes=1, progress=False))
    assert [claim.claim for claim in claims] == [f"{name} {number}" for name in names for number in (1, 2)]


@pytest.mark.parametrize(
    "last, reason",
    [
        ("raise KeyError('lost')", "(?s)a claim of toy_b failed:.*in two.*KeyError: 'lost'"),
        ("os._exit(7)", "the process that measured toy_b ended with 7"),
    ],
)
def test_an_error_in_a_claim_is_raised_in_the_parent_and_no_worker_is_left(toys, last, reason):
    import multiprocessing

    with pytest.raises(claim_workers.ClaimError, match=reason):
        list(claim_workers.measure_modules(toys(last), 2))
    assert not multiprocessing.active_children()
    with pytest.raises(ValueError, match="processes: 0; allowed: 1 or more"):
        list(claim_workers.measure_modules(["toy_a"], 0))
