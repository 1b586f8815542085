"""What `specattn conform --html` writes: where texts part, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specattn.conform.judge import BAD
from specattn.files import write_atomically
from specattn.pages.html import filled, in_html, notes, read, table_of

_SHOWN = 60  # characters of a text before and behind the place where it parts


def write_page(file: Path, content: dict[str, Any], lines: list[str]) -> None:
    """Write a page without scripts that needs nothing but itself."""
    rows, sections = [], []
    for number, one in enumerate(content["prompts"]):
        good, name = one["verdict"] not in BAD, in_html(one["name"])
        verdict = f'<span class="{"yes" if good else "no"}">{one["verdict"]}</span>'
        if one["place"] is not None:
            parts = [f'<h2 id="p{number}">{name}</h2>']
            parts.append(f"<p>{verdict}: {in_html(one['reason'])}</p>")
            for engine, before, behind in _around(one["texts"], content["engines"]):
                before = f'<span class="prompt">{in_html(before)}</span>'
                behind = f'<span class="d0">{in_html(behind)}</span>'
                parts.append(f'{notes(engine)}<pre tabindex="0">{before}{behind}</pre>')
            sections.append("".join(parts))
            name = f'<a href="#p{number}">{name}</a>'
        place = "" if one["place"] is None else str(one["place"])
        rows.append({"prompt": name, "verdict": verdict, "parts at": place})
    first, second = content["engines"]
    page = filled(
        "page.html",
        command="conform",
        title=in_html(second),
        style=read("page.css"),
        heading=notes(
            f"{first}, held against it {second}",
            ", ".join(f"{name} {x}" for name, x in content["request"].items()),
        ),
        verdict=notes(*lines),
        summary=table_of(rows),
        sections="".join(sections),
    ).encode()
    write_atomically(file, lambda partial: partial.write_bytes(page))


def _around(texts: list[str], engines: list[str]) -> list[tuple[str, str, str]]:
    """Return of each engine its name, and its text before and behind where the two part."""
    common = len(os.path.commonprefix(texts))
    start, end = max(common - _SHOWN, 0), common + _SHOWN
    return [
        (name, text[start:common], text[common:end])
        for name, text in zip(engines, texts, strict=True)
    ]
