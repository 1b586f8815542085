"""TokenSwift's tables (arXiv 2502.18890): long generation after prompts of a few thousand tokens.

The law is that of its table 10 for LLaMA3.1-8b: temperature 1, min-p 0.1, penalty 1.2 over the last
1024 tokens. The partial cache has the prompt's size, as there. Alpha is what a method accepts per
round over the levels that its drafts have: the paper's 4 here are 4 for TokenSwift and 3 for
Medusa, whose first level is the root.
"""

from __future__ import annotations

from dataclasses import replace

from decoding.cases import PLAIN, Entry, Group, grid
from decoding.sections import Section, figures
from decoding.shaping import Shaping

from .papers import Scale, published

LAW = Shaping(penalty=1.2, penalty_window=1024, min_p=0.1)
TRUNCATIONS = {
    "top-p": Shaping(top_p=0.9),
    "eta": Shaping(eta=2e-4),
    "min-p": Shaping(min_p=0.1),
}
FIFTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Lengths are fifths of what is generated, as the paper's 20K to 100K."""
LONGER = 32
WHOLE = 2**17  # a budget that no cache here reaches


def sections(scale: Scale) -> list[Section]:
    """Return the tables that this package can measure."""
    ours = ("alpha", "x plain")
    variety = ("D1", "D2", "D3", "D4", "mean")
    prompt = scale.long
    return [
        Section(
            "Table 3",
            "acceptance and speed by tokens generated, after prompts of two lengths",
            [
                group
                for context in (prompt // 2, prompt)
                for group in _groups(
                    context,
                    [
                        _swift(scale, context),
                        scale.entry("medusa"),
                        scale.entry("triforce", gamma=4, budget=context),
                        scale.entry("prompt_lookup"),
                        scale.entry("token_recycling"),
                    ],
                )
            ],
            (*ours, "beta, whole"),
            [
                (f"{method}, prompt {prefix}, {length}", *figures(pair), "")
                for method, prefixes in published("tokenswift", "Table 3").items()
                for prefix, lengths in prefixes.items()
                for length, pair in lengths.items()
            ],
            "The paper's table has two models; its transcript here keeps the first half of the "
            "columns. Beta is of the whole generation. The paper's TriForce renews its partial "
            "cache; ours has one of the same size that is chosen once, and no small model below.",
            longer=LONGER,
            lengths=FIFTHS,
            pictures=("lengths",),
        ),
        Section(
            "Table 4",
            "minutes until so many tokens are generated",
            columns=(*ours, "plain, min", "min"),
            theirs=[
                (f"TokenSwift, {model}, {length}", *figures(row))
                for model, lengths in published("tokenswift", "Table 4").items()
                for length, row in lengths.items()
            ],
            note="Our rows are table 3's: one model here, where the paper has three sizes.",
            lengths=FIFTHS,
            rows_of="Table 3",
        ),
        Section(
            "Figure 3",
            "with n-grams and without",
            _groups(prompt, [_swift(scale, prompt), _swift(scale, prompt, k=0)]),
            (*ours, "beta, whole"),
            note="A plot: the paper prints no figures.",
            longer=LONGER,
            lengths=FIFTHS,
            pictures=("lengths",),
        ),
        Section(
            "Table 5",
            "what the draft reads, without n-grams",
            _groups(
                prompt,
                [
                    _swift(scale, prompt, k=0, budget=WHOLE),
                    _swift(scale, prompt, k=0, dynamic=False),
                    _swift(scale, prompt, k=0),
                ],
            ),
            ours,
            _by_length("Table 5"),
            f"A budget of {WHOLE} is the full cache.",
            longer=LONGER,
            lengths=FIFTHS,
        ),
        Section(
            "Table 6",
            "variety with and without penalty",
            [
                group
                for truncation in TRUNCATIONS.values()
                for shaping in (replace(truncation, penalty=LAW.penalty), truncation)
                for group in _groups(prompt, [_swift(scale, prompt)], shaping)
            ],
            (*variety, "x plain"),
            _whole("Table 6"),
            longer=LONGER,
        ),
        Section(
            "Table 7",
            "trees, without n-grams",
            _groups(
                prompt,
                [
                    _swift(scale, prompt, k=0, widths=widths)
                    for widths in ([3, 3, 3, 3], [1, 9, 9, 9], [1, 3, 3, 3])
                ],
            ),
            ours,
            _by_length("Table 7"),
            longer=LONGER // 4,
            lengths=FIFTHS,
        ),
        Section(
            "Table 8",
            "variety by penalty",
            [
                Group(prompt, 1, 1.0, (_swift(scale, prompt),), replace(LAW, penalty=theta))
                for theta in map(float, published("tokenswift", "Table 8"))
            ],
            variety,
            _whole("Table 8"),
            longer=LONGER,
        ),
    ]


def _swift(scale: Scale, context: int, **options: object) -> Entry:
    """Return TokenSwift with a partial cache of the prompt's size."""
    return scale.entry("tokenswift", **{"budget": context, **options})


def _groups(context: int, entries: list[Entry], shaping: Shaping = LAW) -> list[Group]:
    return grid([Entry(PLAIN), *entries], [context], [1.0], shaping=shaping)


def _by_length(table: str) -> list[tuple[str, ...]]:
    return [
        (f"{name}, {length}", *figures(pair))
        for name, lengths in published("tokenswift", table).items()
        for length, pair in lengths.items()
    ]


def _whole(table: str) -> list[tuple[str, ...]]:
    return [(name, *figures(row)) for name, row in published("tokenswift", table).items()]
