"""The rounds of a run as pictures: on a time line, and acceptance by position in the draft."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate, zip_longest

from specattn.decoding import RequestStatistics, Statistics
from specattn.pages.authors import TARGET, Authors
from specattn.pages.html import filled, in_html, table_of

PARTS = ("draft", "target", "accept")
_WIDTH, _GAINS, _STRIP = 1000, 60, 16  # of a time line, as section.html says: two heights


def time_line(statistics: Statistics, authors: Authors, longest: float, most: int) -> str:
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
            paths[css_class(author, authors)].append(bar)
        parts = (times.draft, times.target, times.accept + times.learn)
        for part, seconds in zip(PARTS, parts, strict=True):
            paths[f"t-{part}"].append(_box(x, _GAINS + 4, seconds * scale, _STRIP))
            x += seconds * scale
    return "".join(f'<path class="{name}" d="{"".join(d)}"/>' for name, d in paths.items())


def most_gained(statistics: Statistics) -> int:
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


def css_class(author: str, authors: Authors) -> str:
    """Return the class of an author's tokens: its name in `TARGET`, or a colour's number."""
    return author if author in TARGET else f"d{authors.number(author) % 6}"


def drafters(found: Statistics, authors: Authors) -> str:
    """Return what the rounds of each drafter gave and took."""
    figures = found.by_drafter(authors.method)
    heads = {"rounds": "rounds", "tokens per round": "tokens each", "ms per round": "ms each"}
    return table_of(
        [
            {"drafted by": in_html(name)} | {heads[key]: f"{figures[key][name]}" for key in heads}
            for name in figures["rounds"]
        ]
    )


def positions(total: RequestStatistics) -> str:
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
