"""The papers' tables and figures, laid out as they lay them out, with their figures beside ours.

What is comparable is what does not depend on the machine: tokens per round, and how much faster
than plain decoding. Their tokens/s are shown where a table is about them; they are another model on
another machine.
"""

from __future__ import annotations

from decoding.cases import PLAIN, TRANSFORMERS, Entry, grid

from specattn.decoding import METHODS

from . import poss, tokenswift
from .papers import published
from .sections import (
    Scale,
    Section,
    accepted,
    batch,
    conditional,
    figures,
    over_plain,
    part,
    speed,
    tau,
)

RIVALS = {
    "streaming": "MagicDec-Stream",
    "quest": "MagicDec-Quest",
    "specextend": "SpecExtend",
}
"""What the Vegas paper calls the methods that it compares."""


def _vegas(scale: Scale) -> list[Section]:
    theirs = published("vegas", "Table 1")
    models = ("Qwen3-8B", "gpt-oss-20b")
    gamma = published("vegas", "Table 3")["Qwen3-8B"]
    short_gamma, long_gamma = gamma["AIME25"], gamma["LongBench-v2"]
    baselines = [Entry(PLAIN), Entry(TRANSFORMERS)]
    drafted = published("vegas", "Table 3, rivals")
    quest = published("vegas", "Figures 2 and 3")
    low, high = published("vegas", "Figure 9")["Vegas"]
    _, highest = published("vegas", "Figures 9 and 11")["Vegas"]
    more = published("vegas", "Figure 11")["Vegas"]

    def rivals(gammas: dict[str, int]) -> list[Entry]:
        return [scale.entry(name, gamma=gammas[theirs]) for name, theirs in RIVALS.items()]

    def own(data: str) -> dict[str, int]:
        return {name: of[data] for name, of in drafted.items()}

    return [
        Section(
            "Figures 2 and 3",
            "tokens per round and throughput of MagicDec's two drafters",
            grid(
                [Entry(PLAIN), scale.entry("streaming", gamma=5), scale.entry("quest", gamma=5)],
                [scale.long],
                [1],
                [1.0],
            ),
            {"tau": tau, "tokens/s": speed},
            [
                (f"{name}, Qwen3-8B", "", f"{value:.1f}")
                for name, value in quest["tokens/s"].items()
            ],
            f"In the paper Quest's tau is {quest['tokens per iteration']}% above StreamingLLM's, "
            f"and its selection adds {quest['iteration']}% to a round.",
            pictures=("acceptance",),
        ),
        Section(
            "Table 1",
            "drafted tokens accepted per round, 7% of the cache",
            grid(
                [
                    scale.entry("vegas", gamma=g, ratio=0.07, rows=rows)
                    for rows in ("all", "two")
                    for g in (7, 11)
                ],
                [scale.long],
                [1],
                [0.0],
            ),
            {"accepted": accepted},
            [
                (f"{method}, {model}, gamma={g}", f"{theirs[method][model][str(g)]:.2f}")
                for method in theirs
                for model in models
                for g in (7, 11)
            ],
            "rows=two: the first draft token and the bonus token.",
            pictures=("acceptance",),
        ),
        Section(
            "Figure 4",
            "acceptance by position: what ranks the prefix, by weight and (appendix B) by logit",
            grid(
                [
                    scale.entry("vegas", gamma=7, ratio=0.07, rows=rows, ranking=ranking)
                    for ranking in ("weight", "logit")
                    for rows in ("last", "all", "two")
                ],
                [scale.long],
                [1],
                [1.0],
            ),
            {"accepted": accepted, "given all before": conditional},
            note="A plot: the paper prints no figures.",
            pictures=("acceptance",),
        ),
        Section(
            "Figure 9",
            "throughput after short prompts, long outputs",
            grid(
                [*baselines, *rivals(own("AIME25")), scale.entry("vegas", gamma=short_gamma)],
                [scale.short],
                [1],
                [1.0],
            ),
            {"tokens/s": speed, "x plain": over_plain, "tau": tau},
            [("Vegas, all models, over vLLM", "", f"{low:.2f} to {high:.2f}", "")],
            "The paper serves 128 requests at once; here it is one.",
            longer=4,
            pictures=("speed",),
        ),
        Section(
            "Figure 10",
            "(a) tokens per round, bonus included; (b) what selecting costs",
            grid(
                [
                    *rivals(dict.fromkeys(drafted, short_gamma)),
                    scale.entry("vegas", gamma=short_gamma),
                ],
                [scale.short],
                [1],
                [1.0],
            ),
            {"tau": tau},
            note="(a) is a plot: the paper prints no figures. All draft as many tokens as Vegas.",
            passes=short_gamma,
            pictures=("acceptance",),
        ),
        Section(
            "Figure 11",
            "throughput after long prompts",
            grid(
                [*baselines, *rivals(own("LongBench-v2")), scale.entry("vegas", gamma=long_gamma)],
                [scale.long],
                [1, 4],
                [1.0],
            ),
            {"B": batch, "tokens/s": speed, "x plain": over_plain, "tau": tau},
            [("Vegas, best of figures 9 and 11, over vLLM", "", "", f"{highest:.2f}", "")],
            f"The paper's gain over the best rival is {more[0]}% to {more[1]}%. Each drafts as "
            "many tokens as the paper gives it.",
            pictures=("speed",),
        ),
        Section("Figure 12", "an example of two rounds", note="A drawing; nothing to measure."),
        Section(
            "Figure 13",
            "throughput over gamma and the share of the cache",
            grid(
                [Entry(PLAIN)]
                + [
                    scale.entry("vegas", gamma=g, ratio=ratio)
                    for g in (3, 6, 9)
                    for ratio in (0.03, 0.07, 0.2)
                ],
                [scale.long],
                [1],
                [1.0],
            ),
            {"tokens/s": speed, "accepted": accepted, "x plain": over_plain},
            note="A plot: the paper prints no figures.",
            pictures=("sweep",),
        ),
    ]


def _longspec(scale: Scale) -> list[Section]:
    table_1, table_3 = published("longspec", "Table 1"), published("longspec", "Table 3")
    table_4, table_5 = published("longspec", "Table 4"), published("longspec", "Table 5")
    methods = [Entry(PLAIN), Entry(TRANSFORMERS), scale.entry("longspec")]
    speeds = {"tau": tau, "tokens/s": speed, "x plain": over_plain}
    step = scale.long // 4
    return [
        Section(
            "Table 1",
            "tau, tokens/s and speed-up at temperature 0",
            grid(methods, [scale.long], [1], [0.0]),
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
            grid(methods, [scale.short], [1], [0.0]),
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
            grid([scale.entry("token_recycling")], [scale.long], [1], [0.0]),
            theirs=[
                (f"{method}, {model}, {data}", *figures(rows[data]))
                for model, methods_of in table_4.items()
                for method, rows in methods_of.items()
                for data in ("LCC", "RepoBench-P")
            ],
            columns={"tau": tau, "tokens/s": speed},
            note="LongSpec itself is in table 1, EAGLE-2 in the suite of PosS.",
        ),
        Section(
            "Table 5",
            "by length of the prompt",
            grid([scale.entry("longspec")], [step * n for n in (1, 2, 3, 4)], [1], [0.0]),
            {
                "tokens/s": speed,
                "tau": tau,
                "draft ms": part("draft"),
                "target ms": part("target"),
                "verify ms": part("accept"),
            },
            [
                (f"LC-7B, {length}", *(f"{row[length]:.2f}" for row in table_5.values()))
                for length in table_5["tau"]
            ],
            "Verify is acceptance, commit and stopping.",
            pictures=("speed",),
        ),
    ]


_BUILDERS = {
    "vegas": _vegas,
    "longspec": _longspec,
    "tokenswift": tokenswift.sections,
    "poss": poss.sections,
}
SUITES = tuple(_BUILDERS)


def suite(name: str, scale: Scale) -> list[Section]:
    """Return a paper's sections.

    Raises
    ------
    ValueError
        There is no such suite, or its method is not in this package.
    """
    if name not in _BUILDERS:
        raise ValueError(f"--suite: expected one of {', '.join(SUITES)}, got '{name}'")
    if name not in METHODS:
        raise ValueError(f"--suite {name}: the method '{name}' is not in this package yet")
    return _BUILDERS[name](scale)
