"""What `specattn compare --html` writes: one page without scripts that needs nothing but itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from html import escape
from importlib.resources import files
from itertools import accumulate, zip_longest
from pathlib import Path
from string import Template
from typing import Any

from specattn.cli.authors import TARGET, Authors
from specattn.cli.loading import Prompt
from specattn.cli.session import Continuation, DecodingSession, Text
from specattn.cli.table import figures, legend
from specattn.cli.terminal import escaped
from specattn.decoding import RequestStatistics, Statistics
from specattn.files import write_atomically

_SHOWN = 60  # tokens of the prompt's end that stand before a text
_WIDTH, _GAINS, _STRIP = 1000, 60, 16  # of a time line, as section.html says: two heights
_PARTS = ("draft", "target", "accept")


def write_page(
    file: Path,
    session: DecodingSession,
    runs: dict[str, Continuation],
    identical: bool | None,
    lines: list[str],
) -> None:
    """Write the page whole, or leave what was there; `identical` is None where not judged."""
    longest = max((one.statistics.decode_seconds for one in runs.values()), default=0.0)
    most = max((_most_gained(one.statistics) for one in runs.values()), default=1)
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


def read(name: str) -> str:
    """Return a file of this folder."""
    return files("specattn.cli").joinpath(name).read_text(encoding="utf-8")


def filled(name: str, **parts: Any) -> str:
    """Return a template of this folder with its parts."""
    return Template(read(name)).substitute(parts)


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


def notes(*lines: str) -> str:
    """Return lines of small print."""
    return "".join(f'<p class="note">{in_html(line)}</p>' for line in lines)


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


def _section(
    session: DecodingSession, number: int, method: str, one: Continuation, longest: float, most: int
) -> str:
    """Return all that is shown of one method, on the scales of all."""
    found, authors = one.statistics, Authors(method.partition(":")[0])
    texts = zip(session.prompts, one.texts, found.requests, strict=True)
    names = one.authors(authors)
    legend = [
        f'<li><b class="{_css_class(name, authors)}">{in_html(meaning)}</b> {count} '
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
        rounds=_time_line(found, authors, longest, most),
        seconds=f"{found.decode_seconds:.2f}",
        half=f"{longest / 2:.2g}",
        whole=f"{longest:.2g}",
        **{part: f"{getattr(found, f'{part}_seconds'):.2f}" for part in _PARTS},
        drafters=_drafters(found, authors),
        positions=_positions(found.total),
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
        spans += [_span(_css_class(name, authors), part, said) for name, part in parts.items()]
        begin += len(names)
    name = notes(Path(prompt.file).name) if len(session.prompts) > 1 else ""
    return f'{name}<pre tabindex="0">{"".join(spans)}</pre>'


def _span(kind: str, text: str, title: str = "") -> str:
    said = f' title="{in_html(title)}"' if title else ""
    return f'<span class="{kind}"{said}>{in_html(text)}</span>' if text else ""


def _drafters(found: Statistics, authors: Authors) -> str:
    """Return what the rounds of each drafter gave and took."""
    figures = found.by_drafter(authors.method)
    heads = {"rounds": "rounds", "tokens per round": "tokens each", "ms per round": "ms each"}
    return table_of(
        [
            {"drafted by": in_html(name)} | {heads[key]: f"{figures[key][name]}" for key in heads}
            for name in figures["rounds"]
        ]
    )


def _time_line(statistics: Statistics, authors: Authors, longest: float, most: int) -> str:
    """Draw each pass' tokens as bars, over its time: `longest` seconds wide, `most` tokens high."""
    begins = accumulate((one.seconds for one in statistics.times), initial=0.0)
    scale, paths = _WIDTH / (longest or 1.0), defaultdict[str, list[str]](list)
    for number, (begin, times) in enumerate(zip(begins, statistics.times, strict=False)):
        x, width = begin * scale, times.seconds * scale
        bottom = 0
        for author, count in _gains(statistics, authors, number).items():
            bottom += count
            y = _GAINS * (1 - bottom / most)
            # A gap between passes, where there is room for one.
            bar = _box(x, y, max(width - 1, 0.8 * width), _GAINS * count / most)
            paths[_css_class(author, authors)].append(bar)
        parts = (times.draft, times.target, times.accept + times.learn)
        for part, seconds in zip(_PARTS, parts, strict=True):
            paths[f"t-{part}"].append(_box(x, _GAINS + 4, seconds * scale, _STRIP))
            x += seconds * scale
    return "".join(f'<path class="{name}" d="{"".join(d)}"/>' for name, d in paths.items())


def _most_gained(statistics: Statistics) -> int:
    """Return the most tokens that a pass gave to all requests together."""
    passes = zip_longest(*(request.history for request in statistics.requests))
    return max((sum(len(one.tokens) for one in each if one) for each in passes), default=1)


def _gains(statistics: Statistics, authors: Authors, number: int) -> dict[str, int]:
    """Return by author what a pass gave, drafted tokens first."""
    rounds = [one.history[number] for one in statistics.requests if number < one.rounds]
    counts = Counter(author for one in rounds for author in authors.of_round(one))
    return dict(sorted(counts.items(), key=lambda item: item[0] in TARGET))


def _box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a part of a path."""
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z"


def _css_class(author: str, authors: Authors) -> str:
    """Return the class of an author's tokens: its name in `TARGET`, or a colour's number."""
    return author if author in TARGET else f"d{authors.number(author) % 6}"


def _positions(total: RequestStatistics) -> str:
    """Draw the acceptance at each position of the drafts: a bar each, of two figures."""
    if not total.accepted_at:
        return "<p>Nothing was drafted.</p>\n"
    rates, bars = total.position_rates, []
    figures = zip(rates, total.conditional_rates, total.offered_at, strict=True)
    for place, (rate, given, offered) in enumerate(figures, start=1):
        said = (
            f"position {place}: {rate:.0%} of all rounds accepted a token there; "
            f"{given:.0%} of the {offered} whose draft went there and had none rejected before"
        )
        shown = place if len(rates) <= 12 or place % 4 == 0 else ""
        bars.append(
            f'<div title="{in_html(said)}"><i class="given" style="height:{100 * given:.1f}%"></i>'
            f'<i class="all" style="height:{100 * rate:.1f}%"></i><b>{shown}</b></div>'
        )
    spoken = ", ".join(f"{rate:.0%}" for rate in rates)
    return filled("positions.html", rates=spoken, bars="".join(bars))


def _bytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / 2**20:,.1f} MiB"


def in_html(text: str) -> str:
    """Return text as it stands in HTML, in quotes too; it has no character for controls."""
    return escape(escaped(text))
