"""LongSpec's tables: speed by data set, by length of the prompt, and after short ones."""

from __future__ import annotations

from decoding.cases import PLAIN, TRANSFORMERS, Entry, grid
from decoding.sections import Section

from .papers import Scale, published, theirs

CODE = ("LCC", "RepoBench-P")


def sections(scale: Scale) -> list[Section]:
    """Return the paper's sections."""
    table_3, table_5 = (published("longspec", f"Table {n}") for n in (3, 5))
    own = scale.entry("longspec")
    methods = [Entry(PLAIN), Entry(TRANSFORMERS), own]
    speeds = ("tau", "tokens/s", "x plain")
    step = scale.long // 4
    return [
        Section(
            "Table 1",
            "tau, tokens/s and speed-up at temperature 0",
            grid(methods, [scale.long]),
            speeds,
            theirs(
                "longspec", "Table 1", where=lambda names: "LongSpec" in names and names[-1] in CODE
            ),
            "The paper's rows are its two data sets of source code; x plain is over Vanilla FA.",
            pictures=("speed", "acceptance"),
        ),
        Section(
            "Table 2",
            "with and without anchor-offset indices",
            note="Needs two drafters; measure each with --method longspec:drafter=FOLDER.",
        ),
        Section(
            "Table 3",
            "long outputs after short prompts",
            grid(methods, [scale.short]),
            speeds,
            [
                (f"LongSpec, QwQ-32B, {data}", *(f"{x:.2f}" for x in (*ours, ours[1] / plain[1])))
                for data, ours in table_3["LongSpec"].items()
                for plain in [table_3["Vanilla"][data]]
            ],
            "x plain of the paper's rows: their tokens/s over their Vanilla's.",
            longer=4,
        ),
        Section(
            "Table 4",
            "beside EAGLE and Token Recycling",
            grid([scale.entry("token_recycling")], [scale.long]),
            ("tau", "tokens/s"),
            theirs("longspec", "Table 4", where=lambda names: names[-1] in CODE),
            "LongSpec itself is in table 1, EAGLE-2 in the suite of PosS.",
        ),
        Section(
            "Table 5",
            "by length of the prompt",
            grid([own], [step * n for n in (1, 2, 3, 4)]),
            ("tokens/s", "tau", "draft ms", "target ms", "accept ms"),
            [
                (f"LC-7B, {length}", *(f"{row[length]:.2f}" for row in table_5.values()))
                for length in table_5["tau"]
            ],
            "What the paper calls verification is our accept: acceptance, commit and stopping.",
            pictures=("speed",),
        ),
    ]
