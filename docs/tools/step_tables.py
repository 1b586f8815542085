"""What passes and rounds of an 8B model would take on an H100: predicted from rates and counts."""

from __future__ import annotations

from itertools import pairwise

from records import markdown, size, table

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
SMALL = 2.0  # a norm, or rope with the cache's rows; estimated, as is what an early start saves
EARLY = 0.5
LAUNCHES = 8  # of a layer, counted by test_a_layer_is_eight_launches; long texts have a combine
DRAW, HOST = 6.0, 250.0  # kernels that draw and walk; what stands between passes at most


def product(outputs: int, depth: int, rows: int, gated: bool = False) -> float:
    """Return the microseconds of a linear layer; a gated one has two weights."""
    weights = 2 * outputs * depth * (1 + gated)
    if rows > 64:
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


@table("h100-steps")
def h100_steps() -> str:
    """Return passes and rounds, beside what they are to take."""
    lines = []
    for keys, goal in ((512, 5.7), (32768, 7.3)):
        time = step(1, keys)
        lines.append((f"plain step, {size(keys)}, ms", goal, f"{early(time):.1f} to {time:.1f}"))
    single = step(1, 32768)
    for rows, over in ((8, 1.05), (16, 1.1), (64, 1.4)):
        found = step(rows, 32768) / single
        lines.append((f"{rows} rows over one, 32k", over, f"{found:.2f}"))
    many = step(25, 4096, 8) / step(1, 4096, 8)
    lines.append(("200 rows over 8, 4k, batch 8", 2.2, f"{many:.2f}"))
    for name, tokens, rows, draft, goal in rounds():
        plain = step(1, 4096, vocabulary=ALIKE) + HOST / 1e3
        whole = step(rows, 4096, vocabulary=ALIKE) + (draft + HOST) / 1e3
        shown = f"{tokens * plain / whole:.1f} ({draft / 1e3:.1f} ms of {whole:.1f} drafting)"
        lines.append((f"{name} over plain, 4k, greedy, {tokens} tokens a pass", goal, shown))
    return markdown(("", "goal", "predicted"), lines)


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
