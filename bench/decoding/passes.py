"""The passes that a round is made of, each timed by itself behind a cache of random numbers.

A plain step, the verification of a draft without and with scores, the selection with its table of
positions, a sparse draft step; and what Vegas' rivals do to select. Each is called as the decode
loop calls it, and on a GPU passes replay graphs of their own. Vegas' selection, which a draft has
in its graph, is timed from a graph too. What a pass costs does not depend on the numbers, so this
needs no weights that mean anything and simulates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from common.clock import Stopwatch, timing
from common.records import Record
from common.tables import aligned, size
from transformers import PreTrainedModel

import specattn
from specattn.blocks import TORCH
from specattn.decoding import Quest, SpecExtend, Streaming, Target, Vegas
from specattn.decoding.drafting.sparse_chain import PrefixSelection
from specattn.decoding.methods import quest, specextend
from specattn.decoding.passes.attention import CaptureSpec, Selection

SCORES = CaptureSpec(rows=(0, -1))
HEADER = [("pass", "<")] + [
    (name, ">")
    for name in ("context", "rows", "launched", "time", "±", "eager", "GB/s", "plain steps")
]
CAPTURED = ("select",)  # what is no pass, and yet a part of a draft's graph
Call = Callable[[], object]


def measure(model: PreTrainedModel, method: Vegas, context: int, budget: float) -> list[Record]:
    """Time every kind of pass behind a cache of `context` random tokens, one request.

    A record says how `time` was launched: "eager" as the decode loop does, or "graph" where it was
    captured by itself; `eager` is then the eager launch beside it.
    """
    rows = method.max_nodes
    target = Target(model, 1, context + rows)
    target.cache.storage.normal_()
    target.cache.seqlens.fill_(context)
    with torch.inference_mode():
        passes = _passes(target, method)
        calls = {name: call for name, (call, *_) in passes.items()}
        times, eager = _times(calls, Stopwatch(model.device), budget)
    weights, token = weight_bytes(model), token_bytes(target)
    found = []
    for name, (_, rows, read, other) in passes.items():
        time = timing(times[name])
        moves = other + token * (read + rows) + (weights if rows else 0)
        found.append(
            {
                "kind": "pass",
                "name": name,
                "context": context,
                "rows": rows,
                "bytes": moves,
                "launch": "graph" if name in eager else "eager",
                "time": time,
                "eager": timing(eager[name]) if name in eager else None,
                "bandwidth": moves / time["median"],
            }
        )
    return found


def _passes(target: Target, method: Vegas) -> dict[str, tuple[Call, int, int, int]]:
    """Return every pass with its rows, the cached tokens that it reads, and other bytes."""
    cache, device, layers = target.cache, target.device, len(target.full_layers)
    rows, context = method.max_nodes, int(cache.seqlens[0])
    root, chain = (specattn.Tree.chain(n, device=device) for n in (0, method.gamma))
    tokens = torch.randint(target.model.config.vocab_size, (1, rows), device=device)
    scores = target.verify(chain, tokens, capture=SCORES).scores
    share = {"gamma": method.gamma, "ratio": method.ratio, "min_tokens": method.min_tokens}
    streaming, extend, paged = Streaming(**share), SpecExtend(**share), Quest(**share)
    every = CaptureSpec(rows=tuple(range(chain.size)), ranking="weight", per_row=True)
    each = target.verify(chain, tokens, capture=every).scores
    queries = target.verify(chain, tokens, capture=CaptureSpec(queries=True)).queries
    bounds = quest.PageBounds(target, paged.page_size)
    bounds.read_all()
    pages = quest.Pages(paged, bounds, bounds.counts | {"visible": cache.seqlens})

    ops = TORCH
    if device.type == "cuda":  # as passes in graphs do
        from specattn.blocks.fused import Fused

        ops = Fused()

    def select() -> list[Selection]:
        """Choose, and make the table of positions that all steps of the next draft read."""
        prefix, newer = cache.seqlens, 2 * method.gamma
        selection = Selection(*ops.select(scores, prefix, newer, **method.share()))
        chosen = PrefixSelection(selection, prefix, followed=True)
        return chosen.steps(prefix, method.gamma, newer)

    selection = select()[0]
    verify, weighed = partial(target.verify, chain, tokens), each[:, :, 0]
    chosen, page = int(selection.lengths[0]), token_bytes(target) * paged.page_size // 2

    def by_chunk() -> object:
        return specextend.select_chunks(extend, weighed, cache.seqlens)

    def by_page() -> object:
        return [pages.select(layer, queries[layer, :, :1]) for layer in range(layers)]

    def recent() -> object:
        return streaming.steps(cache.seqlens, cache.capacity, layers)

    return {
        "plain step": (lambda: target.verify(root, tokens[:, :1]), 1, context, 0),
        "verify": (verify, rows, context, 0),
        "verify, scores": (partial(verify, capture=SCORES), rows, context, scores.nbytes),
        "select": (select, 0, 0, scores.nbytes),
        "draft step": (lambda: target.draft(tokens[:, :1], 0, selection), 1, chosen, 0),
        "verify, each row": (partial(verify, capture=every), rows, context, each.nbytes),
        "select, specextend": (by_chunk, 0, 0, weighed.nbytes),
        "select, quest": (by_page, 0, 0, bounds.values.nbytes),
        "bounds, quest": (lambda: bounds.catch_up(method.max_nodes), 0, 0, page),
        "select, streaming": (recent, 0, 0, selection.lengths.nbytes),
    }


def table(passes: list[Record]) -> str:
    """Return the passes as text, each also in plain steps."""
    step = passes[0]["time"]["median"]
    return aligned(
        HEADER,
        [
            (
                one["name"],
                size(one["context"]),
                str(one["rows"] or "-"),
                one["launch"],
                f"{one['time']['median'] * 1e3:.2f} ms",
                f"{one['time']['spread']:.0%}",
                f"{one['eager']['median'] * 1e3:.2f} ms" if one["eager"] else "-",
                f"{one['bandwidth'] / 1e9:.1f}",
                f"{one['time']['median'] / step:.2f}",
            )
            for one in passes
        ],
    )


def round_cost(seconds: dict[str, float], gamma: int) -> float:
    """Return how many plain steps one round of Vegas takes, from the seconds of each pass."""
    drafting = gamma * seconds["draft step"] + seconds["select"]
    return (drafting + seconds["verify, scores"]) / seconds["plain step"]


def selection_overhead(seconds: dict[str, float], gamma: int) -> dict[str, float]:
    """Return, by method, what selecting adds to a round: Quest's at every step, of others once."""
    verify = seconds["verify"]
    extra = {
        "vegas": seconds["select"] + seconds["verify, scores"] - verify,
        "streaming": seconds["select, streaming"],
        "quest": gamma * seconds["select, quest"] + seconds["bounds, quest"],
        "specextend": seconds["select, specextend"] + seconds["verify, each row"] - verify,
    }
    whole = gamma * seconds["draft step"] + verify
    return {name: one / whole for name, one in extra.items()}


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that every pass reads: the table of embeddings only as a head."""
    table = model.get_input_embeddings().weight
    stored = model.state_dict().keys()  # without tables that are computed
    codes = (one for name, one in model.named_buffers() if name in stored)
    read = sum(one.nbytes for one in (*model.parameters(), *codes))
    return read if model.get_output_embeddings().weight is table else read - table.nbytes


def token_bytes(target: Target) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return target.cache.storage[:, :, 0, 0].nbytes


def _times(
    calls: dict[str, Call], stopwatch: Stopwatch, budget: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds of each call, and where graphs replayed them also its seconds without."""
    eager = stopwatch.alternate(calls, budget=budget)
    if stopwatch.device.type != "cuda":
        return eager, {}
    try:
        graphs = {name: stopwatch.prepare(calls[name]) for name in CAPTURED}
    except RuntimeError:
        return eager, {}
    replayed = stopwatch.alternate(graphs, budget=budget / len(calls))
    return eager | replayed, {name: eager[name] for name in graphs}
