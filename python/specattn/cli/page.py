"""What `specattn compare --html` writes: one page without scripts that needs nothing but itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specattn.cli.loading import Prompt
from specattn.cli.session import Continuation, DecodingSession, Text
from specattn.cli.table import figures, legend
from specattn.files import write_atomically
from specattn.pages.authors import Authors
from specattn.pages.html import filled, in_html, notes, read, table_of
from specattn.pages.rounds import PARTS, css_class, drafters, most_gained, positions, time_line

_SHOWN = 60  # tokens of the prompt's end that stand before a text


def write_page(
    file: Path,
    session: DecodingSession,
    runs: dict[str, Continuation],
    identical: bool | None,
    lines: list[str],
) -> None:
    """Write the page whole, or leave what was there; `identical` is None where not judged."""
    longest = max((one.statistics.decode_seconds for one in runs.values()), default=0.0)
    most = max((most_gained(one.statistics) for one in runs.values()), default=1)
    sections = [
        _section(session, number, method, one, longest, most)
        for number, (method, one) in enumerate(runs.items())
    ]
    said = {True: "yes", False: "no", None: "not judged"}[identical]
    kind = "note" if identical is None else said
    verdict = f'<p>Outputs identical, token for token: <span class="{kind}">{said}</span></p>'
    page = filled(
        "page.html",
        command="compare",
        title=in_html(", ".join(runs)),
        style=read("page.css"),
        heading=_heading(session.to_dict()),
        verdict=verdict + notes(*lines),
        summary=_summary(runs),
        sections="".join(sections),
    ).encode()
    write_atomically(file, lambda partial: partial.write_bytes(page))


def _heading(facts: dict[str, Any]) -> str:
    """Return what was continued, by which model, how."""
    model, prompts = facts["model"], facts.get("prompts") or [facts["prompt"]]
    read = (f"{one['tokens']} tokens of {Path(one['file']).name}" for one in prompts)
    kind = ", ".join(model[name] for name in ("model_type", "dtype", "device"))
    return notes(
        f"{'; '.join(read)}, continued by {model['name']} ({kind})",
        ", ".join(f"{name} {x}" for name, x in facts["sampling"].items() if x is not None),
        ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    )


def _summary(runs: dict[str, Continuation]) -> str:
    """Return a line of figures for each method, as wide as it must be."""
    first = next(iter(runs.values()), None)
    rows = [
        {
            "method": f'<a href="#m{number}">{in_html(method)}</a>',
            **figures(one, first),
            "KV cache": _bytes(one.statistics.cache_bytes),
            "drafters' caches": _bytes(one.statistics.drafter_cache_bytes),
            "peak memory": _bytes(one.peak_bytes),
        }
        for number, (method, one) in enumerate(runs.items())
    ]
    note = f"{legend(rows[0])}; peak memory with the weights" if rows else ""
    return f'{table_of(rows)}<p class="note">{note}.</p>'


def _section(
    session: DecodingSession, number: int, method: str, one: Continuation, longest: float, most: int
) -> str:
    """Return all that is shown of one method, on the scales of all."""
    found, authors = one.statistics, Authors(method.partition(":")[0])
    texts = zip(session.prompts, one.texts, found.requests, strict=True)
    names = one.authors(authors)
    legend = [
        f'<li><b class="{css_class(name, authors)}">{in_html(meaning)}</b> {count} '
        f"({count / len(names):.0%})</li>"
        for name, meaning, count in authors.counts(names)
    ]
    return filled(
        "section.html",
        number=number,
        method=in_html(method),
        legend="".join(legend),
        texts="".join(_coloured(session, *each, authors) for each in texts),
        passes=found.passes,
        most=most,
        rounds=time_line(found, authors, longest, most),
        seconds=f"{found.decode_seconds:.2f}",
        half=f"{longest / 2:.2g}",
        whole=f"{longest:.2g}",
        **{part: f"{getattr(found, f'{part}_seconds'):.2f}" for part in PARTS},
        drafters=drafters(found, authors),
        positions=positions(found.total),
    )


def _coloured(
    session: DecodingSession, prompt: Prompt, text: Text, request: Any, authors: Authors
) -> str:
    """Return a text behind the end of its prompt, every round's tokens in their colours."""
    before = session.tokenizer.decode(prompt.tokens[-_SHOWN:], skip_special_tokens=True)
    if len(prompt.tokens) > _SHOWN:  # it may begin inside a word
        before = "\N{HORIZONTAL ELLIPSIS} " + before.split(maxsplit=1)[-1]
    pieces = session.pieces(text)
    earlier, pieces = pieces[: text.resumed_at], pieces[text.resumed_at :]
    spans = [_span("prompt", before, "the prompt's end"), _span("earlier", "".join(earlier))]
    begin = 0
    for number, one in enumerate(request.history, start=1):
        said = f"{one.accepted} of {one.drafted} drafted ({one.named(authors.method)})"
        said = f"round {number}: {said if one.drafted else 'nothing drafted'}"
        names = authors.of_round(one)
        parts = dict[str, str]()
        for name, piece in zip(names, pieces[begin:], strict=False):
            parts[name] = parts.get(name, "") + piece
        spans += [_span(css_class(name, authors), part, said) for name, part in parts.items()]
        begin += len(names)
    name = notes(Path(prompt.file).name) if len(session.prompts) > 1 else ""
    return f'{name}<pre tabindex="0">{"".join(spans)}</pre>'


def _span(kind: str, text: str, title: str = "") -> str:
    said = f' title="{in_html(title)}"' if title else ""
    return f'<span class="{kind}"{said}>{in_html(text)}</span>' if text else ""


def _bytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / 2**20:,.1f} MiB"
