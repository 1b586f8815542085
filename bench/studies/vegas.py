"""Vegas' tables and figures: acceptance, and speed beside the methods that it compares."""

from __future__ import annotations

from decoding.cases import PLAIN, TRANSFORMERS, Entry, grid
from decoding.sections import Section

from .papers import Scale, published, theirs

RIVALS = {
    "streaming": "MagicDec-Stream",
    "quest": "MagicDec-Quest",
    "specextend": "SpecExtend",
}
"""What the paper calls the methods that it compares."""
PLOT = "A plot: the paper prints no figures."


def sections(scale: Scale) -> list[Section]:
    """Return the paper's sections."""
    gamma = published("vegas", "Table 3")["Qwen3-8B"]
    short_gamma, long_gamma = gamma["AIME25"], gamma["LongBench-v2"]
    baselines = [Entry(PLAIN), Entry(TRANSFORMERS)]
    drafted = published("vegas", "Table 3, rivals")
    quest = published("vegas", "Figures 2 and 3")
    low, high = published("vegas", "Figure 9")["Vegas"]
    _, highest = published("vegas", "Figures 9 and 11")["Vegas"]
    more = published("vegas", "Figure 11")["Vegas"]
    selecting = published("vegas", "Figure 10b")
    least, most = selecting.pop("Vegas, lowest and highest")
    others = ", ".join(f"{name} {percent}%" for name, percent in selecting.items())

    def rivals(gammas: dict[str, int]) -> list[Entry]:
        return [scale.entry(name, gamma=gammas[printed]) for name, printed in RIVALS.items()]

    def own(data: str) -> dict[str, int]:
        return {name: of[data] for name, of in drafted.items()}

    def vegas(**options: object) -> Entry:
        return scale.entry("vegas", **options)

    def ranked(ranking: str, rows: str) -> Entry:
        return vegas(gamma=7, ratio=0.07, rows=rows, ranking=ranking)

    magicdec = [scale.entry(name, gamma=5) for name in ("streaming", "quest")]
    equal = rivals(dict.fromkeys(drafted, short_gamma))
    swept = [vegas(gamma=g, ratio=ratio) for g in (3, 6, 9) for ratio in (0.03, 0.07, 0.2)]
    return [
        Section(
            "Figures 2 and 3",
            "tokens per round and throughput of MagicDec's two drafters",
            grid([Entry(PLAIN), *magicdec], [scale.long], [1.0]),
            ("tau", "tokens/s"),
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
                [vegas(gamma=g, ratio=0.07, rows=rows) for rows in ("all", "two") for g in (7, 11)],
                [scale.long],
                [0.0],
            ),
            ("accepted",),
            theirs("vegas", "Table 1", "", "", "gamma="),
            "rows=two: the first draft token and the bonus token.",
            pictures=("acceptance",),
        ),
        Section(
            "Figure 4",
            "acceptance by position: what ranks the prefix, by weight and (appendix B) by logit",
            grid(
                [ranked(by, rows) for by in ("weight", "logit") for rows in ("last", "all", "two")],
                [scale.long],
                [1.0],
            ),
            ("accepted", "given all before, %"),
            note=PLOT,
            pictures=("acceptance",),
        ),
        Section(
            "Figure 9",
            "throughput after short prompts, long outputs",
            grid(
                [*baselines, *rivals(own("AIME25")), vegas(gamma=short_gamma)],
                [scale.short],
                [1.0],
            ),
            ("tokens/s", "x plain", "tau"),
            [("Vegas, all models, over vLLM", "", f"{low:.2f} to {high:.2f}")],
            "The paper serves 128 requests at once; here it is one.",
            longer=4,
            pictures=("speed",),
        ),
        Section(
            "Figure 10",
            "(a) tokens per round, bonus included; (b) what selecting costs",
            grid([*equal, vegas(gamma=short_gamma)], [scale.short], [1.0]),
            ("tau",),
            note=f"(paper: selecting adds {least}% to {most}% with Vegas, {others})\n"
            "(a) is a plot: the paper prints no figures. All draft as many tokens as Vegas.",
            passes=short_gamma,
            pictures=("acceptance",),
        ),
        Section(
            "Figure 11",
            "throughput after long prompts",
            grid(
                [*baselines, *rivals(own("LongBench-v2")), vegas(gamma=long_gamma)],
                [scale.long],
                [1.0],
                batches=[1, 4],
            ),
            ("B", "tokens/s", "x plain", "tau"),
            [("Vegas, best of figures 9 and 11, over vLLM", "", "", f"{highest:.2f}")],
            f"The paper's gain over the best rival is {more[0]}% to {more[1]}%. Each drafts as "
            "many tokens as the paper gives it.",
            pictures=("speed",),
        ),
        Section("Figure 12", "an example of two rounds", note="A drawing; nothing to measure."),
        Section(
            "Figure 13",
            "throughput over gamma and the share of the cache",
            grid([Entry(PLAIN), *swept], [scale.long], [1.0]),
            ("tokens/s", "accepted", "x plain"),
            note=PLOT,
            pictures=("sweep",),
        ),
    ]
