"""PosS' tables and figures: its five drafters on one target, by depth and size of the tree.

Only one drafter lies with a target. The others are named on the command line, and all that are
named are compared: ``--method poss:drafter=out/hass --method poss:drafter=out/poss-1 ...``.
"""

from __future__ import annotations

from typing import Any

from decoding.cases import PLAIN, TRANSFORMERS, Entry, grid
from decoding.sections import Section

from .papers import Scale, published, theirs

DEPTHS, SIZES = (6, 7, 8, 9), (60, 80)
WINDOW = 512
PARTS = ("draft ms", "target ms", "accept ms", "catch-up ms", "tree building")
PLOT = "A plot: the paper prints no figures."


def sections(scale: Scale) -> list[Section]:
    """Return the paper's sections, and those on tree building, catching up and long contexts."""
    family = [entry for entry in scale.entries if entry.name == "poss"] or [Entry("poss")]
    taus, speedups = (theirs("poss", f"Table 1, {what}") for what in ("tau", "speed-up"))
    return [
        Section(
            "Table 1",
            "tau and speed-up at temperature 0, depth 6, 60 tokens",
            grid([Entry(PLAIN), Entry(TRANSFORMERS), *family], [scale.short]),
            ("tau", "x plain", "tokens/s", "peak MiB"),
            [
                (f"{name}, mean of six data sets", tau[-1], faster[-1])
                for (name, *tau), (_, *faster) in zip(taus, speedups, strict=True)
            ],
            "Figure 4, the memory of each, is a plot; here it is that of the whole process.",
            pictures=("speed",),
        ),
        Section(
            "Figure 1",
            "acceptance by position, given all before, depth 6",
            grid(family, [scale.short], [0.0, 1.0]),
            [f"pos-acc {place}" for place in range(1, 7)],
            note=PLOT,
            pictures=("acceptance",),
        ),
        *_sweeps(scale),
        Section(
            "Figure 3",
            "acceptance by position, given all before, depth 8",
            grid([_with(entry, depth=8) for entry in family], [scale.short]),
            [f"pos-acc {place}" for place in range(1, 9)],
            note=PLOT,
            pictures=("acceptance",),
        ),
        Section(
            "Figure 5",
            "where the time of a round goes, and how many rounds it takes, by depth",
            grid([_with(e, depth=d) for d in DEPTHS for e in family], [scale.short]),
            (*PARTS, "rounds"),
            note=f"{PLOT} Verification is the target's pass and "
            "acceptance; catching up is that of all specialists on the accepted path.",
            pictures=("parts",),
        ),
        Section(
            "Long context",
            "a drafter of short rows in long texts, with a window and without",
            grid(
                [Entry(PLAIN), *(_with(family[0], **o) for o in ({}, {"window": WINDOW}))],
                [scale.long // share for share in (16, 4, 2, 1)],
                [0.0, 1.0],
            ),
            ("T", "tau", "x plain", *PARTS),
            note="Not in the paper, whose contexts end at 2048 tokens.",
            pictures=("speed", "acceptance"),
        ),
    ]


def _sweeps(scale: Scale) -> list[Section]:
    entry = scale.entry("poss")
    swept = [_with(entry, depth=depth, total_tokens=size) for depth in DEPTHS for size in SIZES]
    measured = Section(
        "Tables 2 and 3",
        "tau and speed-up by depth and size of the tree",
        grid([Entry(PLAIN), *swept], [scale.short], [0.0, 1.0]),
        ("T", "tau", "x plain"),
        _theirs("Table 2", "Table 3", "Llama-3-8B"),
    )
    other = Section(
        "Tables 4 and 5",
        "the same for another target",
        columns=("T", "tau", "x plain"),
        theirs=_theirs("Table 4", "Table 5", "Llama-2-13B"),
        note="Another target's figures; name one with --model.",
    )
    return [measured, other]


def _theirs(taus: str, speedups: str, model: str) -> list[tuple[str, ...]]:
    lengths, ratios = published("poss", taus), published("poss", speedups)
    shapes = [(depth, size) for depth in DEPTHS for size in SIZES]
    return [
        (
            f"{method}, {model}, depth={depth} total_tokens={size}",
            temperature,
            *(f"{x:.2f}" for x in both),
        )
        for temperature, rows in lengths.items()
        for method in rows
        for (depth, size), *both in zip(
            shapes, rows[method], ratios[temperature][method], strict=True
        )
    ]


def _with(entry: Entry, **options: Any) -> Entry:
    return Entry(entry.name, {**entry.options, **options})
