"""What the GPU kernels would move and take, from executing some of their blocks in the emulator.

Every time and every share of a rate here is predicted; bench/README.md states the model.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from specattn.triton_kernels import _configs

from specattn import ops
from specattn.ops import cost
from specattn.planning.machines import MACHINES

from .launch import Launched, emulated
from .machine import Options
from .offline import resources
from .stub_driver import timed

Record = dict[str, Any]
ARCHITECTURES = ("sm_80", "sm_90")
PREDICTED_FOR = ("h100", "h200")
MULTIPROCESSORS = 132
CLOCK = 1.7e9  # Hz; each of an SM's four schedulers issues one instruction per cycle
START = 2.5e-6  # seconds per launch in a replayed graph: to begin, to fill and to drain
REGISTERS, SHARED, THREADS = 65536, 228 * 1024, 2048  # of one SM
B, HQ, HK, D = 1, 32, 8, 128
STATES = 8  # requests of a layer with a state
SELECTED = 0.07

# The most bytes that may move over those needed at 32k keys, and the least predicted share of an
# H200's bandwidth by context.
MOVED = {
    ("hybrid", 1): 1.03,
    ("hybrid", 16): 1.05,
    ("hybrid int8", 1): 1.03,
    ("hybrid int8", 16): 1.10,
    ("gather", 1): 1.10,
    ("importance", 1): 1.02,
    ("select", 1): 1.2,
    ("gated delta", 1): 1.1,
    ("gated delta", 16): 1.1,
}
SCORES_OVER_HYBRID = 1.02
SHARES = {
    1: {8192: 0.60, 32768: 0.80, 131072: 0.90},
    16: {8192: 0.55, 32768: 0.75, 131072: 0.88},
}


def cases(
    contexts: list[int], rows: list[int], backend: str = "triton"
) -> Iterator[tuple[str, int, int]]:
    """Yield (primitive, cached tokens, rows)."""
    for context in contexts:
        for T in rows:
            yield from (("hybrid", context, T), ("scores", context, T))
        yield from (("gather", context, 1), ("select", context, 1))
        if backend == "triton":  # the only one that has them
            yield "importance", context, 1
            yield from (("hybrid int8", context, T) for T in rows)
    if backend == "triton":  # of any context
        yield from (("gated delta", contexts[-1], T) for T in rows)


def call(op: str, context: int, T: int) -> tuple[Callable[[], object], cost.Cost]:
    """Return a call of a primitive and the least that its task moves.

    The heads of a cache share their memory, so that long ones fit here: what a block does is the
    same.
    """
    real = torch.bfloat16
    q, new = torch.randn(B, T, HQ, D, dtype=real), torch.randn(2, B, T, HK, D, dtype=real)
    cache = torch.randn(2, B, context, 1, D, dtype=real).expand(-1, -1, -1, HK, -1)
    lengths = torch.full((B,), context, dtype=torch.int32)
    mask = torch.full((T, 1), -1, dtype=torch.int64)
    K = math.ceil(SELECTED * context)
    heads = (B, T, HQ, HK, D, 2)
    tree = {"S": T, "mask_words": T}
    if op == "gated delta":
        return _gated_delta(T)
    if op == "select":
        scores = torch.randn(B, HK, context)
        sizes = cost.Sizes(*heads, L=context, indices=B, score_rows=HK, selected=K)
        return lambda: ops.select_topk(scores, lengths, ratio=SELECTED), _least(
            "select_topk", sizes
        )
    if op == "importance":
        sizes = cost.Sizes(*heads, L=context, N=context, indices=B, score_rows=HK)
        least = _least("importance_scores", sizes)
        return lambda: ops.importance_scores(q, cache[0], lengths), least
    if op == "gather":
        indices = torch.rand(B, HK, context).argsort(-1)[..., :K].sort(-1).values.int()
        chosen = indices, torch.full((B, HK), K, dtype=torch.int32)
        sizes = cost.Sizes(*heads, **tree, L=K, N=context, indices=B * HK * (K + 1))
        least = _least("sparse_gather_attention", sizes)
        return lambda: ops.sparse_gather_attention(q, *cache, *chosen, *new, mask), least
    sizes = cost.Sizes(*heads, **tree, L=context, N=context, indices=B)
    arguments = (q, *cache, lengths, *new, mask)
    if op == "hybrid int8":  # with a scale for each token and head
        least = _least("hybrid_tree_attention", sizes)
        saved = 2 * context * HK * (D - 4)
        least = replace(least, read=least.read - B * saved)
        stored = torch.ones(2, B, context, 1, D, dtype=torch.int8).expand(-1, -1, -1, HK, -1)
        k_scale, v_scale = torch.ones(2, B, context, HK)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return lambda: ops.hybrid_tree_attention(q, *stored, lengths, *new, mask, **scales), least
    if op == "scores":
        least = _least("verify_attention", sizes, "cost_scores")
        return lambda: ops.verify_attention(*arguments), least
    return lambda: ops.hybrid_tree_attention(*arguments), _least("hybrid_tree_attention", sizes)


def _gated_delta(T: int) -> tuple[Callable[[], object], cost.Cost]:
    """Return a call for a layer of Qwen3-Next's shape, and the least that it moves.

    Of as many requests as fill a GPU with programs, so that what moves decides.
    """
    heads = (STATES, T, 16, D), (STATES, T, 32, D)
    k, v = (torch.randn(*size).bfloat16() for size in heads)
    gate, state = torch.rand(STATES, T, 32), torch.randn(STATES, 32, D, D)
    least = importlib.import_module("specattn.ops.gated_delta_tree").cost(v, state, 16)
    return lambda: ops.gated_delta_tree(k, k, v, -gate, gate, state, l2_norm=True), least


def _least(op: str, sizes: cost.Sizes, formula: str = "cost") -> cost.Cost:
    return getattr(sys.modules[f"specattn.ops.{op}"], formula)(sizes)


def measure(arch: str, op: str, context: int, T: int, backend: str = "triton") -> Record:
    """Return the row of one case."""
    run, task = call(op, context, T)
    with (
        mock.patch.object(_configs, "multiprocessors", return_value=MULTIPROCESSORS),
        _emulated(backend, arch) as launches,
    ):
        run()
    moved = sum(x.counts.bytes_read + x.counts.bytes_written for x in launches)
    return {
        "kind": "emulated",
        "arch": arch,
        "backend": backend,
        "op": op,
        "context": context,
        "rows": T,
        "bytes_needed": task.bytes,
        "bytes_moved": moved,
        "moved_over_needed": moved / task.bytes,
        "bytes_partial": sum(
            2 * x.counts.bytes_read for x in launches if x.name == "combine_kernel"
        ),
        "keys": context * HK,
        "launches": [_launch(x, context * HK) for x in launches],
        "predicted_seconds": {name: _seconds(launches, name) for name in PREDICTED_FOR},
        "predicted_share": {
            name: task.bytes / MACHINES[name].bandwidth / _seconds(launches, name)
            for name in PREDICTED_FOR
        },
    }


def _emulated(backend: str, arch: str):
    if backend == "triton":
        return emulated(arch, Options(sample=True))
    from .cuda_launch import emulated_cuda  # needs CuPy

    return emulated_cuda(_of_cuda(arch), Options(sample=True))


def _of_cuda(arch: str) -> str:
    return "sm_90a" if arch == "sm_90" else arch


def _resources(launched: Launched) -> tuple[int, int, str]:
    if hasattr(launched.compiled, "asm"):
        return resources(launched.compiled)
    from . import cuda_build

    arch = re.search(r"\.target (\w+)", launched.ptx)[1]
    units = "mma.sync" if "mma.sync" in launched.ptx else ""
    return (*cuda_build.resources(launched.compiled, arch)[:2], units)


def _launch(launched: Launched, keys: int) -> Record:
    counts, (registers, spilled, units) = launched.counts, _resources(launched)
    moved = counts.bytes_read + counts.bytes_written
    per_sm = _blocks_per_sm(launched)
    return {
        "kernel": launched.name,
        "grid": launched.grid,
        "warps": launched.warps,
        "bytes": moved,
        "sectors_over_bytes": 32 * (counts.sectors_read + counts.sectors_written) / moved,
        "bank_conflicts": counts.shared_conflicts,
        "instructions_per_key": counts.total_instructions / keys,
        "registers": registers,
        "spilled_bytes": spilled,
        "units": units,
        "shared_bytes": launched.shared_bytes,
        "blocks_per_sm": per_sm,
        "waves": math.prod(launched.grid) / (per_sm * MULTIPROCESSORS),
    }


def _blocks_per_sm(launched: Launched) -> int:
    registers = -(-_resources(launched)[0] // 8) * 8
    threads = 32 * launched.warps
    limits = (REGISTERS // (registers * threads), SHARED // (launched.shared_bytes + 1024))
    return max(1, min(*limits, THREADS // threads, 32))


def _seconds(launches: list[Launched], machine: str) -> float:
    """Predict a call in a replayed graph: each launch is bound by memory or by issuing."""
    total = 0.0
    for launched in launches:
        counts, blocks = launched.counts, math.prod(launched.grid)
        waves = blocks / (_blocks_per_sm(launched) * MULTIPROCESSORS)
        busy = min(1.0, blocks / MULTIPROCESSORS) if waves <= 1 else waves / math.ceil(waves)
        memory = (counts.bytes_read + counts.bytes_written) / MACHINES[machine].bandwidth
        issue = counts.total_instructions / (4 * MULTIPROCESSORS * CLOCK)
        total += START + max(memory, issue) / busy
    return total


def host_microseconds(
    op: str, T: int, backend: str = "triton", *, windows: int = 150, calls: int = 40
) -> float:
    """Return the least mean time of a call's host side over some windows, in microseconds."""
    run, _ = call(op, 8192, T)
    best = math.inf
    with torch.inference_mode(), _timed(backend):
        for _ in range(2):
            run()
        for _ in range(windows):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def _timed(backend: str):
    if backend == "triton":
        return timed()
    from .cuda_stub import timed_cuda  # needs CuPy

    return timed_cuda()


def report(
    arch: str,
    contexts: list[int],
    rows: list[int],
    backend: str,
    only: Collection[str] | None,
    keep: Callable[[Record], object],
) -> None:
    """Measure all cases, or those of some primitives; print each and keep it, then the verdicts."""
    print("No GPU: counts of executed blocks, scaled by blocks; times and shares are predicted.")
    hosts: dict[tuple[str, int], float] = {}
    found = []
    for op, context, T in cases(contexts, rows, backend):
        if only and op not in only:
            continue
        if (op, T) not in hosts:
            # Apart: a libcuda that does nothing is no company for NVRTC.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                hosts[op, T] = apart.submit(host_microseconds, op, T, backend).result()
        found.append({**measure(arch, op, context, T, backend), "host_microseconds": hosts[op, T]})
        keep(found[-1])
        print(line(found[-1]), flush=True)
    for text in verdicts(found):
        print(text)


def line(row: Record) -> str:
    """Return a row for people."""
    launches = row["launches"]
    parts = [
        f"{row['op']:10} {row['context'] // 1024:>3}k T={row['rows']:<2}",
        f"moved/needed {row['moved_over_needed']:.3f}, "
        f"{row['bytes_partial'] / row['bytes_moved']:.1%} of it partial results",
    ]
    for x in launches:
        parts.append(
            f"{x['kernel']}: sectors/bytes {x['sectors_over_bytes']:.2f}, conflicts "
            f"{x['bank_conflicts']}, {x['instructions_per_key']:.2f} instr/key, "
            f"{x['registers']} registers, {x['spilled_bytes']} spilled, "
            f"{x['blocks_per_sm']} per SM, {x['waves']:.2f} waves"
        )
    if row.get("host_microseconds"):
        parts.append(f"host {row['host_microseconds']:.1f} us")
    for name in PREDICTED_FOR:
        seconds, share = row["predicted_seconds"][name], row["predicted_share"][name]
        parts.append(f"{name} predicted {seconds * 1e6:.1f} us, {share:.0%} of its bandwidth")
    return " | ".join(parts)


def verdicts(rows: list[Record]) -> Iterator[str]:
    """Yield every bar with what was found, met or missed."""
    found = {(row["op"], row["context"], row["rows"]): row for row in rows}
    for (op, T), most in MOVED.items():
        if row := found.get((op, 32768, T)):
            yield _verdict(f"{op} T={T} 32k, moved/needed", row["moved_over_needed"], most, True)
    for T, shares in SHARES.items():
        scores, hybrid = found.get(("scores", 32768, T)), found.get(("hybrid", 32768, T))
        if scores and hybrid:
            over = scores["bytes_moved"] / hybrid["bytes_moved"]
            yield _verdict(f"scores over hybrid, T={T} 32k", over, SCORES_OVER_HYBRID, True)
        for context, least in shares.items():
            if row := found.get(("hybrid", context, T)):
                share, name = row["predicted_share"]["h200"], f"hybrid T={T} {context // 1024}k"
                yield _verdict(f"{name}, predicted share of an H200", share, least, False)


def _verdict(name: str, measured: float, bar: float, at_most: bool) -> str:
    met = measured <= bar if at_most else measured >= bar
    word = "at most" if at_most else "at least"
    return f"{name}: {measured:.3f}, {word} {bar:.2f}: {'met' if met else 'MISSED'}"
