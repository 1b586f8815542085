"""The bars that the CPU kernels have to meet, each measured as a ratio within one run.

All at 2 threads and the attention shape of llama-3.1-8b. A share is of the ceiling that binds: a
plain read of the same caches, or products in registers by the code path in use. All take turns
over places of a memory twice as large as the last-level cache, so all find their caches cold to the
same degree.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from common.clock import paired_ratio
from common.tables import in_rows

import specattn
from specattn import _cpu, reference  # type: ignore[attr-defined]
from specattn.planning import MODELS

from .bar import CPU, Bar, Bench, milliseconds, right
from .cases import EIGHT_BITS, LATENTS, LAYERS, Case
from .inputs import Draw
from .measure import TOLERANCE, WRONG, compare
from .peers import FAMILIES, Peer, vllm
from .rotation import Rotation
from .workloads import SPARSITY, Outputs, build

THREADS = 2
PEERS = ("sdpa", "vllm", "llama.cpp")
HYBRID = Case("hybrid_tree_attention", "chain", MODELS["llama-3.1-8b"], "bf16", 1, 32768, 1)
# Qwen3-Next's heads: as many of keys as of keys and values here.
STATES = replace(HYBRID, op="gated_delta_tree", shape=replace(HYBRID.shape, kv_heads=16), context=0)
HEADS = "32 heads of 128 x 128"
# DeepSeek-V3's attention: all heads see one latent of 512 and a rope's key of 64.
LATENT_SHAPE = replace(HYBRID.shape, name="deepseek-v3", q_heads=128, kv_heads=1, head_dim=576)
LAYER = replace(HYBRID, op="linear_few_rows", variant="output", context=0)


def measure(names: list[str], budget: float) -> Iterator[Bar]:
    """Measure the bars whose keys begin with one of `names`; all where there is none."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        bench = Bench(budget)
        for key, bar in SUITE.items():
            if not names or any(key.startswith(name) for name in names):
                yield from bar(bench)
    finally:
        torch.set_num_threads(before)


def hybrid(bench: Bench, case: Case, *, share: float) -> Iterator[Bar]:
    """Hold hybrid attention against the ceiling that binds it."""
    rotation = Rotation(bench.pool, case)
    yield bench.share(rotation, rotation.workloads(case), case.dtype, share, _name(case))


def peers(
    bench: Bench, case: Case, *, others: tuple[str, ...] = PEERS, **targets: float
) -> Iterator[Bar]:
    """Hold hybrid attention against `others` that compute the same, each in its fastest form.

    All that are here take their turns; `targets` names those that have a bar.
    """
    bars = {
        family: Bar(f"{_name(case)}, against {family}", target, "times", at_most=False)
        for family, target in targets.items()
    }
    rotation = Rotation(bench.pool, case)
    works = rotation.workloads(case)
    if not right(works[0]):
        yield from (bar.wrong() for bar in bars.values())
        return
    absent = {family: FAMILIES[family].why_not(CPU) for family in others}
    best = _fastest(works, [family for family, reason in absent.items() if not reason])
    times = bench.against(
        ours=rotation.turn_of(works),
        **{family: rotation.turn(calls) for family, (_, calls, _) in best.items()},
    )
    theirs = [
        f"{form} {milliseconds(times[family])}{slower}"
        for family, (form, _, slower) in best.items()
    ]
    note = "; ".join([milliseconds(times["ours"]), *theirs])
    for family, bar in bars.items():
        if family in best:
            yield bar.found(paired_ratio(times["ours"], times[family]), times["ours"], note)
        else:
            yield replace(bar, note=f"{family}: {absent[family] or 'it does not compute this'}")


def eight_bits(bench: Bench, name: str, *, rows: int) -> Iterator[Bar]:
    """Hold attention over a cache of 8 bits against the same over one of 16."""
    plain = _at(32768, rows, "chain")
    case = replace(plain, variant=f"chain, {name}")
    target = 1.0 if rows in (2, 4) else 1.2
    if rows == 1:
        target = 1.3 if _cpu.isa() == "avx2" else 1.7
    bar = Bar(f"{_name(case)}, over bf16", target, "times", at_most=False)
    ours, theirs = Rotation(bench.pool, case), Rotation(bench.pool, plain)
    works, others = ours.workloads(case), theirs.workloads(plain)
    turns = ours.turn_of(works), theirs.turn_of(others)
    yield bench.over(bar, *turns, "bf16", works[0], others[0])


def _fastest(works: list, families: list[str]) -> dict[str, tuple[str, list[Peer], str]]:
    """Return by family its fastest form at every place, and what the others' second call took."""
    expected, found = works[0].expected(torch.float32), {}
    for family in families:
        forms = works[0].peers((family,))
        forms = {name: form for name, form in forms.items() if name.startswith(family)}
        seconds = _seconds(forms, expected, works[0].call()["out"].dtype)
        if seconds:
            form = min(seconds, key=seconds.__getitem__)
            calls = [work.peers((family,))[form] for work in works]
            rest = [f"{x} {1e3 * t:.0f} ms" for x, t in seconds.items() if x != form]
            found[family] = form, calls, f" ({', '.join(rest)})" if rest else ""
    return found


def _seconds(forms: dict[str, Peer], expected: Outputs, dtype: torch.dtype) -> dict[str, float]:
    """Return what the second call of every form takes that is right."""
    seconds = {}
    for name, form in forms.items():
        if compare(form(), expected, TOLERANCE[dtype])[1]:
            start = time.perf_counter()
            form()
            seconds[name] = time.perf_counter() - start
    return seconds


def over(bench: Bench, name: str, case: Case, plain: Case, *, at_most: float) -> Iterator[Bar]:
    """How much longer one call takes than another on the same caches."""
    rotation = Rotation(bench.pool, case)
    works, others = rotation.workloads(case), rotation.workloads(plain)
    bar = Bar(name, at_most, "over", at_most=True)
    turns = rotation.turn_of(works), rotation.turn_of(others)
    yield bench.over(bar, *turns, "against", works[0], others[0])


def importance(bench: Bench, *, share: float) -> Iterator[Bar]:
    """Hold the scoring of K against the ceiling that binds, mostly a plain read of K."""
    case = replace(HYBRID, op="importance_scores", variant="per head", rows=8)
    rotation = Rotation(bench.pool, case, tensors=1)
    works, name = rotation.workloads(case), "importance, K only, 32768 keys"
    yield bench.share(rotation, works, case.dtype, share, name)


def linear(bench: Bench, case: Case, *, rows: int, share: float) -> Iterator[Bar]:
    """Hold a layer against the ceiling that binds it, and against torch."""
    case = replace(case, rows=rows)
    layer = LAYERS[case.variant](case.shape)
    rotation = Rotation(bench.pool, case)
    works = rotation.workloads(case)
    name = f"linear [{layer.outputs}, {layer.depth}], {case.dtype}, {in_rows(rows)}"
    yield bench.share(rotation, works, case.dtype, share, name)
    bar = Bar(f"{name}, against torch", 1.0, "times", at_most=False)
    (peer,) = works[0].peers(())
    theirs = rotation.turn([work.peers(())[peer] for work in works])
    yield bench.over(bar, rotation.turn_of(works), theirs, peer, works[0])


def quantised(bench: Bench, *, kind: str, share: float, at_most: float) -> Iterator[Bar]:
    """Hold one row times codes of weights against a plain read, and sixteen rows against one."""
    one, many = (replace(LAYER, variant=f"output, {kind}", rows=rows) for rows in (1, 16))
    layer = LAYERS[one.variant](one.shape)
    rotation = Rotation(bench.pool, one)
    works, others = rotation.workloads(one), rotation.workloads(many)
    name = f"linear [{layer.outputs}, {layer.depth}], {kind}"
    yield bench.share(rotation, works, one.dtype, share, f"{name}, 1 row")
    bar = Bar(f"{name}, 16 rows over one", at_most - 1, "over", at_most=True)
    turns = rotation.turn_of(others), rotation.turn_of(works)
    yield bench.over(bar, *turns, "one row", others[0], works[0])


def gather(bench: Bench, *, at_most: float) -> Iterator[Bar]:
    """Hold scattered tokens against as many contiguous ones.

    The lists of one cache share no token: taken one after the other, each finds its tokens cold.
    """
    count = math.ceil(SPARSITY * HYBRID.context)
    large = Rotation(bench.pool, HYBRID)
    small = Rotation(bench.pool, replace(HYBRID, context=count))
    contiguous = [work.call for work in small.workloads(replace(HYBRID, context=count))]
    # The lists start half the memory away from the contiguous caches.
    half = len(large.places) // 2
    gathers = [
        call
        for place in large.places[half:] + large.places[:half]
        for call in _gathers(place, count)
    ]
    turns = min(len(gathers), len(contiguous))
    times = bench.times(
        ours=small.turn(gathers[:turns]),
        near=small.turn(contiguous[:turns]),
        rows=small.turn([_listed_read(call) for call in gathers[:turns]]),
        read=small.turn(small.reads()[:turns]),
    )
    read = paired_ratio(times["read"], times["rows"]) * small.place_bytes
    read /= 2 * count * HYBRID.shape.kv_heads * HYBRID.shape.head_dim * 2
    note = (
        f"{milliseconds(times['ours'])} against {milliseconds(times['near'])}; "
        f"a plain read of these rows takes {read:.2f}x as long as of as many in a row"
    )
    measured = paired_ratio(times["near"], times["ours"]) if _gathers_right(gathers[0]) else None
    name = f"gather of {count} of {HYBRID.context} against contiguous, {in_rows(1)}"
    yield Bar(name, at_most, "times", at_most=True).found(measured, times["ours"], note)


def _gathers(place: torch.Tensor, count: int) -> Iterator[partial]:
    """Attend to random, disjoint selections of `count` tokens of one cache."""
    context, heads, head_dim = HYBRID.context, HYBRID.shape.q_heads, HYBRID.shape.head_dim
    order = torch.randperm(context, generator=torch.Generator().manual_seed(0))
    lists = order[: context // count * count].view(-1, 1, count)
    length = torch.tensor([count], dtype=torch.int32)
    k_new, v_new = place[:, :, context : context + 1]
    for indices in lists.sort().values.to(torch.int32):
        q = torch.randn(1, 1, heads, head_dim).to(place.dtype)
        arguments = (q, *place, indices, length, k_new, v_new)
        yield partial(specattn.sparse_gather_attention, *arguments)


def _listed_read(call: partial) -> Callable[[], None]:
    """Return a plain read of the rows of K and V that a gather takes."""
    _, k_cache, v_cache, indices = call.args[:4]
    row_bytes = k_cache.stride(1) * k_cache.itemsize

    def read() -> None:
        for cache in (k_cache, v_cache):
            address, threads = cache.data_ptr(), torch.get_num_threads()
            _cpu.read_rows(address, row_bytes, indices.data_ptr(), indices.numel(), threads)

    return read


def _gathers_right(call: partial) -> bool:
    q, k_cache, v_cache, indices, length, k_new, v_new = call.args
    wide = [x.float() for x in (q, k_cache[:, indices[0]], v_cache[:, indices[0]], k_new, v_new)]
    expected = reference.hybrid_tree_attention(*wide[:3], length, *wide[3:])
    return compare({"out": call()[0]}, {"out": expected[0]}, TOLERANCE[q.dtype])[1]


def held(bench: Bench, isa: str, case: Case, *, share: float) -> Iterator[Bar]:
    """Hold a code path that is not this processor's best against its own ceilings."""
    before = _cpu.isa()
    if isa not in _cpu.isas():
        yield Bar(f"{isa} only, {_name(case)}", share, "share", False, note="not this processor's")
        return
    _cpu.use_isa(isa)
    try:
        (measured,) = hybrid(bench, case, share=share)
    finally:
        _cpu.use_isa(before)
    yield replace(measured, name=f"{isa} only, {measured.name}")


def merge(bench: Bench, *, torch_times: float, share: float) -> Iterator[Bar]:
    """Merge two states that attention has just written: they lie in the cache."""
    name = "merge of two [1, 64, 32, 128] states"
    case = replace(HYBRID, op="merge_state", variant="2 states", context=0, rows=64)
    work = build(case, Draw(case, CPU, seed=0))
    bar = Bar(f"{name}, against torch", torch_times, "times", at_most=False)
    if not right(work):
        yield bar.wrong()
        return
    yield bench.over(bar, work.call, work.peers(())["torch eager"], "torch eager")
    # Not in turn: a read of memory would push the states out of the cache.
    times = bench.times(ours=work.call)["ours"]
    rotation = Rotation(bench.pool, _at(8192, 1))
    read = statistics.median(bench.times(read=rotation.turn(rotation.reads()))["read"])
    measured = work.cost.bytes / statistics.median(times) * read / rotation.place_bytes
    note = f"{milliseconds(times)}; plain read {rotation.place_bytes / read / 1e9:.1f} GB/s"
    bar = Bar(f"{name}, bytes per second", share, "share", at_most=False)
    yield bar.found(measured, times, note)


def states(bench: Bench, op: str, *, rows: int, share: float) -> Iterator[Bar]:
    """Hold verification of a chain, or the commit of all of it, against the ceiling that binds.

    Eight layers' states in one call: so a call from Python weighs as little as in a recorded pass.
    """
    case = replace(STATES, op=op, rows=rows, batch=8)
    rotation = Rotation(bench.pool, case)
    works, name = rotation.workloads(case), f"{op}, {in_rows(rows)}, 8 x {HEADS}"
    with bench.pool.written():
        in_place = op == "gated_delta_commit"
        found = bench.share(rotation, works, "fp32", share, name, in_place=in_place)
    yield found


def paths(bench: Bench, *, rows: int, times: float) -> Iterator[Bar]:
    """Hold a tree against its paths one by one, each of which reads the state anew."""
    case = replace(STATES, variant="tree", rows=rows)
    rotation = Rotation(bench.pool, case)
    works, draw = rotation.workloads(case), Draw(case, CPU, seed=0)
    *drawn, _ = draw.gated_delta()
    parents = draw.parents().tolist()
    lists = [path_of(parents, node) for node in range(rows)]
    chains = [[x[:, path].contiguous() for x in drawn] for path in lists]

    def one_by_one(state: torch.Tensor) -> None:
        for chain in chains:
            specattn.gated_delta_tree(*chain, state, l2_norm=True)

    mean = sum(map(len, lists)) / rows
    name = f"gated_delta_tree, tree of {rows} over its paths one by one, {HEADS}"
    bar = Bar(name, times, "times", at_most=False)
    theirs = rotation.turn([partial(one_by_one, place[0]) for place in rotation.places])
    name = f"paths of {mean:.1f} tokens in the mean"
    yield bench.over(bar, rotation.turn_of(works), theirs, name, works[0])


def path_of(parents: list[int], node: int) -> list[int]:
    """Return the nodes from a root down to one."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def snapshots(bench: Bench, *, rows: int, times: float) -> Iterator[Bar]:
    """Hold verification and the commit of half of a chain against vLLM's snapshots per token.

    One thread: its threads are OpenMP's, which would be waited for on our threads' cores.
    """
    name = f"gated_delta, {in_rows(rows)} of {HEADS}, against vllm"
    bar = Bar(name, times, "times", at_most=False)
    if reason := FAMILIES["vllm"].why_not(CPU):
        yield replace(bar, note=f"vllm: {reason}")
        return
    torch.set_num_threads(1)
    places = Rotation(bench.pool, replace(STATES, rows=rows)).places
    snapshots = Rotation(bench.pool, replace(STATES, rows=rows, batch=rows)).places
    q, k, v, *_ = Draw(replace(STATES, rows=rows), CPU, seed=0).gated_delta()
    a, b = torch.randn(2, 1, rows, v.shape[2]).bfloat16()
    g, beta = -torch.nn.functional.softplus(a.float()), b.float().sigmoid()
    out, counts = torch.empty_like(v), torch.tensor([rows // 2])

    def ours(state: torch.Tensor) -> None:
        _, stash = specattn.gated_delta_tree(q, k, v, g, beta, state, l2_norm=True, out=out)
        specattn.gated_delta_commit(state, stash, None, counts)

    theirs = vllm.snapshots(q[0], k[0], v[0], a[0], b[0])
    start = snapshots[0][0][:1].clone()
    turn = Rotation(bench.pool, replace(STATES, rows=rows)).turn
    call = turn([partial(ours, place[0]) for place in places])
    peer = turn([partial(theirs, place[0]) for place in snapshots])
    with bench.pool.written():
        found = theirs(snapshots[0][0])
        ours(start)
        right = compare({"out": out}, {"out": found[None]}, TOLERANCE[v.dtype])[1]
        seconds = bench.times(ours=call, vllm=peer)
    note = f"{milliseconds(seconds['ours'])}; vllm {milliseconds(seconds['vllm'])}; one thread"
    ratio = paired_ratio(seconds["ours"], seconds["vllm"]) if right else None
    torch.set_num_threads(THREADS)
    yield bar.found(ratio, seconds["ours"], note if right else WRONG)


def overhead(bench: Bench, *, at_most: float) -> Iterator[Bar]:
    """One row, one KV head, one cached token: what is left is the call."""
    q, cache = torch.randn(1, 1, 1, 64), torch.randn(1, 2, 1, 64)
    length = torch.ones(1, dtype=torch.int32)
    call = partial(specattn.hybrid_tree_attention, q, cache, cache, length, q, q)
    times = bench.stopwatch.alternate({"ours": call}, budget=0.5, least=1000, most=10000)["ours"]
    bar = Bar("call of hybrid_tree_attention, one row, one key", at_most, "us", at_most=True)
    yield bar.found(statistics.median(times) * 1e6, times)


def _name(case: Case) -> str:
    named = case.rows > 1 or case.variant in (*EIGHT_BITS, LATENTS)
    kind, *stored = case.variant.split(", ") if named else ("",)
    dtype = [] if case.dtype == HYBRID.dtype else [case.dtype]
    parts = "hybrid", *dtype, in_rows(case.rows, kind), *stored, f"{case.context} keys"
    return ", ".join(parts)


def _at(context: int, rows: int, variant: str = "tree", dtype: str = "bf16") -> Case:
    return replace(HYBRID, context=context, rows=rows, variant=variant, dtype=dtype)


def _stored(rows: int) -> Case:
    return _at(32768, rows, "chain, e4m3")


def _latents(rows: int) -> Case:
    return replace(_at(32768, rows, LATENTS), shape=LATENT_SHAPE)


_CHAIN_8, _CHAIN_64 = _at(32768, 8, "chain"), _at(8192, 64, "chain")
_SCORES, _LOGITS = (
    replace(_CHAIN_8, op="verify_attention", variant=variant) for variant in ("scores", "logits")
)
_PREFILL = _at(32512, 256, "chain")  # the last rows of 32k
SUITE: dict[str, Callable[[Bench], Iterator[Bar]]] = {
    "hybrid-1": partial(hybrid, case=HYBRID, share=0.80),
    "hybrid-4": partial(hybrid, case=_at(32768, 4, "chain"), share=0.75),
    "hybrid-8": partial(hybrid, case=_CHAIN_8, share=0.78),
    "hybrid-16": partial(hybrid, case=_at(32768, 16), share=0.82),
    "hybrid-64": partial(hybrid, case=_at(32768, 64), share=0.85),
    "fp32-1": partial(hybrid, case=replace(HYBRID, dtype="fp32"), share=0.80),
    "fp32-16": partial(hybrid, case=_at(32768, 16, dtype="fp32"), share=0.80),
    "avx512": partial(held, isa="avx512", case=_at(32768, 16), share=0.82),
    "avx2": partial(held, isa="avx2", case=_at(32768, 16, dtype="fp32"), share=0.80),
    "tree": lambda bench: over(
        bench, "tree of 64 rows against a chain, 8192 keys", _at(8192, 64), _CHAIN_64, at_most=0.05
    ),
    "gather": partial(gather, at_most=1.25),
    "scores": lambda bench: over(
        bench, "collecting scores, 8 rows, 32768 keys", _SCORES, _CHAIN_8, at_most=0.02
    ),
    "logits": lambda bench: over(
        bench, "collecting logits of 2 rows, 8 rows, 32768 keys", _LOGITS, _CHAIN_8, at_most=0.05
    ),
    "importance": partial(importance, share=0.85),
    "peers-1": partial(peers, case=HYBRID, vllm=1.6),
    "peers-4": partial(peers, case=_at(32768, 4, "chain"), vllm=3.5),
    "peers-16": partial(peers, case=_at(32768, 16, "chain"), vllm=3.5),
    "peers-64": partial(peers, case=_at(32768, 64, "chain"), vllm=2.7),
    "prefill": partial(peers, case=_PREFILL, others=("sdpa", "vllm"), sdpa=3.5, vllm=1.3),
    "linear-fp32-1": partial(linear, case=replace(LAYER, dtype="fp32"), rows=1, share=0.75),
    "linear-fp32-8": partial(linear, case=replace(LAYER, dtype="fp32"), rows=8, share=0.60),
    "linear-bf16-1": partial(linear, case=replace(LAYER, dtype="bf16"), rows=1, share=0.75),
    "linear-bf16-8": partial(linear, case=replace(LAYER, dtype="bf16"), rows=8, share=0.60),
    "linear-int8": partial(quantised, kind="int8", share=0.80, at_most=1.5),
    "linear-int4": partial(quantised, kind="int4", share=0.65, at_most=2.0),
    "linear-fp8": partial(quantised, kind="fp8", share=0.80, at_most=1.5),
    "merge": partial(merge, torch_times=3, share=1.0),
    "states-verify-1": partial(states, op="gated_delta_tree", rows=1, share=0.75),
    "states-verify-8": partial(states, op="gated_delta_tree", rows=8, share=0.70),
    "states-verify-16": partial(states, op="gated_delta_tree", rows=16, share=0.60),
    "states-commit-1": partial(states, op="gated_delta_commit", rows=1, share=0.75),
    "states-commit-8": partial(states, op="gated_delta_commit", rows=8, share=0.70),
    "states-commit-16": partial(states, op="gated_delta_commit", rows=16, share=0.60),
    "states-paths": partial(paths, rows=16, times=8),
    "states-vllm": partial(snapshots, rows=8, times=1.5),
    **{
        f"bytes-{name}-{rows}": partial(eight_bits, name=name, rows=rows)
        for rows in (1, 2, 4, 8, 16)
        for name in ("int8", "e4m3", "e5m2")
    },
    "bytes-vllm-1": partial(peers, case=_stored(1), others=("vllm",), vllm=1.3),
    "bytes-vllm-8": partial(peers, case=_stored(8), others=("vllm",), vllm=2.0),
    "latents-1": partial(hybrid, case=_latents(1), share=0.60),
    "latents-8": partial(hybrid, case=_latents(8), share=0.65),
    "latents-vllm-1": partial(peers, case=_latents(1), others=("vllm",), vllm=1.3),
    "latents-vllm-4": partial(peers, case=_latents(4), others=("vllm",), vllm=2.0),
    "overhead": partial(overhead, at_most=25),
}
