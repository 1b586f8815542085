"""TokenSwift's tables (arXiv 2502.18890): long generation after prompts of a few thousand tokens.

Sampling is as in its table 10 for LLaMA3.1-8b: temperature 1, min-p 0.1, penalty 1.2 over the last
1024 tokens. The partial cache has the prompt's size, as there. Alpha is what a method accepts per
round over the levels that its drafts have: the paper's 4 here are 4 for TokenSwift and 3 for
Medusa, whose first level is the root.
"""

from __future__ import annotations

from dataclasses import replace

from decoding.cases import PLAIN, Entry, Group, grid
from decoding.sections import Section
from decoding.shaping import Shaping

from .papers import Scale, published, theirs

SAMPLING = Shaping(penalty=1.2, penalty_window=1024, min_p=0.1)
TRUNCATIONS = {
    "top-p": Shaping(top_p=0.9),
    "eta": Shaping(eta=2e-4),
    "min-p": Shaping(min_p=0.1),
}
FIFTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Lengths are fifths of what is generated, as the paper's 20K to 100K."""
LONGER = 32
BY_FIFTHS: dict = {"longer": LONGER, "lengths": FIFTHS}
WHOLE = 2**17  # a budget that no cache here reaches


def sections(scale: Scale) -> list[Section]:
    """Return the tables that this package can measure."""
    ours = ("alpha", "x plain")
    variety = ("D1", "D2", "D3", "D4", "mean")
    prompt = scale.long

    def rivals(context: int) -> list[Entry]:
        partial = scale.entry("triforce", gamma=4, budget=context)
        others = map(scale.entry, ("prompt_lookup", "token_recycling"))
        return [_swift(scale, context), scale.entry("medusa"), partial, *others]

    drafts = ({"budget": WHOLE}, {"dynamic": False}, {})
    trees = ([3, 3, 3, 3], [1, 9, 9, 9], [1, 3, 3, 3])
    return [
        Section(
            "Table 3",
            "acceptance and speed by tokens generated, after prompts of two lengths",
            _groups(prompt // 2, rivals(prompt // 2)) + _groups(prompt, rivals(prompt)),
            (*ours, "beta, whole"),
            theirs("tokenswift", "Table 3", "", "prompt "),
            "The paper's table has two models; its transcript here keeps the first half of the "
            "columns. Beta is of the whole generation. The paper's TriForce renews its partial "
            "cache; ours has one of the same size that is chosen once, and no small model below.",
            **BY_FIFTHS,
            pictures=("lengths",),
        ),
        Section(
            "Table 4",
            "minutes until so many tokens are generated",
            columns=(*ours, "plain, min", "min"),
            theirs=theirs("tokenswift", "Table 4"),
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
            **BY_FIFTHS,
            pictures=("lengths",),
        ),
        Section(
            "Table 5",
            "what the draft reads, without n-grams",
            _groups(prompt, [_swift(scale, prompt, k=0, **options) for options in drafts]),
            ours,
            theirs("tokenswift", "Table 5"),
            f"A budget of {WHOLE} is the full cache.",
            **BY_FIFTHS,
        ),
        Section(
            "Table 6",
            "variety with and without penalty",
            [
                group
                for truncation in TRUNCATIONS.values()
                for shaping in (replace(truncation, penalty=SAMPLING.penalty), truncation)
                for group in _groups(prompt, [_swift(scale, prompt)], shaping)
            ],
            (*variety, "x plain"),
            theirs("tokenswift", "Table 6"),
            longer=LONGER,
        ),
        Section(
            "Table 7",
            "trees, without n-grams",
            _groups(prompt, [_swift(scale, prompt, k=0, widths=widths) for widths in trees]),
            ours,
            theirs("tokenswift", "Table 7"),
            longer=LONGER // 4,
            lengths=FIFTHS,
        ),
        Section(
            "Table 8",
            "variety by penalty",
            [
                Group(prompt, 1, 1.0, (_swift(scale, prompt),), replace(SAMPLING, penalty=theta))
                for theta in map(float, published("tokenswift", "Table 8"))
            ],
            variety,
            theirs("tokenswift", "Table 8"),
            longer=LONGER,
        ),
    ]


def _swift(scale: Scale, context: int, **options: object) -> Entry:
    """Return TokenSwift with a partial cache of the prompt's size."""
    return scale.entry("tokenswift", **{"budget": context, **options})


def _groups(context: int, entries: list[Entry], shaping: Shaping = SAMPLING) -> list[Group]:
    return grid([Entry(PLAIN), *entries], [context], [1.0], shaping=shaping)
