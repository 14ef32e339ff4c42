"""The scorecard: its page, its exit status, and its claims of the core."""

import json
import re

import pytest

from experiments import scorecard
from experiments.claims import Claim, core

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
    names = {function.__module__ for function in scorecard.claim_functions()}
    assert {"experiments.claims.core", "experiments.claims.ef_bv"} <= names
    with pytest.raises(ValueError, match="nothing"):
        scorecard.claim_functions("nothing")


def test_claims_are_measured_and_written(tmp_path, monkeypatch):
    # All of them run in the README's first command; here two cheap ones show the way from function to file.
    monkeypatch.setattr(core, "CLAIMS", [core.sweep_is_runs, core.resume_is_exact])
    claims = scorecard.main(scorecard.Settings(out=tmp_path, only="core", progress=False))
    assert [claim.verdict for claim in claims] == ["reproduced"] * 2
    rows = json.loads((tmp_path / "scorecard.json").read_text())["claims"]
    assert [(row["claim"], row["seconds"]) for row in rows] == [(claim.claim, claim.seconds) for claim in claims]
    assert all(0 < row["seconds"] < 1000 for row in rows)
    assert (tmp_path / "index.html").stat().st_size > 1000
