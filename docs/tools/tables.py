"""Write the pages' tables from records, state.json and code: ``python docs/tools/tables.py``.

A page has a table between ``<!-- table NAME -->`` and ``<!-- end -->``; a function of the files
beside this one is registered by NAME. ``tests/test_facts.py`` says where a page is not up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

import decoding_tables  # noqa: F401
import drafter_tables  # noqa: F401
import kernel_tables  # noqa: F401
import method_tables  # noqa: F401
import prediction_tables  # noqa: F401
import state  # noqa: F401
import step_tables  # noqa: F401
import wide_tables  # noqa: F401
from records import TABLES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Rewrite every page that holds a table."""
    for page in pages():
        page.write_text(written(page.read_text()))


def pages() -> list[Path]:
    """Return all pages that may hold tables."""
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench/README.md"]


def written(text: str) -> str:
    """Return a page's text with every table as the records have it."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + "\n" + found[3], text)


if __name__ == "__main__":
    main()
