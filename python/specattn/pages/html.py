"""Parts of a page without scripts that needs nothing but itself."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from specattn.escaping import escaped


def read(name: str) -> str:
    """Return a file of this folder."""
    return files("specattn.pages").joinpath(name).read_text(encoding="utf-8")


def filled(name: str, **parts: Any) -> str:
    """Return a template of this folder with its parts."""
    return Template(read(name)).substitute(parts)


def notes(*lines: str) -> str:
    """Return lines of small print."""
    return "".join(f'<p class="note">{in_html(line)}</p>' for line in lines)


def table_of(rows: list[dict[str, str]]) -> str:
    """Return rows under their keys."""
    head = "".join(f"<th>{name}</th>" for name in rows[0]) if rows else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row.values()) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def in_html(text: str) -> str:
    """Return text as it stands in HTML, in quotes too; it has no character for controls."""
    return escape(escaped(text))
