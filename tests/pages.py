"""The pages of the documentation that are held to what code and records say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")]
PAGES += [ROOT / "bench/README.md", ROOT / "tools/ptx/README.md"]
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def each(pages):
    """Return a parameter `page` for each of these pages."""
    return pytest.mark.parametrize(
        "page", pages, ids=lambda page: page.relative_to(ROOT).as_posix()
    )


def prose(page):
    """Return the text of a page without its blocks of code."""
    return CODE.sub("", page.read_text())
