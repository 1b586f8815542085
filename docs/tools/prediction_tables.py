"""Tables of what an H100 would take for Llama 3.1 8B with few bits, from parts that were timed.

A launch of products takes what the kernel of 16 bits took there: a while, and its bytes at a rate.
Each program reads all rows again, from L2. Attention is as `attention_plans` has it, whose times
were fitted to that card, or as `h100/kernels.jsonl` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import mul

from records import markdown, read, size, table

from specattn import attention_plans
from specattn.gpu_record import Shape

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
LAUNCHES = ((6144, 4096, 1), (4096, 4096, 1), (14336, 4096, 2), (4096, 14336, 1))  # N, K, weights
TILE = 32  # outputs of a program
STARTS, RATE, L2 = 2.6, 2.93e6, 5.5e6  # us; bytes in a us, of which L2's is a figure of others
TIMED = ((1, 154.0), (8, 161.0), (16, 162.0))  # us of a layer's products in 16 bits, by rows
HEAD = ((1, 337.0), (16, 349.0))
BESIDE = 410.0  # us of a step behind 512 tokens
WAIT = 150.0  # us of a round, estimated; none is taken for a step of plain decoding
SELECT = 55.0  # us of Vegas' selection in all layers at 32k
CODES = {  # bytes of a weight, and of what its group has
    "int8": (1, 2 / 64),
    "fp8, rows": (1, 0),
    "fp8, blocks": (1, 2 / 128),
    "int4": (0.5, 2 / 64),
}


def products(kind: str, rows: int) -> float:
    """Return the microseconds of a layer's products."""
    if kind == "bfloat16":
        return _of_rows(TIMED, rows)
    code, beside = CODES[kind]
    total = 0.0
    for outputs, depth, weights in LAUNCHES:
        number = outputs * depth * weights
        again = outputs // TILE * rows * depth * 2 + number * beside  # sectors of scales too
        needed = number * (code + beside)
        total += STARTS + max(needed / RATE, (needed + again) / L2)
    return total


def _of_rows(times: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the time of the fewest rows that were timed and are no fewer, or of the most."""
    return next((time for most, time in times if rows <= most), times[-1][1])


@cache
def attention(context: int, rows: int, batch: int = 1, op: str = "hybrid_tree_attention") -> float:
    """Return the microseconds of a layer's attention, of `rows` of each request."""
    group = HEADS // KV_HEADS
    shape = Shape(op, "bf16", HEAD_DIM, group * rows, context, batch)
    kernels = ("cuda", "triton") if op.startswith("sparse") else ("cuda", "triton", "gluon")
    times = (attention_plans.microseconds(name, shape, KV_HEADS, 132) for name in kernels)
    return min(times)


def step(kind: str, context: int, rows: int = 1, batch: int = 1, selected: int = 0) -> float:
    """Return the microseconds of a pass, which attends to `selected` tokens, or to all for 0."""
    of = attention(context, rows, batch)
    if selected:
        of = attention(selected, rows, batch, "sparse_gather_attention")
    layer = products(kind, rows * batch) + of - attention(512, 1)
    return LAYERS * layer + _of_rows(HEAD, rows * batch) + BESIDE


@table("h100-codes")
def h100_codes() -> str:
    """Return a layer's products, and a plain step behind 512 tokens: predicted and timed."""
    plain, rows = step("bfloat16", 512), []
    timed = {
        (one["quantize"] or "bfloat16", one["rows"]): one["time"]["median"] * 1e3
        for one in read("h100/body.jsonl", "pass")
        if one["context"] == 512 and one["how"] == "computed from its parts in graphs"
    }
    for kind in ("bfloat16", *CODES):
        one, more = (step(kind, 512, n) for n in (1, 16))
        more -= LAYERS * (attention(512, 16) - attention(512, 1))  # of products alone
        name = f"{kind}, products as timed" if kind == "bfloat16" else kind
        row = [name, f"{products(kind, 1):.0f}", f"{one / 1e3:.2f}", f"{plain / one:.2f}"]
        row.append(f"{more / one:.2f}")
        if (kind, 1) in timed:
            gain = timed["bfloat16", 1] / timed[kind, 1]
            row.append(f"{timed[kind, 1]:.2f} / {timed[kind, 16]:.2f}")
            row.append(f"{gain:.2f}" if gain >= 1 else f"**{gain:.2f}**")
        else:
            row += ["-", "-"]
        rows.append(row)
    header = ("weights", "a layer's products, 1 row, us", "step, 1 row, ms", "over bfloat16")
    beside = ("step, 16 rows, over 1", "measured, 1 / 16 rows, ms", "over bfloat16, measured")
    return markdown((*header, *beside), rows)


# How many rounds accepted 1, 2, ... tokens of `cast`: the embedded target behind its own text,
# eight files of code and four of prose (docs/log.md).
CAST = {
    ("code", 0): (1.00, 0.97, 0.95, 0.95, 0.95),
    ("prose", 0): (1.00, 0.97, 0.96, 0.96, 0.96),
    ("code", 1): (0.97, 0.94, 0.89, 0.87, 0.81),
    ("prose", 1): (0.89, 0.87, 0.80, 0.72, 0.66),
}
MOST_DRAFTED = 8


def tokens(reached: Sequence[float]) -> float:
    """Return the mean tokens of a round, of which so many accept 1, 2, ..."""
    return 1 + sum(reached)


def constant(rate: float, depth: int) -> list[float]:
    """Return how many rounds accept 1, 2, ... where each token has the same chance."""
    return list(accumulate([rate] * depth, mul))


class Drafting:
    """A method that drafts by weights of 4 bits, and verifies by those of 16."""

    def __init__(self, name: str, context: int, batch: int = 1, selected: int = 0):
        self.name, self.context, self.batch = name, context, batch
        self.plain = step("bfloat16", context, 1, batch)
        self.draft = step("int4", context, 1, batch, selected)
        self.beside = WAIT + (SELECT if selected else 0.0)

    def verify(self, drafted: int) -> float:
        """Return the microseconds of a verification."""
        return step("bfloat16", self.context, drafted + 1, self.batch)

    def over_plain(self, reached: Sequence[float]) -> float:
        """Return times plain decoding, all of these drafted."""
        drafted = len(reached)
        time = drafted * self.draft + self.verify(drafted) + self.beside
        return tokens(reached) * self.plain / time

    def best(self, reached: Sequence[float]) -> tuple[float, int]:
        """Return times plain decoding by the best number drafted, and that."""
        return max((self.over_plain(reached[:n]), n) for n in range(1, len(reached) + 1))

    def rate(self, goal: float) -> float | None:
        """Return from which chance of each token on the goal is met; None: from none."""
        rates = (n / 1000 for n in range(1001))
        found = (x for x in rates if self.best(constant(x, MOST_DRAFTED))[0] >= goal)
        return next(found, None)


@table("h100-drafting")
def h100_drafting() -> str:
    """Return what drafting by 4 bits gains, accepted as measured, and what its goal needs."""
    measured = read("epyc-2core/decoding-cast.jsonl")
    vegas = {
        row["temperature"]: list(accumulate(row["conditional_acceptance"], mul))
        for row in measured
        if row["method"] == "vegas" and row["context"] == 4096
    }
    lines = []
    for kind, context, T, goal in (
        ("code", 512, 0, 1.8), ("prose", 512, 0, 1.8), ("code", 4096, 0, 1.7),
        ("prose", 4096, 0, 1.7), ("code", 512, 1, 1.4), ("prose", 512, 1, 1.4),
        ("prose", 4096, 1, 1.4),
    ):  # fmt: skip
        drafting = Drafting("`cast`", context)
        name = f"`cast`, {kind}, {size(context)}, T={T}"
        lines.append(_line(name, drafting, CAST[kind, T], goal))
    for batch, goal in ((1, 1.8), (4, 1.6)):
        drafting = Drafting("vegas", 32768, batch, round(0.07 * 32768))
        requests = "one request" if batch == 1 else f"{batch} requests"
        for T, reached in sorted(vegas.items()):
            name = f"`vegas:weights=int4`, 32k, {requests}, T={T:g}"
            lines.append(_line(name, drafting, reached, goal if T == 0 else None))
    header = ("method", "plain step / draft step / verification, ms", "drafted", "tokens a round")
    return markdown((*header, "over plain", "goal", "goal needs, of each token"), lines)


def _line(name: str, drafting: Drafting, reached: Sequence[float], goal: float | None) -> list[str]:
    gain, drafted = drafting.best(reached)
    times = drafting.plain, drafting.draft, drafting.verify(drafted)
    line = [name, " / ".join(f"{time / 1e3:.2f}" for time in times), str(drafted)]
    line.append(f"{tokens(reached[:drafted]):.2f}")
    if goal is None:
        return [*line, f"{gain:.2f}", "-", "-"]
    rate = drafting.rate(goal)
    needs = "more than there is" if rate is None else f"{rate:.0%}"
    shown = f"{gain:.2f}" if gain >= goal else f"{gain:.2f}, **missed**"
    return [*line, shown, f"{goal:g}", needs]


# Instructions a key and head of one row of int8, by Triton 3.9 for sm_90: of the kernel that was
# timed, and of what replaced it (tools/ptx/tests/test_eight_bits.py); floats take fewer.
BEFORE, NOW = 48.3, 24.8


@table("h100-eight-bits")
def h100_eight_bits() -> str:
    """Return a plain step behind 128k tokens by what a layer's attention takes there."""
    context, goal = 131072, 1.25
    timed = {
        one["variant"]: one
        for one in read("h100/kernels.jsonl")
        if (one["op"], one["context"], one["batch"], one["rows"])
        == ("hybrid_tree_attention", context, 1, 1)
    }
    whole = timed["contiguous"]["time"]["median"] * 1e6
    other = step("bfloat16", 512) - LAYERS * attention(512, 1)

    def total(us: float) -> float:
        return other + LAYERS * us

    few = timed["chain, int8"]["bytes_read"]
    at_rate = whole * few / timed["contiguous"]["bytes_read"]
    needed = ((other + LAYERS * whole) / goal - other) / LAYERS
    rows = [("bfloat16, as timed", whole, timed["contiguous"]["bytes_read"])]
    for kind in ("int8", "e4m3", "e5m2"):
        rows.append((f"{kind}, as timed", timed[f"chain, {kind}"]["time"]["median"] * 1e6, few))
    rows += [(f"8 bits, for {goal:g}", needed, few), ("8 bits at bfloat16's rate", at_rate, few)]
    as_issued = timed["chain, int8"]["time"]["median"] * 1e6 * NOW / BEFORE
    rows.append(("8 bits, predicted", max(at_rate, as_issued), few))
    lines = [
        (name, f"{us:.0f}", f"{moved / us / 1e6:.2f}", f"{total(us) / 1e3:.1f}", gain)
        for name, us, moved in rows
        for gain in [f"{total(whole) / total(us):.2f}"]
    ]
    header = ("cache", "a layer's attention, us", "TB/s", "step, ms", "over bfloat16")
    return markdown(header, lines)
