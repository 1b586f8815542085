"""What passes and rounds of an 8B model take on an H100: predicted by rates and counts, and timed.

`h100/variants.jsonl` has steps by the kernels as they are since, one change at a time and together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from records import markdown, read, size, table

from specattn import attention_plans
from specattn.gpu_record import Shape
from specattn.planning import MODELS

LLAMA = MODELS["llama-3.1-8b"]
ALIKE = 129  # tokens of the embedded target's vocabulary, by which its widened head is small

# Measured on an H100, in microseconds, and bytes in one: a product of few rows by Triton takes a
# while and its bytes' time; cuBLAS reads a little slower. In a graph kernels lie a gap apart.
BEGINS, MEMORY, CUBLAS, GAP = 2.6, 2.93e6, 2.71e6, 0.37
# Of others: what L2 gives, and torch's products of hundreds of rows do.
L2, OPERATIONS = 5.5e6, 6e8
SMALL = 2.0  # a norm, or rope with the cache's rows; estimated, as was what an early start saves
EARLY = 0.5  # timed since: 0.6 (without any 6.15 ms a step, behind the loop of products 5.97)
LAUNCHES = 8  # of a layer, counted by test_a_layer_is_eight_launches; long texts have a combine
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
        shown = f"{early(time):.1f} to {time:.1f}"
        lines.append((f"plain step, {size(keys)}, ms", goal, shown, f"{timed:.2f}"))
    single, timed = step(1, 32768), since(32768, 1)
    for rows, over in ((8, 1.05), (16, 1.1), (64, 1.4)):
        found, of = step(rows, 32768) / single, since(32768, rows)
        over_one = None if of is None or timed is None else f"{of / timed:.2f}"
        lines.append((f"{rows} rows over one, 32k", over, f"{found:.2f}", over_one))
    many = step(25, 4096, 8) / step(1, 4096, 8)
    lines.append(("200 rows over 8, 4k, batch 8", 2.2, f"{many:.2f}", None))
    for name, tokens, rows, draft, goal in rounds():
        plain = step(1, 4096, vocabulary=ALIKE) + HOST / 1e3
        whole = step(rows, 4096, vocabulary=ALIKE) + (draft + HOST) / 1e3
        shown = f"{tokens * plain / whole:.1f} ({draft / 1e3:.1f} ms of {whole:.1f} drafting)"
        lines.append((f"{name} over plain, 4k, greedy, {tokens} tokens a pass", goal, shown, None))
    return markdown(("", "goal", "predicted", "measured"), lines)


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
    return [
        ("LongSpec `[2,2,2]`", 2.98, 7, longspec, 2.3),
        ("PosS, 24 tokens", 5.12, 24, poss, 3.6),
        ("TokenSwift `[1,2]`", 4.13, 16, tokenswift, 3.2),
    ]
