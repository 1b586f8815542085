"""What `specattn compare --html` writes: one page without scripts that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from specattn.cli.authors import Authors
from specattn.cli.drawings import css_class, most_gained, positions, time_line
from specattn.cli.loading import Prompt
from specattn.cli.session import Continuation, DecodingSession, Text
from specattn.cli.table import figures, legend
from specattn.decoding import Statistics
from specattn.files import write_atomically

_SHOWN = 60  # tokens of the prompt's end that stand before a text
# What HTML has no character for, as the pictures that Unicode has of it.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}


@dataclass
class Comparison:
    """What a page shows: the median run of each method, and the lines that were printed."""

    session: DecodingSession
    runs: dict[str, Continuation]  # by what --method calls them
    identical: bool | None  # None: not judged
    lines: list[str]


def write_page(comparison: Comparison, file: Path) -> None:
    """Write the page whole, or leave what was there."""
    session, runs = comparison.session, comparison.runs
    longest = max((one.statistics.decode_seconds for one in runs.values()), default=0.0)
    most = max((most_gained(one.statistics) for one in runs.values()), default=1)
    sections = [
        _section(session, number, method, one, longest, most)
        for number, (method, one) in enumerate(runs.items())
    ]
    page = _filled(
        "page.html",
        title=_text(", ".join(runs)),
        style=_read("page.css"),
        heading=_heading(session.to_dict()),
        verdict=_verdict(comparison),
        summary=_summary(runs),
        sections="".join(sections),
    ).encode(errors="replace")
    write_atomically(file, lambda partial: partial.write_bytes(page))


def _read(name: str) -> str:
    return files("specattn.cli").joinpath(name).read_text(encoding="utf-8")


def _filled(name: str, **parts: Any) -> str:
    return Template(_read(name)).substitute(parts)


def _heading(facts: dict[str, Any]) -> str:
    """Return what was continued, by which model, how."""
    model, prompts = facts["model"], facts.get("prompts") or [facts["prompt"]]
    read = (f"{one['tokens']} tokens of {one['file']}" for one in prompts)
    kind = ", ".join(model[name] for name in ("model_type", "dtype", "device"))
    return _notes(
        f"{'; '.join(read)}, continued by {model['path']} ({kind})",
        ", ".join(f"{name} {x}" for name, x in facts["sampling"].items() if x is not None),
        ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    )


def _notes(*lines: str) -> str:
    return "".join(f'<p class="note">{_text(line)}</p>' for line in lines)


def _verdict(comparison: Comparison) -> str:
    said = {True: "yes", False: "no", None: "not judged"}[comparison.identical]
    kind = said if comparison.identical is not None else "note"
    verdict = f'<p>Outputs identical, token for token: <span class="{kind}">{said}</span></p>'
    return verdict + _notes(*comparison.lines)


def _summary(runs: dict[str, Continuation]) -> str:
    """Return a line of figures for each method, as wide as it must be."""
    first = next(iter(runs.values()), None)
    rows = [
        {
            "method": f'<a href="#m{number}">{_text(method)}</a>',
            **figures(one, first),
            "KV cache": _bytes(one.statistics.cache_bytes),
            "drafter's cache": _bytes(one.statistics.details.get("drafter_cache_bytes", 0)),
            "peak memory": _bytes(one.peak_bytes),
        }
        for number, (method, one) in enumerate(runs.items())
    ]
    note = f"{legend(rows[0])}; peak memory with the weights" if rows else ""
    return f'{_table(rows)}<p class="note">{note}.</p>'


def _table(rows: list[dict[str, str]]) -> str:
    """Return rows under their keys."""
    head = "".join(f"<th>{name}</th>" for name in rows[0]) if rows else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row.values()) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _section(
    session: DecodingSession, number: int, method: str, one: Continuation, longest: float, most: int
) -> str:
    """Return all that is shown of one method, on the scales of all."""
    found, authors = one.statistics, Authors(method.partition(":")[0])
    texts = zip(session.prompts, one.texts, found.requests, strict=True)
    return _filled(
        "section.html",
        number=number,
        method=_text(method),
        legend=_legend(one.authors(authors), authors),
        texts="".join(_coloured(session, *each, authors) for each in texts),
        passes=found.passes,
        most=most,
        rounds=time_line(found, authors, longest, most),
        parts=_parts(found),
        drafters=_drafters(found, authors),
        positions=positions(found.total),
    )


def _coloured(
    session: DecodingSession, prompt: Prompt, text: Text, request: Any, authors: Authors
) -> str:
    """Return a text behind the end of its prompt, every round's tokens in their colours."""
    before = session.tokenizer.decode(prompt.tokens[-_SHOWN:], skip_special_tokens=True)
    pieces = session.pieces(text)
    earlier, pieces = pieces[: text.resumed_at], pieces[text.resumed_at :]
    spans = [_span("prompt", before, "the prompt's end"), _span("earlier", "".join(earlier))]
    begin = 0
    for number, one in enumerate(request.history, start=1):
        said = f"round {number}: "
        said += f"{one.accepted} of {one.drafted} drafted" if one.drafted else "nothing drafted"
        said += f" ({one.named(authors.method)})" if one.drafted else ""
        names = authors.of_round(one)
        parts = dict[str, str]()
        for name, piece in zip(names, pieces[begin:], strict=False):
            parts[name] = parts.get(name, "") + piece
        spans += [_span(css_class(name, authors), part, said) for name, part in parts.items()]
        begin += len(names)
    name = _notes(prompt.file) if len(session.prompts) > 1 else ""
    return f'{name}<pre tabindex="0">{"".join(spans)}</pre>'


def _span(kind: str, text: str, title: str = "") -> str:
    said = f' title="{_text(title)}"' if title else ""
    return f'<span class="{kind}"{said}>{_text(text)}</span>' if text else ""


def _legend(names: list[str], authors: Authors) -> str:
    """Return what the colours of a text mean, and how many tokens have them."""
    return _key(
        f'<li><b class="{css_class(name, authors)}">{_text(meaning)}</b> {count} '
        f"({count / len(names):.0%})</li>"
        for name, meaning, count in authors.counts(names)
    )


def _key(items: Iterable[str]) -> str:
    return f'<ul class="key">{"".join(items)}</ul>'


def _parts(found: Statistics) -> str:
    """Return the colours of the strip, and what each part took."""
    parts = {
        "t-draft": f"drafting {found.draft_seconds:.2f} s",
        "t-target": f"target {found.target_seconds:.2f} s",
        "t-accept": f"acceptance {found.accept_seconds:.2f} s",
    }
    return _key(f'<li class="swatch {name}">{said}</li>' for name, said in parts.items())


def _drafters(found: Statistics, authors: Authors) -> str:
    """Return what the rounds of each drafter gave and took."""
    figures = found.by_drafter(authors.method)
    heads = {"rounds": "rounds", "tokens per round": "tokens each", "ms per round": "ms each"}
    return _table(
        [
            {"drafted by": _text(name)} | {heads[key]: f"{figures[key][name]}" for key in heads}
            for name in figures["rounds"]
        ]
    )


def _bytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / 2**20:,.1f} MiB"


def _text(text: str) -> str:
    """Return text as it stands in HTML, in quotes too."""
    return escape(text.translate(_CONTROLS))
