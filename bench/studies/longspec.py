"""LongSpec's tables: speed by data set, by length of the prompt, and after short ones."""

from __future__ import annotations

from decoding.cases import PLAIN, TRANSFORMERS, Entry, grid
from decoding.sections import Section, figures

from .papers import Scale, published


def sections(scale: Scale) -> list[Section]:
    """Return the paper's sections."""
    table_1, table_3, table_4, table_5 = (published("longspec", f"Table {n}") for n in (1, 3, 4, 5))
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
            [
                (f"LongSpec, {model}, {data}", *figures(table_1[model]["LongSpec"][data]))
                for model in table_1
                for data in ("LCC", "RepoBench-P")
            ],
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
                (f"LongSpec, QwQ-32B, {data}", *figures((*ours, ours[1] / plain[1])))
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
            [
                (f"{method}, {model}, {data}", *figures(rows[data]))
                for model, methods_of in table_4.items()
                for method, rows in methods_of.items()
                for data in ("LCC", "RepoBench-P")
            ],
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
