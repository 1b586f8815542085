"""The primitives that are measured: the rows of each, and what one row times, checks and moves.

A primitive is the function of its name below; nothing else in the benchmark lists it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from specattn.reference._codes import fits_tiles, packed_bytes

import specattn
from specattn import reference
from specattn.ops.add_gumbel_noise import cost as gumbel_cost
from specattn.ops.causal_conv_commit import cost as conv_commit_cost
from specattn.ops.causal_conv_tree import cost as conv_cost
from specattn.ops.cost import Cost, Sizes
from specattn.ops.gated_delta_commit import cost as gated_commit_cost
from specattn.ops.gated_delta_tree import MOST_ROWS as MOST_NODES
from specattn.ops.gated_delta_tree import cost as gated_cost
from specattn.ops.hybrid_tree_attention import cost as hybrid_cost
from specattn.ops.importance_scores import cost as importance_cost
from specattn.ops.linear_few_rows import MOST_ROWS
from specattn.ops.linear_few_rows import cost as linear_cost
from specattn.ops.merge_state import cost as merge_cost
from specattn.ops.select_topk import cost as select_cost
from specattn.ops.sparse_gather_attention import cost as gather_cost
from specattn.ops.tree_attention import cost as tree_cost
from specattn.ops.verify_attention import cost_logits, cost_scores
from specattn.ops.write_kv import cost as write_cost
from specattn.quantised import QuantisedWeight, multiplies_tiles

from . import peers
from .cases import EIGHT_BITS, LATENTS, LAYERS, ROPE, Axes, Case, Layer
from .inputs import SCALE, Draw, Prefix, capacity, of_8_bits, prefix
from .peers import plain, recurrent, vllm

Outputs = dict[str, torch.Tensor]
SPARSITY = 0.07  # of selections; Vegas' default
KEEP = (4, 64)  # first and last tokens that a selection always takes
MERGED = 8  # states in a row of merge_states
VOCABULARY = 151_936  # tokens that noise is drawn for: Qwen3's
TAPS = 4  # of short convolutions
WRITTEN = 4096  # tokens of a request that a cache to write into has room for
MOST_WEIGHTS = 1 << 28  # in a layer; drawing a larger one takes longer than the other rows together
PAGED_ONLY = 1 << 20  # tokens from which on nobody keeps a cache in one piece


@dataclass(frozen=True)
class BoundCase:
    """A case with its tensors: what is timed, what it is held against, and what it must move.

    ``call`` is the public primitive; ``expected(dtype)`` the reference in a wider type;
    ``peers(wanted)`` who else does it, each answering with a part of the same outputs.
    """

    call: Callable[[], Outputs]
    expected: Callable[[torch.dtype], Outputs]
    cost: Cost
    peers: Callable[[tuple[str, ...]], dict[str, peers.Peer]]


Rows = Callable[[Case, Axes], list[Case]]
Builder = Callable[[Case, Draw], BoundCase]
OPS: dict[str, Builder] = {}
"""What draws the tensors of a case and binds them, by primitive."""
_ROWS: dict[str, tuple[bool, Rows]] = {}


def build(case: Case, draw: Draw) -> BoundCase:
    """Draw the tensors of ``case`` and bind them to its calls."""
    return OPS[case.op](case, draw)


def sweep(axes: Axes) -> list[Case]:
    """Return the rows of every primitive along the axes.

    Attention over the whole contiguous cache is swept over ``rows``; pages and collection take the
    middle of them, and sparse attention the smallest, which is a draft step.
    """
    cases: list[Case] = []
    for case in axes.cases():
        for context in (0, *axes.contexts):
            for op, (cached, rows) in _ROWS.items():
                if cached == (context > 0):
                    cases += rows(replace(case, op=op, context=context), axes)
    return [case for case in cases if case.context < PAGED_ONLY or case.page_size]


def _primitive(*variants: str, rows: Rows | None = None, cached: bool = True) -> Callable:
    """Register a primitive and its rows: one case for all contexts where it has no cache."""

    def register(builder: Builder) -> Builder:
        OPS[builder.__name__] = builder
        _ROWS[builder.__name__] = cached, rows or (lambda case, _: _each(case, variant=variants))
        return builder

    return register


def _trees(case: Case, axes: Axes) -> list[Case]:
    return _each(case, variant=("tree",), rows=[t for t in axes.rows if t > 1])


@_primitive(rows=_trees, cached=False)
def tree_attention(case: Case, draw: Draw) -> BoundCase:
    q, k, v, mask = draw.queries(), draw.keys(case.rows), draw.keys(case.rows), draw.tree()
    task = peers.Attention(q, lambda: (k, v), mask)
    cost = tree_cost(_tree_sizes(draw.sizes, mask))
    return _bound(case, (q, k, v, _packed(mask)), cost, partial(peers.attention, task))


@_primitive("2 states", cached=False)
def merge_state(case: Case, draw: Draw) -> BoundCase:
    outs, lses = draw.states(2)
    cost = merge_cost(replace(draw.sizes, states=2))
    state = (outs[0], lses[0], outs[1], lses[1])
    return _bound(case, state, cost, lambda wanted: peers.merge(outs, lses))


@_primitive(f"{MERGED} states", cached=False)
def merge_states(case: Case, draw: Draw) -> BoundCase:
    outs, lses = draw.states(MERGED)
    cost = merge_cost(replace(draw.sizes, states=MERGED))
    return _bound(case, (outs, lses), cost, lambda wanted: peers.merge(outs, lses))


def _layers(case: Case, axes: Axes) -> list[Case]:
    rows = [rows for rows in axes.rows if case.batch * rows <= MOST_ROWS]
    small = [name for name in LAYERS if replace(case, variant=name).weights <= MOST_WEIGHTS]
    return _each(case, variant=small, rows=rows)


@_primitive(rows=_layers, cached=False)
def linear_few_rows(case: Case, draw: Draw) -> BoundCase:
    layer = LAYERS[case.variant](case.shape)
    x = draw.normal(case.batch * case.rows, layer.depth)
    weights = draw.weights(layer)
    if layer.bits is not None:
        return _quantised(case, x, weights[0], layer)
    options = {"up": weights[1], "activation": "silu"} if layer.gated else {}
    cost = linear_cost(x, weights[0], products=layer.products)
    rivals = partial(plain.linear, x, *weights)
    return _bound(case, (x, weights[0]), cost, lambda wanted: rivals(), options, names=("out",))


def _quantised(case: Case, x: torch.Tensor, memory: torch.Tensor, layer: Layer) -> BoundCase:
    """Bind a layer whose codes and scales are what lies in a layer's memory.

    Groups are of 64, or a whole row that is none of such. Floats are a copy without its NaN.
    """
    (outputs, depth), bits = memory.shape, layer.bits or 8
    tiles = x.device.type == "cpu" and fits_tiles(outputs, depth) and multiplies_tiles()
    tiles = tiles and not layer.floats
    row = depth * bits // 8 if bits == 8 or tiles else packed_bytes(depth)
    codes = memory.flatten().view(torch.uint8)[: outputs * row].view(outputs, row)
    if layer.floats:
        codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
    else:
        codes = codes.view(torch.int32 if tiles else torch.int8 if bits == 8 else torch.uint8)
    groups = depth // 64 if depth % 64 == 0 and not layer.floats else 1
    scale = memory.flatten()[-outputs * groups :].view(outputs, groups)

    def rivals() -> dict[str, peers.Peer]:
        whole = QuantisedWeight(codes, scale, None, depth).dequantised(x.dtype)
        return plain.linear(x, whole)

    cost = linear_cost(x, codes, scale=scale)
    options = {"scale": scale}
    return _bound(case, (x, codes), cost, lambda wanted: rivals(), options, names=("out",))


def _contiguous_and_paged(case: Case, axes: Axes) -> list[Case]:
    paged = [replace(case, variant=f"paged {n}", page_size=n) for n in axes.page_sizes]
    few = replace(case, rows=min(axes.rows))
    chains = [rows for rows in axes.rows if rows > 1]  # of one row every variant is a chain
    return (
        _each(replace(case, variant="contiguous"), rows=axes.rows)
        + _each(replace(case, variant="chain"), rows=chains)
        + paged
        + [replace(one, variant=name) for one in dict.fromkeys((few, case)) for name in EIGHT_BITS]
    )


@_primitive(rows=_contiguous_and_paged)
def hybrid_tree_attention(case: Case, draw: Draw) -> BoundCase:
    if case.variant in EIGHT_BITS:
        return _of_8_bits(case, draw)
    if case.variant == LATENTS:
        return _latents(case, draw)
    p, q, mask = prefix(case, draw), draw.queries(), draw.tree()
    options = {"tree_mask": _packed(mask), "block_table": p.block_table}
    first = "copy pages, " if case.page_size else ""
    task = peers.Attention(q, p.keys, mask, first=first, prefix=p)
    cost = hybrid_cost(_tree_sizes(p.sizes, mask))
    return _bound(case, (q, *p.arguments), cost, partial(peers.attention, task), options)


def _of_8_bits(case: Case, draw: Draw) -> BoundCase:
    """Bind attention over a cache of 8 bits; its peer is the same over one of the case's type."""
    dtype, used = EIGHT_BITS[case.variant], case.context + case.rows
    rows = (draw.cache(used) for _ in range(2))
    (k, k_scale), (v, v_scale) = (of_8_bits(x, dtype, case.shape.head_dim) for x in rows)
    q, lengths = draw.queries(), draw.lengths(case.context)
    # An engine stores the tree's keys before it attends to them: so they are numbers of 8 bits.
    trees = [x[:, case.context : used].to(draw.dtype) * SCALE for x in (k, v)]
    sizes = _tree_sizes(replace(draw.sizes, L=case.context, indices=case.batch), None)
    cost = hybrid_cost(sizes)
    fewer = case.context * sizes.Hk * (sizes.D * (sizes.e - 1) - 4)  # 4: a row's scale
    cost = replace(cost, read=cost.read - 2 * case.batch * fewer)

    def meant(dtype: torch.dtype) -> list[torch.Tensor]:
        return [x.to(dtype) * SCALE for x in (k, v)]

    def call() -> Outputs:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        out, lse = specattn.hybrid_tree_attention(q, k, v, lengths, *trees, **scales)
        return {"out": out, "lse": lse}

    def expected(dtype: torch.dtype) -> Outputs:
        wide = [x.to(dtype) for x in trees]
        found = reference.hybrid_tree_attention(q.to(dtype), *meant(dtype), lengths, *wide)
        return dict(zip(("out", "lse"), found, strict=True))

    def rivals(wanted: tuple[str, ...]) -> dict[str, peers.Peer]:
        p = Prefix(*meant(q.dtype), lengths, *trees, None, sizes)
        task = peers.Attention(q, p.keys, None, prefix=p, stored=case.variant)
        names = tuple(name for name in wanted if name == "vllm")
        same = partial(specattn.hybrid_tree_attention, q, *p.arguments)
        of_16_bits = {f"{case.dtype} cache": lambda: {"out": same()[0]}}
        return of_16_bits | peers.attention(task, names)

    return BoundCase(call, expected, cost, rivals)


def _latents(case: Case, draw: Draw) -> BoundCase:
    """Bind attention over one head of latents, whose values are a view of the keys."""
    used, q = case.context + case.rows, draw.queries()
    cache, lengths = draw.cache(used), draw.lengths(case.context)
    tree = cache[:, case.context : used].clone()
    v_dim = cache.shape[-1] - ROPE
    sizes = replace(draw.sizes, L=case.context, indices=case.batch, Dv=v_dim, v_in_k=True)
    given = (q, cache, cache[..., :v_dim], lengths, tree, tree[..., :v_dim])

    def rivals(wanted: tuple[str, ...]) -> dict[str, peers.Peer]:
        if "vllm" not in wanted or vllm.why_not(q.device):
            return {}
        return vllm.latents(q, cache[:, :used], v_dim)

    return _bound(case, given, hybrid_cost(_tree_sizes(sizes, None)), rivals)


@_primitive(rows=lambda case, axes: _each(case, variant=axes.collect))
def verify_attention(case: Case, draw: Draw) -> BoundCase:
    p, q = prefix(case, draw), draw.queries()
    rows, task = (0, -1), peers.Attention(q, p.keys, None, prefix=p)
    options = {"collect": case.variant, "collect_rows": rows}
    sizes = replace(_tree_sizes(p.sizes, None), collected_rows=len(rows))
    cost = cost_scores(sizes) if case.variant == "scores" else cost_logits(sizes)
    # As in a decode loop, what was collected before gives its memory to what is collected next.
    memory = {"collected": specattn.verify_attention(q, *p.arguments, **options)[2]}
    return _bound(
        case,
        (q, *p.arguments),
        cost,
        lambda wanted: peers.verify(task, wanted, case.variant, rows, p.sizes.N),
        options,
        memory,
        ("out", "lse", "collected"),
    )


def _few_rows(case: Case, axes: Axes) -> list[Case]:
    case = replace(case, rows=min(axes.rows))
    return _each(case, sparsity=axes.sparsities, variant=("shared", "per head"))


@_primitive(rows=_few_rows)
def sparse_gather_attention(case: Case, draw: Draw) -> BoundCase:
    p, q, mask = prefix(case, draw), draw.queries(), draw.tree()
    count = _chosen(case.context, case.sparsity)
    lists = case.shape.kv_heads if case.variant == "per head" else 1
    drawn = torch.rand(
        case.batch, lists, case.context, generator=draw.generator, device=draw.device
    )
    indices = drawn.topk(count).indices.sort().values.to(torch.int32)
    lengths = torch.full_like(indices[..., 0], count)
    if lists == 1:
        indices, lengths = indices[:, 0].contiguous(), lengths[:, 0].contiguous()
    sizes = replace(_tree_sizes(p.sizes, mask), L=count, indices=indices.numel() + lengths.numel())
    task = peers.Attention(q, plain.gathered(p, indices), mask, first="gather, ")
    arguments = (q, p.k_cache, p.v_cache, indices, lengths, p.k_tree, p.v_tree, _packed(mask))
    return _bound(case, arguments, gather_cost(sizes), partial(peers.attention, task))


@_primitive("per head")
def importance_scores(case: Case, draw: Draw) -> BoundCase:
    p, q = prefix(case, draw), draw.queries()
    cost = importance_cost(replace(p.sizes, score_rows=p.sizes.Hk))
    rivals = partial(plain.importance, q, p.k_cache, p.sizes.L)
    return _bound(case, (q, p.k_cache, p.lengths), cost, lambda wanted: rivals(), names=("scores",))


@_primitive(rows=lambda case, _: _each(case, variant=("shared", "per head"), sparsity=(SPARSITY,)))
def select_topk(case: Case, draw: Draw) -> BoundCase:
    lists = (case.shape.kv_heads,) if case.variant == "per head" else ()
    width = capacity(case.context)
    scores = draw.normal(case.batch, *lists, width, dtype=torch.float32)
    scores[..., case.context :] = -math.inf
    first, last = KEEP
    options = {"ratio": case.sparsity, "keep_first": first, "keep_last": last}
    count, selected = (_chosen(length, case.sparsity) for length in (case.context, width))
    sizes = replace(
        draw.sizes,
        L=case.context,
        N=width,
        indices=case.batch,
        score_rows=math.prod(lists),
        selected=selected,
    )
    rivals = partial(plain.selection, scores, case.context, count, selected, KEEP)
    arguments, names = (scores, draw.lengths(case.context)), ("indices", "index_lengths")
    cost = select_cost(sizes)
    return _bound(case, arguments, cost, lambda wanted: rivals(), options, names=names)


@_primitive("logits", cached=False)
def add_gumbel_noise(case: Case, draw: Draw) -> BoundCase:
    logits = draw.normal(case.batch * case.rows, VOCABULARY)
    requests = torch.arange(len(logits), device=draw.device)
    arguments, cost = (logits, 1, requests, requests), gumbel_cost(logits)

    def rival() -> Outputs:
        return {"out": reference.add_gumbel_noise(*arguments)}

    rivals = {"torch operators": rival}
    return _bound(case, arguments, cost, lambda wanted: rivals, names=("out",))


@_primitive("contiguous", cached=False)
def write_kv(case: Case, draw: Draw) -> BoundCase:
    k, v = draw.keys(case.rows), draw.keys(case.rows)
    requests = torch.arange(case.batch, device=draw.device)[:, None]
    positions = torch.arange(case.rows, device=draw.device) + WRITTEN // 2
    (k_cache, v_cache), written = plain.room_for(k, positions, WRITTEN)
    slots = requests * WRITTEN + positions

    def call() -> Outputs:
        specattn.write_kv(k, v, k_cache, v_cache, slots)
        return written

    def expected(dtype: torch.dtype) -> Outputs:
        return {"k": k.to(dtype), "v": v.to(dtype)}

    rivals = partial(plain.writes, k, v, requests, positions, WRITTEN)
    return BoundCase(call, expected, write_cost(draw.sizes), lambda wanted: rivals())


def _states(case: Case, axes: Axes) -> list[Case]:
    few = [rows for rows in axes.rows if rows <= MOST_NODES]
    return _each(case, variant=("tree",), rows=few)


@_primitive(rows=_states, cached=False)
def gated_delta_tree(case: Case, draw: Draw) -> BoundCase:
    arguments = draw.gated_delta()
    parents = draw.parents()
    cost = gated_cost(arguments[2], arguments[5], heads=case.shape.kv_heads)
    rivals = partial(recurrent.gated_delta, *arguments, parents)
    options, names = {"parents": parents, "l2_norm": True}, ("out", "stash")
    # As in a recorded pass, outputs have memory of their own.
    memory = dict(zip(names, specattn.gated_delta_tree(*arguments, **options), strict=True))
    return _bound(case, arguments, cost, lambda wanted: rivals(), options, memory, names)


@_primitive(rows=_states, cached=False)
def gated_delta_commit(case: Case, draw: Draw) -> BoundCase:
    *arguments, state = draw.gated_delta()
    arguments[3][:, 0] = -math.inf  # the old state weighs nothing: every call leaves the same
    _, stash = specattn.gated_delta_tree(*arguments, state, l2_norm=True)
    counts = torch.full((case.batch,), case.rows, device=draw.device)

    def call() -> Outputs:
        specattn.gated_delta_commit(state, stash, None, counts)
        return {"state": state}

    def expected(dtype: torch.dtype) -> Outputs:
        after = state.to(dtype)
        reference.gated_delta_commit(after, stash.to(dtype), None, counts)
        return {"state": after}

    rivals = partial(recurrent.gated_delta_commit, state.clone(), stash)
    return BoundCase(call, expected, gated_commit_cost(state, case.rows), lambda wanted: rivals())


@_primitive(rows=_states, cached=False)
def causal_conv_tree(case: Case, draw: Draw) -> BoundCase:
    x, weight, kept = draw.causal_conv(TAPS)
    parents = draw.parents()
    rivals = partial(recurrent.causal_conv, x, weight, kept, parents)
    options = {"parents": parents, "activation": "silu"}
    cost = conv_cost(x, weight)
    arguments = (x, weight, None, kept)
    return _bound(case, arguments, cost, lambda wanted: rivals(), options, names=("out",))


def _enough_to_keep(case: Case, axes: Axes) -> list[Case]:
    return [one for one in _states(case, axes) if one.rows >= TAPS - 1]


@_primitive(rows=_enough_to_keep, cached=False)
def causal_conv_commit(case: Case, draw: Draw) -> BoundCase:
    x, _, kept = draw.causal_conv(TAPS)
    counts = torch.full((case.batch,), case.rows, device=draw.device)

    def call() -> Outputs:
        specattn.causal_conv_commit(kept, x, None, counts)
        return {"conv_state": kept}

    def expected(dtype: torch.dtype) -> Outputs:
        return {"conv_state": x[:, 1 - TAPS :].to(dtype)}

    def rival() -> Outputs:
        return {"conv_state": kept.copy_(x[:, 1 - TAPS :])}

    rivals = {"torch operators": rival}
    return BoundCase(call, expected, conv_commit_cost(kept), lambda wanted: rivals)


def _bound(
    case: Case,
    arguments: tuple,
    cost: Cost,
    rivals: Callable[[tuple[str, ...]], dict[str, peers.Peer]],
    options: dict | None = None,
    memory: dict | None = None,
    names: tuple[str, ...] = ("out", "lse"),
) -> BoundCase:
    """Bind a primitive, and its reference on wider tensors, to the same arguments and options.

    ``memory`` is what only the primitive is given, ``names`` are those of what both return.
    """
    ours, reference_op = getattr(specattn, case.op), getattr(reference, case.op)
    given, ours_too = options or {}, {**(options or {}), **(memory or {})}

    def named(values: torch.Tensor | tuple[torch.Tensor, ...]) -> Outputs:
        return dict(zip(names, values if isinstance(values, tuple) else (values,), strict=True))

    def expected(dtype: torch.dtype) -> Outputs:
        def wide(x):
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        options = {name: wide(value) for name, value in given.items()}
        return named(reference_op(*(wide(x) for x in arguments), **options))

    return BoundCase(lambda: named(ours(*arguments, **ours_too)), expected, cost, rivals)


def _each(case: Case, **axes: Iterable) -> list[Case]:
    """Return the case with every combination of values of some of its fields."""
    return [
        replace(case, **dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]


def _tree_sizes(sizes: Sizes, mask: torch.Tensor | None) -> Sizes:
    """Add what a tree part of T keys costs; a missing mask is a causal chain."""
    if mask is None:
        return replace(sizes, S=sizes.T, tree_pairs=sizes.T * (sizes.T + 1) // 2)
    words = sizes.T * math.ceil(sizes.T / 64)
    return replace(sizes, S=sizes.T, tree_pairs=int(mask.sum()), mask_words=words)


def _packed(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else reference.pack_tree_mask(mask)


def _chosen(length: int, sparsity: float) -> int:
    """Return how many of ``length`` tokens the selection takes; 1e-6 guards against float noise."""
    return min(length, max(math.ceil(sparsity * length - 1e-6), sum(KEEP)))
