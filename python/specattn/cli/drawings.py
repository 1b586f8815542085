"""Pictures of a run as SVG and HTML: its rounds on a time line, acceptance by position."""

from __future__ import annotations

from collections import Counter, defaultdict
from html import escape
from itertools import accumulate

from specattn.cli.authors import TARGET, Authors
from specattn.decoding import RequestStatistics, Statistics

_WIDTH, _GAINS, _STRIP = 1000, 60, 16  # units of the drawing: its width, and two heights
_PARTS = ("draft", "target", "accept")


def time_line(statistics: Statistics, authors: Authors, longest: float, most: int) -> str:
    """Draw what every pass gave, as bars of tokens, over a strip of what took its time.

    The whole width stands for `longest` seconds, the height of the bars for `most` tokens.
    """
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
        for part, seconds in zip(_PARTS, parts, strict=True):
            paths[f"t-{part}"].append(_box(x, _GAINS + 4, seconds * scale, _STRIP))
            x += seconds * scale
    drawn = "".join(f'<path class="{name}" d="{"".join(d)}"/>' for name, d in paths.items())
    height = _GAINS + 4 + _STRIP
    label = f"{statistics.passes} passes in {statistics.decode_seconds:.2f} s"
    return (
        f'<svg class="line" viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{drawn}</svg>'
        f'<div class="axis"><span>0 s</span><span>{longest / 2:.2g} s</span>'
        f"<span>{longest:.2g} s</span></div>"
    )


def most_gained(statistics: Statistics) -> int:
    """Return the most tokens that a pass gave to all requests together."""
    gains = Counter[int]()
    for request in statistics.requests:
        gains.update({number: len(one.tokens) for number, one in enumerate(request.history)})
    return max(gains.values(), default=1)


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


_KEY = """\
<ul class="key"><li class="swatch all-key">of all rounds</li>
<li class="swatch given-key">of those that drafted one there, with none rejected before</li>
<li>dashed: 100%</li></ul>"""


def positions(total: RequestStatistics) -> str:
    """Draw the acceptance at each position of the drafts: a bar each, of two figures."""
    if not total.accepted_at:
        return "<p>Nothing was drafted.</p>"
    rates, bars = total.position_rates, []
    figures = zip(rates, total.conditional_rates, total.offered_at, strict=True)
    for place, (rate, given, offered) in enumerate(figures, start=1):
        said = (
            f"position {place}: {rate:.0%} of all rounds accepted a token there; "
            f"{given:.0%} of the {offered} whose draft went there and had none rejected before"
        )
        shown = place if len(rates) <= 12 or place % 4 == 0 else ""
        bars.append(
            f'<div title="{escape(said)}"><i class="given" style="height:{100 * given:.1f}%"></i>'
            f'<i class="all" style="height:{100 * rate:.1f}%"></i><b>{shown}</b></div>'
        )
    spoken = ", ".join(f"{rate:.0%}" for rate in rates)
    label = f"share of rounds that accept a token at position 1, 2, ...: {spoken}"
    return f'<div class="places" role="img" aria-label="{label}">{"".join(bars)}</div>{_KEY}'
