"""Valid calls of every primitive, for the tests that hold for all of them."""

import pytest
import torch
from specattn.reference import pack_tree_mask

import specattn
from specattn.quantised import quantise as quantise_weight
from tests.cases import make_problem
from tests.eight_bits import quantise
from tests.latents import make_latents
from tests.ragged import make_ragged
from tests.states import make_causal_conv, make_gated_delta


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def written(k, v, k_cache, v_cache, slots, **options):
    """Call `write_kv`, and return what the caches hold then, and their scales if they are new."""
    specattn.write_kv(k, v, k_cache, v_cache, slots, **options)
    scales = [options["k_scale"], options["v_scale"]] if options.get("scale") == "dynamic" else []
    left = (x.detach().clone() for x in (k_cache, v_cache, *scales) if x is not None)
    return tuple(x.int() if x.dtype == torch.int8 else x for x in left)


def committed(commit, name):
    """Return a function that calls `commit`, returns what it made of argument `name`, undoes it.

    So it may be called twice, and leaves its arguments alone.
    """

    def call(**arguments):
        state = arguments[name]
        before = state.detach().clone() if isinstance(state, torch.Tensor) else None
        commit(**arguments)
        after = state.detach().clone()
        state.copy_(before)
        return after

    return call


def _layers_with_a_state(p):
    """Return the calls of gated delta layers, whose sizes follow those of `p`."""
    rows = p.q.shape[1]
    q, k, v = p.q[:, :, :2], p.k_tree[:, -rows:], p.q.flip(-1)
    gates = torch.sigmoid(v[..., 0]), torch.sigmoid(v[..., 1])
    state = p.q[:, 0, :, :, None] * p.q[:, -1, :, None]
    parents = torch.arange(-1, rows - 1)
    parents[2:] -= 1
    tree = {"q": q, "k": k, "v": v, "g": -gates[0], "beta": gates[1], "state": state}
    x = p.q.flatten(2)
    kept = x[:, :1].flip(-1).repeat(1, 3, 1)
    weight = torch.linspace(-1, 1, 4 * x.shape[-1]).view(-1, 4)
    conv = {"x": x, "weight": weight, "bias": weight[:, 0].clone(), "conv_state": kept}
    path = torch.stack([torch.zeros_like(p.cache_seqlens), p.cache_seqlens % 2 + 1], 1).long()
    path = {"nodes": path, "counts": p.cache_seqlens.clamp(max=2).long()}
    stash = torch.cat([v, v, gates[0][..., None]], -1)
    return {
        "gated_delta_tree": (specattn.gated_delta_tree, tree | {"parents": parents}),
        "gated_delta_commit": (
            committed(specattn.gated_delta_commit, "state"),
            {"state": state, "stash": stash, **path},
        ),
        "causal_conv_tree": (specattn.causal_conv_tree, conv | {"parents": parents}),
        "causal_conv_commit": (
            committed(specattn.causal_conv_commit, "conv_state"),
            {"x": x, "conv_state": kept, **path},
        ),
    }


def valid_calls(p=None, paged=False):
    """Return `{name: (function, keyword arguments)}` on problem `p`, packed mask, no outputs."""
    p = p or make_problem(page_size=4)
    state = torch.randn_like(p.q), torch.randn(p.q.shape[:-1])
    other = torch.randn_like(p.q), torch.randn(p.q.shape[:-1])
    mask = pack_tree_mask(p.tree_mask)
    cache = p.cache(paged)
    keys = {name: x for name, x in cache.items() if name != "v_cache"}
    capacity = p.k_cache.shape[1]
    hybrid = {"q": p.q, **cache, "cache_seqlens": p.cache_seqlens}
    hybrid |= {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": mask}
    indices = torch.arange(3, dtype=torch.int32).repeat(len(p.q), 1)
    sparse = {"q": p.q, **cache, "indices": indices, "k_new": p.k_tree, "v_new": p.v_tree}
    sparse |= {"index_lengths": p.cache_seqlens.clamp(max=3), "tree_mask": mask}
    hidden = p.q.flatten(2)
    weights = torch.Generator().manual_seed(5)
    gate, up = torch.randn(2, 24, hidden.shape[-1], generator=weights)
    return {
        "tree_attention": (
            specattn.tree_attention,
            {"q": p.q, "k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": mask},
        ),
        "merge_state": (
            specattn.merge_state,
            dict(zip(("out_a", "lse_a", "out_b", "lse_b"), state + other, strict=True)),
        ),
        "merge_states": (
            specattn.merge_states,
            {"outs": torch.stack([state[0], other[0]]), "lses": torch.stack([state[1], other[1]])},
        ),
        "hybrid_tree_attention": (specattn.hybrid_tree_attention, hybrid),
        "verify_attention": (specattn.verify_attention, hybrid),
        "sparse_gather_attention": (specattn.sparse_gather_attention, sparse),
        "importance_scores": (
            specattn.importance_scores,
            {"q": p.q, **keys, "cache_seqlens": p.cache_seqlens},
        ),
        "add_gumbel_noise": (
            specattn.add_gumbel_noise,
            {"logits": p.q.flatten(1), "seed": 2**63 + 5}
            | {"requests": p.cache_seqlens.long(), "positions": 7 + p.cache_seqlens.long()},
        ),
        "linear_few_rows": (
            specattn.linear_few_rows,
            {"x": hidden, "weight": gate, "bias": gate[:, 0].clone(), "up": up}
            | {"activation": "silu", "residual": hidden[..., :24]},
        ),
        "select_topk": (
            specattn.select_topk,
            {
                "scores": torch.randn(len(p.q), 2, capacity),
                "cache_seqlens": p.cache_seqlens,
                "ratio": 0.3,
            },
        ),
        "write_kv": (
            written,
            {"k": p.k_tree, "v": p.v_tree, **_zeros(cache)}
            | {"slots": torch.arange(p.k_tree.shape[:2].numel()).view(p.k_tree.shape[:2]) - 2},
        ),
        **_layers_with_a_state(p),
    }


def coded(weight, bits):
    """Return the arguments of a layer with codes of so many bits, gated, with zero points."""
    few = quantise_weight(weight, bits, group=32)
    zero = torch.full_like(few.scale, 3).to(few.codes.dtype)
    up = quantise_weight(weight.flip(0), bits, group=32)
    codes = {"weight": few.codes, "scale": few.scale, "zero": zero}
    return codes | {"up": up.codes, "up_scale": up.scale, "up_zero": zero.flip(0)}


def _zeros(cache):
    return {n: torch.zeros_like(x) for n, x in cache.items() if n != "block_table"}


def variants():
    """Return one readable id and call per op and form of its optional arguments."""
    p, apart = make_problem(page_size=4, tree_in_cache=True), {"k_tree": None, "v_tree": None}
    sinks = torch.randn(4)
    for paged in (False, True):
        for name, (function, arguments) in valid_calls(p, paged).items():
            if not paged or "k_cache" in arguments:
                yield f"{name}-{'paged' if paged else 'contiguous'}", function, arguments
    for name in ("hybrid_tree_attention", "verify_attention"):
        function, arguments = valid_calls(p)[name]
        every_option = {"window": 3, "softcap": 5.0, "sinks": sinks, "softmax_scale": 0.2}
        yield f"{name}-options", function, arguments | every_option
        yield f"{name}-in-cache", function, arguments | apart | {"tree_mask": None}
        yield f"{name}-bool-mask", function, arguments | {"tree_mask": p.tree_mask}
    yield "verify_attention-logits", function, arguments | {"collect": "logits"}
    yield "verify_attention-all-heads", function, arguments | {"per_head": False}
    function, arguments = valid_calls(p)["sparse_gather_attention"]
    no_new = {"k_new": None, "v_new": None, "tree_mask": None}
    yield "sparse_gather_attention-no-new", function, arguments | no_new
    per_head = {
        "indices": arguments["indices"][:, None].repeat(1, 2, 1),
        "index_lengths": arguments["index_lengths"][:, None].repeat(1, 2),
    }
    yield "sparse_gather_attention-per-head", function, arguments | per_head
    yield from ragged_variants()
    yield from eight_bit_variants()
    yield from latent_variants()
    function, arguments = valid_calls(p)["select_topk"]
    yield "select_topk-budget", function, arguments | {"ratio": None, "budget": 4, "keep_last": 2}
    function, arguments = valid_calls(p)["linear_few_rows"]
    plain = {name: arguments[name] for name in ("x", "weight")}
    yield "linear_few_rows-plain", function, plain
    yield "linear_few_rows-rows", function, plain | {"x": arguments["x"].flatten(0, 1)}
    for bits in (8, 4):
        yield f"linear_few_rows-{bits}-bits", function, plain | coded(plain["weight"], bits)
    for activation in ("gelu", "gelu_tanh"):
        yield f"linear_few_rows-{activation}", function, plain | {"activation": activation}
    function, arguments = valid_calls(p)["importance_scores"]
    yield "importance_scores-all-heads", function, arguments | {"per_head": False}
    yield from state_variants()


def ragged_variants():
    """Return ids and calls as `variants` does, of queries of which each request has its own."""
    r, sinks = make_ragged((3, 1, 0, 5), tree_in_cache=True), torch.randn(4)
    every_option = {"window": 3, "softcap": 5.0, "sinks": sinks, "softmax_scale": 0.2}
    for name in ("hybrid_tree_attention", "verify_attention"):
        function = getattr(specattn, name)
        yield f"{name}-ragged", function, r.arguments(mask="packed")
        yield f"{name}-ragged-options", function, r.arguments(paged=True) | every_option
        yield f"{name}-ragged-chain", function, r.arguments(in_cache=True, mask=None)
    yield "verify_attention-ragged-logits", function, r.arguments() | {"collect": "logits"}
    lists = {
        "indices": torch.arange(3, dtype=torch.int32).repeat(4, 1),
        "index_lengths": torch.tensor([3, -1, 2, 0], dtype=torch.int32),
        "cache_seqlens": r.whole.cache_seqlens,
    }
    sparse = r.arguments(paged=True, new=True) | lists
    yield "sparse_gather_attention-ragged", specattn.sparse_gather_attention, sparse


def latent_variants():
    """Return ids and calls as `variants` does, whose values are a view of the keys, or wider."""
    attention = ("hybrid_tree_attention", "verify_attention", "sparse_gather_attention")
    for form, shared in (("latents", True), ("v-apart", False)):
        sizes = {"head_dim": 80, "v_dim": 64, "shared": shared}
        calls = valid_calls(make_latents(**sizes, page_size=4), paged=shared)
        for name in (*attention, "tree_attention"):
            function, arguments = calls[name]
            yield f"{name}-{form}", function, arguments
    function, arguments = calls["write_kv"]
    yield "write_kv-v-apart", function, arguments
    keys_alone = {"v": None, "v_cache": None}
    yield "write_kv-latents", function, arguments | keys_alone


def eight_bit_variants():
    """Return ids and calls as `variants` does, over caches of int8; opcheck compares no float8."""
    p = make_problem(page_size=4, tree_in_cache=True)
    for name, form, paged in (
        ("hybrid_tree_attention", "tokens", True),
        ("verify_attention", "number", False),
        ("sparse_gather_attention", "inline", True),
        ("importance_scores", "heads", False),
        ("hybrid_tree_attention", "none", False),
    ):
        stored, scales = quantise(p, torch.int8, form)
        function, arguments = valid_calls(stored, paged)[name]
        used = {n: x for n, x in scales[paged].items() if f"{n[0]}_cache" in arguments}
        yield f"{name}-{form}-of-8-bits", function, arguments | used
    hybrid, in_cache = valid_calls(stored)["hybrid_tree_attention"]
    in_cache |= {"k_tree": None, "v_tree": None, "tree_mask": None}
    yield "hybrid_tree_attention-in-cache-of-8-bits", hybrid, in_cache
    yield "write_kv-given-of-8-bits", written, _eight_bit_write(p) | {"k_scale": 0.5}
    scales = {name: torch.zeros(p.k_cache.shape[:-1]) for name in ("k_scale", "v_scale")}
    yield "write_kv-dynamic-of-8-bits", written, _eight_bit_write(p) | scales | {"scale": "dynamic"}


def _eight_bit_write(p):
    arguments = valid_calls(p)["write_kv"][1]
    caches = {n: arguments[n].to(torch.int8) for n in ("k_cache", "v_cache")}
    return arguments | caches


def state_variants():
    """Return ids and calls as `variants` does, of layers with a state."""
    function, arguments = valid_calls()["gated_delta_tree"]
    plain = arguments | {"parents": None}
    yield "gated_delta_tree-chain", function, plain | {"l2_norm": True, "query_scale": 0.3}
    channels = arguments["g"][..., None].expand(-1, -1, -1, arguments["q"].shape[-1]).contiguous()
    yield "gated_delta_tree-per-channel", function, arguments | {"g": channels}
    function, arguments = valid_calls()["causal_conv_tree"]
    options = {"parents": None, "bias": None, "activation": "silu"}
    yield "causal_conv_tree-chain", function, arguments | options
    delta, conv = make_gated_delta((3, 1, 0, 5)), make_causal_conv((3, 1, 0, 5))
    yield "gated_delta_tree-ragged", specattn.gated_delta_tree, delta.arguments()
    yield "causal_conv_tree-ragged", specattn.causal_conv_tree, conv.arguments()
    path = {"nodes": None, "counts": torch.tensor([2, 0, 0, 5]), **conv.row_options(ragged=True)}
    _, stash = specattn.gated_delta_tree(**delta.arguments())
    states = {"state": delta.state, "stash": stash}
    yield (
        "gated_delta_commit-ragged",
        committed(specattn.gated_delta_commit, "state"),
        states | path,
    )
    kept = {"conv_state": conv.conv_state, "x": conv.x}
    yield (
        "causal_conv_commit-ragged",
        committed(specattn.causal_conv_commit, "conv_state"),
        kept | path,
    )


# The functions that their files are named after.
PRIMITIVES = tuple(
    name
    for name in specattn.ops.__all__
    if getattr(specattn.ops, name).__module__ == f"specattn.ops.{name}"
)
NAMES = tuple(valid_calls())
WITHOUT_STATE = (  # that return no `(out, lse)`
    "add_gumbel_noise",
    "causal_conv_commit",
    "causal_conv_tree",
    "gated_delta_commit",
    "gated_delta_tree",
    "importance_scores",
    "linear_few_rows",
    "select_topk",
    "write_kv",
)
IN_PLACE = {"write_kv": ("k_cache", "v_cache")}
WITH_STATE = tuple(name for name in NAMES if name not in WITHOUT_STATE)
VARIANTS = [pytest.param(function, kwargs, id=name) for name, function, kwargs in variants()]
# Tracing takes longest: every primitive, and each kind of argument that one may go without.
_TRACED = (
    "gated_delta_tree-ragged",
    "hybrid_tree_attention-in-cache",
    "hybrid_tree_attention-latents",
    "hybrid_tree_attention-options",
    "hybrid_tree_attention-tokens-of-8-bits",
    "linear_few_rows-4-bits",
    "sparse_gather_attention-per-head",
    "sparse_gather_attention-ragged",
    "verify_attention-logits",
    "verify_attention-ragged-options",
    "write_kv-latents",
    "write_kv-dynamic-of-8-bits",
)
TRACED = [
    one
    if one.id in _TRACED or one.id.endswith("-contiguous")
    else pytest.param(*one.values, id=one.id, marks=pytest.mark.slow)
    for one in VARIANTS
]
assert {*_TRACED} <= {one.id for one in VARIANTS}
