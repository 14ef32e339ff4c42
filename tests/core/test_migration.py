"""The first table of docs/migration.md is the table of old imports in the code."""

import re
from pathlib import Path

from commjax.core.moved import MOVED, MOVED_NAMES

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text()


def test_the_tables_of_the_page_are_those_of_the_code():
    modules = PAGE.split("## Modules")[1].split("## Names")[0]
    rows = dict(re.findall(r"^\| `(commjax\.\S+)` \| `(commjax\.\S+)` \|$", modules, re.M))
    names = {f"{old}.{name}": f"{new}.{name}" for old, (new, moved) in MOVED_NAMES.items() for name in moved}
    assert rows == MOVED | names
