"""The table of old imports in the documentation is that of the package."""

import re
from pathlib import Path

from commjax.core import moved


def test_the_table_of_imports_is_complete():
    text = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    imports = text.partition("## Imports")[2].partition("## Names")[0]
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \|$", imports, re.MULTILINE)
    names = {f"{old}.{name}": f"{new}.{name}" for old, (new, names) in moved.MOVED_NAMES.items() for name in names}
    assert len(rows) == len(dict(rows)) and dict(rows) == moved.MOVED | names
