"""What passes and rounds of an 8B model take on an H100: predicted by rates and counts, and timed.

`h100/variants.jsonl` has steps by the kernels as they are since, one change at a time and together.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean
from typing import Any

from records import markdown, read, size, table

from specattn import attention_plans
from specattn.gpu_record import Shape
from specattn.planning import MODELS

LLAMA = MODELS["llama-3.1-8b"]
ALIKE = 4096  # tokens of the embedded target's vocabulary, by which its widened head is small

# Measured on an H100, in microseconds, and bytes in one: a product of few rows by Triton takes a
# while and its bytes' time; cuBLAS reads a little slower. In a graph kernels lie a gap apart.
BEGINS, MEMORY, CUBLAS, GAP = 2.6, 2.93e6, 2.71e6, 0.37
# Of others: what L2 gives, and torch's products of hundreds of rows do.
L2, OPERATIONS = 5.5e6, 6e8
SMALL = 2.0  # a norm, or rope with the cache's rows; estimated, as was what an early start saves
EARLY = 0.5  # timed since: 0.6 (without any 6.15 ms a step, behind the loop of products 5.97)
# Of a layer, counted by test_a_layer_is_eight_launches; where keys are split, as on an H100 from
# 512 tokens on, a combine is the ninth.
LAUNCHES = 8
DRAW, HOST = 6.0, 250.0  # kernels that draw and walk; what stands between passes at most


def product(outputs: int, depth: int, rows: int, gated: bool = False) -> float:
    """Return the microseconds of a linear layer; a gated one has two weights."""
    weights = 2 * outputs * depth * (1 + gated)
    if rows > 32:
        operations = rows * weights
        return BEGINS + max(weights / CUBLAS, operations / OPERATIONS)
    again = 2 * rows * depth * outputs / 32  # each block of outputs reads all rows
    return BEGINS + max(weights / MEMORY, (weights + again) / L2)


def attention(rows: int, keys: int, batch: int) -> float:
    """Return the microseconds of a layer's attention, its combine included."""
    shape = Shape("hybrid_tree_attention", "bf16", 128, 4 * rows, keys, batch)
    among = ("triton", "gluon")
    return min(attention_plans.microseconds(kernel, shape, 8, 132) for kernel in among)


def layer(rows: int, keys: int, batch: int = 1) -> float:
    """Return the microseconds of a layer of so many rows of each request."""
    every, hidden = rows * batch, LLAMA.hidden
    qkv = (LLAMA.q_heads + 2 * LLAMA.kv_heads) * LLAMA.head_dim
    products = product(qkv, hidden, every) + product(hidden, hidden, every)
    products += product(LLAMA.intermediate, hidden, every, gated=True)
    products += product(hidden, LLAMA.intermediate, every)
    between = 3 * SMALL + GAP * (LAUNCHES + 1)
    return products + attention(rows, keys, batch) + between


def step(rows: int, keys: int, batch: int = 1, vocabulary: int = LLAMA.vocab) -> float:
    """Return the milliseconds of a pass of all layers, drawing included."""
    ends = product(vocabulary, LLAMA.hidden, rows * batch) + 2 * SMALL + DRAW
    return (LLAMA.layers * layer(rows, keys, batch) + ends) / 1e3


def early(time: float) -> float:
    """Return the same where each launch of a layer begins before the one before it has ended."""
    return time - LLAMA.layers * LAUNCHES * EARLY / 1e3


# What was shipped of the variants: where the next launch starts, and tiles of three products.
SINCE = {
    "early": "behind the loop",
    "tiles": {"o": [16, 256, 2, 4], "down": [16, 256, 2, 4], "qkv": [16, 128, 2, 6]},
}


def _variants(keys: int, rows: int, script: str = "variants") -> list[dict[str, Any]]:
    found = read("h100/variants.jsonl", "variant")
    return [x for x in found if (x["context"], x["rows"], x["script"]) == (keys, rows, script)]


def _ms(one: dict[str, Any]) -> float:
    return 1e3 * one["time"]["median"]


def since(keys: int, rows: int) -> float | None:
    """Return what a pass took with the variants that were shipped, but splits of 256 keys."""
    wanted = SINCE | ({"most_rows": 32} if keys == 512 and rows > 32 else {})
    return next((_ms(x) for x in _variants(keys, rows) if x["settings"] == wanted), None)


@table("h100-body")
def h100_body() -> str:
    """Return passes through the modules and from a model's parts, waited for and in a row."""
    (ceiling,) = {one["run"]["ceilings"]["copy"] for one in read("h100/kernels.jsonl")}
    places: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for one in read("h100/body.jsonl", "pass"):
        if one["quantize"] is None:
            places.setdefault((one["context"], one["rows"]), {})[one["how"]] = one
    ways, lines = ("replayed", "computed from its parts in graphs"), []
    for (keys, rows), waited in places.items():
        least = 1e3 * waited[ways[1]]["bytes"] / ceiling
        modules, parts = (_ms(waited[way]) for way in ways)
        cells = [f"{modules:.2f}", f"**{parts:.2f}**" if parts > modules else f"{parts:.2f}"]
        timed = {x["how"]: x for x in _variants(keys, rows, "profile")}
        cells += [f"{_ms(timed[way]):.2f}" if way in timed else "-" for way in ways]
        before = [
            _ms(x) for x in _variants(keys, rows)
            if x["settings"] in ({}, SINCE | {"most_rows": 64})
        ]  # fmt: skip
        now = since(keys, rows)
        compared = f" ({before[-1]:.2f})" if before else ""
        cells.append("-" if now is None else f"{now:.2f}{compared}")
        lines.append([f"{size(keys)}, {rows}", *cells, f"{least:.2f}"])
    header = ("keys, rows", "modules, waited for", "parts, waited for", "modules", "parts")
    return markdown((*header, "parts, changed (before)", "bytes at a copy's rate"), lines)


@table("h100-steps")
def h100_steps() -> str:
    """Return passes and rounds, beside what they are to take."""
    lines: list[tuple[Any, ...]] = []
    for keys, goal in ((512, 5.7), (32768, 7.3)):
        time, timed = step(1, keys), since(keys, 1)
        shown = _against(goal, early(time), f"{early(time):.1f} to {time:.1f}")
        lines.append((f"plain step, {size(keys)}, ms", goal, shown, _against(goal, timed)))
    single, timed = step(1, 32768), since(32768, 1)
    for rows, over in ((8, 1.05), (16, 1.1), (64, 1.4)):
        found, of = step(rows, 32768) / single, since(32768, rows)
        over_one = None if of is None or timed is None else of / timed
        shown = _against(over, found), _against(over, over_one)
        lines.append((f"{rows} rows over one, 32k", over, *shown))
    many = step(25, 4096, 8) / step(1, 4096, 8)
    lines.append(("200 rows over 8, 4k, batch 8", 2.2, _against(2.2, many), None))
    greedy, sampled = (
        one["cpu_seconds"] * 1e3
        for one in read("epyc-zen3-2core/between-passes.jsonl", "between")
        if one["batch"] == 1
    )
    shown = _against(0.25, sampled, f"{sampled:.2f} of Python (greedily {greedy:.2f}), no launches")
    lines.append(("host and sampling between passes, T=1, ms", 0.25, shown, None))
    share = (sampled - greedy + DRAW / 1e3) / step(1, 4096)
    shown = _against(0.03, share, f"{share:.1%}")
    lines.append(("sampling with a temperature, of a step, 4k", "3%", shown, None))
    plain = step(1, 4096, vocabulary=ALIKE)
    block, caught_up = (part / plain / 1e3 for part in jetflow(512))
    shown = _against(
        0.12, block + caught_up, f"{block:.2f}, with catching up {block + caught_up:.2f}"
    )
    lines.append(("JetFlow's block of 16 over a plain step, 4k", 0.12, shown, None))
    for name, tokens, rows, draft, goal in rounds():
        whole = step(rows, 4096, vocabulary=ALIKE) + (draft + HOST) / 1e3
        gain = tokens * (plain + HOST / 1e3) / whole
        shown = f"{gain:.1f} ({draft / 1e3:.1f} ms of {whole:.1f} drafting)"
        shown = _against(-goal, -gain, shown)
        name = f"{name} over plain, 4k, greedy, {tokens:.2f} tokens a pass"
        lines.append((name, goal, shown, None))
    return markdown(("", "goal", "predicted", "measured"), lines)


def _against(goal: float, found: float | None, shown: str | None = None) -> str | None:
    """Return a figure that is to be at most its goal; one that is more is said to miss it."""
    if found is None:
        return None
    return (shown or f"{found:.2f}") + (", **missed**" if found > goal else "")


# Instructions for a key, counted in the PTX emulator for sm_90, by Triton: of Gluon's tile of 64
# rows without scores and with them, of Triton's tile of as many from int8.
SCORED = {"3.6": (27.3, 31.4), "3.9": (29.4, 33.3)}
FROM_INT8 = {"3.6": 74.1, "3.9": 51.8}
KEY_BYTES, SCORE_BYTES = 2 * 128 * 2, 4  # a KV head's


@table("h100-calls")
def h100_calls() -> str:
    """Return single calls whose goals the model of times, or counts, tell of."""
    timed = {
        (one["op"], one["variant"], one["rows"]): 1e6 * one["time"]["median"]
        for one in read("h100/kernels.jsonl")
        if (one["context"], one["batch"]) == (32768, 1)
    }
    gathered = Shape("sparse_gather_attention", "bf16", 128, 4, 2300, 1)
    time = min(attention_plans.microseconds(x, gathered, 8, 132) for x in ("triton", "cuda"))
    before = timed["sparse_gather_attention", "shared", 1]
    shown = _against(14, time, f"{time:.1f}"), f"{before:.1f}"
    lines: list[tuple[Any, ...]] = [("gather of 2,300 keys, one row, us", 14, *shown)]
    whole = Shape("verify_attention", "bf16", 128, 64, 32768, 1)
    plain = attention_plans.microseconds("gluon", whole, 8, 132)
    begins = attention_plans.BEGINS["gluon"]
    bf16 = timed["hybrid_tree_attention", "contiguous", 16]
    for triton, (without, scored) in SCORED.items():
        tile = attention_plans.TILE[64] * scored / without
        issued = attention_plans.microseconds("gluon", whole, 8, 132, tile=tile)
        moved = begins + (plain - begins) * (KEY_BYTES + SCORE_BYTES) / KEY_BYTES
        over = bf16 / timed["verify_attention", "scores", 16] if triton == "3.6" else None
        name = f"scores over no scores, 16 rows, 32k, Triton {triton}"
        lines.append(_gain(name, 0.97, plain / max(issued, moved), over))
    a_microsecond = attention_plans.ISSUED["triton"] * attention_plans.H100.clock
    for triton, instructions in FROM_INT8.items():
        issued = instructions * 32768 * 8 / 132 / a_microsecond
        found = bf16 / (attention_plans.BEGINS["triton"] + issued)
        over = bf16 / timed["hybrid_tree_attention", "chain, int8", 16] if triton == "3.6" else None
        name = f"int8 over bf16, 16 rows, 32k, Triton {triton}"
        lines.append(_gain(name, 1.3, found, over))
    return markdown(("", "goal", "predicted", "measured, kernels of before"), lines)


def _gain(name: str, goal: float, found: float, before: float | None) -> tuple[Any, ...]:
    """Return a line of a ratio that is to be no less than its goal."""
    measured = None if before is None else f"{before:.2f}"
    return name, goal, _against(-goal, -found, f"{found:.2f}"), measured


# The embedded target's head: layers, rows of its block, layers whose features it reads; and tokens
# of a round, whose features are read before the next.
BLOCK, CAUGHT_UP = (3, 16, 6), 4


def jetflow(keys: int) -> tuple[float, float]:
    """Return the microseconds of a block that attends to so many keys, and of catching up."""
    layers, rows, features = BLOCK
    hidden, both = LLAMA.hidden, 2 * LLAMA.kv_heads * LLAMA.head_dim
    block = layers * layer(rows, keys) + product(ALIKE, hidden, rows) + 2 * SMALL
    projected = layers * (product(both, hidden, CAUGHT_UP) + SMALL)
    return block, product(hidden, features * hidden, CAUGHT_UP) + SMALL + projected


def _accepted(method: str) -> float:
    """Return a method's tokens a pass on the embedded target, greedily behind 4k tokens."""
    found = read("epyc-2core/jetflow.jsonl")
    return mean(x["tau"] for x in found if (x["method"], x["temperature"]) == (method, 0))


def rounds() -> list[tuple[str, float, int, float, float]]:
    """Return of methods: tokens a pass as measured, rows, microseconds of a draft, and the goal."""
    hidden, own = LLAMA.hidden, layer(1, 4096)
    # LongSpec's layer attends to the target's last one besides; PosS' reads a product of two rows.
    beside = 2 * product(hidden, hidden, 1) + attention(1, 4096, 1)
    widths, longspec, poss = [1, 2, 4, 8], 0.0, 0.0
    for _ in pairwise(widths):
        longspec += own + beside + 3 * SMALL
    for _ in range(5):
        poss += own + product(hidden, 2 * hidden, 1) + 3 * SMALL
    tokenswift = 1e3 * step(1, 4096, vocabulary=ALIKE) + 3 * product(hidden, hidden, 1)
    trees = [
        (f"JetFlow, {nodes} rows{', window of 512' * bool(window)}",
         _accepted(f"jetflow:total_tokens={nodes}" + ",window=512" * bool(window)),
         nodes, sum(jetflow(window or 4096)), 4.0)
        for nodes, window in ((64, 512), (256, 512), (64, 0))
    ]  # fmt: skip
    return [
        ("LongSpec `[2,2,2]`", 2.98, 7, longspec, 2.3),
        ("PosS, 24 tokens", 5.12, 24, poss, 3.6),
        ("TokenSwift `[1,2]`", 4.13, 16, tokenswift, 3.2),
        *trees,
    ]
