"""What `specattn compare --html` writes: one page without scripts that needs nothing but itself."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from specattn.cli.authors import Authors
from specattn.cli.drawings import css_class, most_gained, positions, time_line
from specattn.cli.session import Continuation, DecodingSession, Text
from specattn.cli.table import figures, legend
from specattn.decoding import RequestStatistics
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
    text = _page(comparison)
    write_atomically(
        file, lambda partial: partial.write_text(text, encoding="utf-8", errors="replace")
    )


def _page(comparison: Comparison) -> str:
    session, runs = comparison.session, comparison.runs
    longest = max((one.statistics.decode_seconds for one in runs.values()), default=0.0)
    most = max((most_gained(one.statistics) for one in runs.values()), default=1)
    sections = [
        f'<section id="m{number}">\n<h2>{_text(method)}</h2>\n'
        + _section(session, Authors(method.partition(":")[0]), one, longest, most)
        for number, (method, one) in enumerate(runs.items())
    ]
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>specattn compare: {_text(", ".join(runs))}</title>
<style>
{files("specattn.cli").joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<h1>specattn compare</h1>
{_heading(session.to_dict())}
{_verdict(comparison)}
{_summary(runs)}
{"".join(sections)}
</body>
</html>
"""


def _heading(facts: dict[str, Any]) -> str:
    """Return what was continued, by which model, how."""
    model, sampling = facts["model"], facts["sampling"]
    prompts = facts.get("prompts") or [facts["prompt"]]
    read = "; ".join(f"{one['tokens']} tokens of {one['file']}" for one in prompts)
    given = ", ".join(f"{name} {value}" for name, value in sampling.items() if value is not None)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    about = (
        f"{read}, continued by {model['path']} ({model['model_type']}, {model['dtype']}, "
        f"{model['device']})",
        given,
        versions,
    )
    return "".join(f'<p class="note">{_text(line)}</p>' for line in about)


def _verdict(comparison: Comparison) -> str:
    said = {True: "yes", False: "no", None: "not judged"}[comparison.identical]
    kind = said if comparison.identical is not None else "note"
    lines = "".join(f'<p class="note">{_text(line)}</p>' for line in comparison.lines)
    return f'<p>Outputs identical, token for token: <span class="{kind}">{said}</span></p>{lines}'


def _summary(runs: dict[str, Continuation]) -> str:
    """Return a line of figures for each method, as wide as it must be."""
    first = next(iter(runs.values()), None)
    rows = [
        {
            "method": f'<a href="#m{number}">{_text(method)}</a>',
            **figures(one, first),
            "KV cache": _bytes(one.statistics.cache_bytes),
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
    session: DecodingSession, authors: Authors, one: Continuation, longest: float, most: int
) -> str:
    """Return all that is shown of one method, on the scales of all."""
    found = one.statistics
    texts = zip(session.prompts, one.texts, found.requests, strict=True)
    written = [
        (f'<p class="note">{_text(prompt.file)}</p>' if len(one.texts) > 1 else "")
        + _coloured(session, prompt.tokens, text, request, authors)
        for prompt, text, request in texts
    ]
    return f"""\
{_legend(one.authors(authors), authors)}
{"".join(written)}
<h3>Rounds on a time line</h3>
<p class="note">Above, what each of {found.passes} passes gave, at most {most} tokens; below, what
took its time. Coloured is what was drafted, grey the target's own; all methods have the same
scales.</p>
{time_line(found, authors, longest, most)}
{_parts(one)}
{_drafters(one, authors)}
<h3>Acceptance by position in the draft</h3>
{positions(found.total)}
{_POSITIONS if found.total.accepted_at else ""}
<h3>Memory</h3>
{_memory(one)}
</section>"""


_POSITIONS = """\
<ul class="key"><li class="swatch all-key">of all rounds</li>
<li class="swatch given-key">of those that drafted one there, with none rejected before</li>
<li>dashed: 100%</li></ul>"""


def _coloured(
    session: DecodingSession,
    prompt: list[int],
    text: Text,
    request: RequestStatistics,
    authors: Authors,
) -> str:
    """Return a text behind the end of its prompt, every round's tokens in their colours."""
    before = session.tokenizer.decode(prompt[-_SHOWN:], skip_special_tokens=True)
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
    return f'<pre tabindex="0">{"".join(spans)}</pre>'


def _span(kind: str, text: str, title: str = "") -> str:
    said = f' title="{_text(title)}"' if title else ""
    return f'<span class="{kind}"{said}>{_text(text)}</span>' if text else ""


def _legend(names: list[str], authors: Authors) -> str:
    """Return what the colours of a text mean, and how many tokens have them."""
    items = [
        f'<li><b class="{css_class(name, authors)}">{_text(meaning)}</b> {count} '
        f"({count / len(names):.0%})</li>"
        for name, meaning, count in authors.counts(names)
    ]
    return f'<ul class="key">{"".join(items)}</ul>'


def _parts(one: Continuation) -> str:
    """Return the colours of the strip, and what each part took."""
    found = one.statistics
    seconds = (found.draft_seconds, found.target_seconds, found.accept_seconds)
    named = zip(("draft", "target", "accept"), ("drafting", "target", "acceptance"), strict=True)
    items = [
        f'<li class="swatch t-{part}">{name} {time:.2f} s</li>'
        for (part, name), time in zip(named, seconds, strict=True)
    ]
    return f'<ul class="key">{"".join(items)}</ul>'


def _drafters(one: Continuation, authors: Authors) -> str:
    """Return what the rounds of each drafter gave and took."""
    found = one.statistics.by_drafter(authors.method)
    return _table(
        [
            {
                "drafted by": _text(name),
                "rounds": f"{found['rounds'][name]}",
                "tokens each": f"{found['tokens per round'][name]}",
                "ms each": f"{found['ms per round'][name]}",
            }
            for name in found["rounds"]
        ]
    )


def _memory(one: Continuation) -> str:
    found = one.statistics
    figures = {
        "KV cache of the target": _bytes(found.cache_bytes),
        "peak, weights included": _bytes(one.peak_bytes),
    }
    if (own := found.details.get("drafter_cache_bytes")) is not None:
        figures["cache of the drafter"] = _bytes(own)
    items = "".join(f"<div><dt>{name}</dt><dd>{size}</dd></div>" for name, size in figures.items())
    return f"<dl>{items}</dl>"


def _bytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / 2**20:,.1f} MiB"


def _text(text: str) -> str:
    """Return text as it stands in HTML, in quotes too."""
    return escape(text.translate(_CONTROLS))
