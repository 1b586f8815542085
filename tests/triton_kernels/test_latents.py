"""Values that are a view of their keys, or of another size, in the attention kernel family."""

import pytest
import torch
from specattn.triton_kernels import _configs

import specattn
from tests.cases import assert_accurate, dense_attention, expected
from tests.latents import make_latents

from .conftest import DEVICE, mostly
from .test_attention import assert_as_good_as_torch

SHAPES = [  # D, Dv, whether V is a view of K
    pytest.param(576, 512, True, id="latents"),
    pytest.param(80, 64, True, id="small"),
    pytest.param(192, 128, False, id="expanded"),
    pytest.param(64, 128, False, id="wide-values"),
    pytest.param(256, 128, False, id="narrow-values"),
    pytest.param(512, 512, False, id="wide-heads"),
    pytest.param(576, 512, False, id="copied-latents"),
]
EVERY = {"window": 9, "softcap": 2.0}


def make(D, v_dim, shared, lengths=(50, 7), rows=3, **options):
    options = {"q_heads": 8, "dtype": torch.bfloat16, "device": DEVICE, "scale": 0.5} | options
    return make_latents(lengths, rows, head_dim=D, v_dim=v_dim, shared=shared, **options)


def call(p, paged=False, in_cache=False, **options):
    tree = (None, None) if in_cache else (p.k_tree, p.v_tree)
    given = {**p.cache(paged), "cache_seqlens": p.cache_seqlens, "tree_mask": p.tree_mask}
    return given | {"q": p.q, "k_tree": tree[0], "v_tree": tree[1]} | options


def on_cpu(p):
    return p.to(device="cpu")


@pytest.mark.parametrize("paged", mostly(True, False), ids=["paged", "contiguous"])
@pytest.mark.parametrize(("D", "v_dim", "shared"), SHAPES)
def test_hybrid(D, v_dim, shared, paged):
    p, sinks = make(D, v_dim, shared), torch.linspace(-1, 1, 8)
    state = specattn.hybrid_tree_attention(**call(p, paged, sinks=sinks.to(DEVICE)), **EVERY)
    assert_as_good_as_torch(state, on_cpu(p), sinks=sinks, **EVERY)


@pytest.mark.parametrize("rows", mostly(9, 1, 3), ids="{} rows".format)
def test_tiles_of_rows(rows):
    p = make(576, 512, True, (70,), rows, q_heads=16)
    state = specattn.hybrid_tree_attention(**call(p))
    assert_as_good_as_torch(state, on_cpu(p))


def test_the_tree_in_the_cache():
    p = make(576, 512, True, tree_in_cache=True)
    state = specattn.hybrid_tree_attention(**call(p, paged=True, in_cache=True))
    assert_as_good_as_torch(state, on_cpu(p))


@pytest.mark.parametrize("collect", ["scores", "logits"])
def test_what_is_collected_is_of_whole_keys(collect):
    p = make(576, 512, True)
    out, lse, collected = specattn.verify_attention(**call(p), collect=collect)
    assert_as_good_as_torch((out, lse), on_cpu(p))
    exact = on_cpu(p).to(torch.float64)
    rows, heads = exact.q[:, [0, -1]], exact.k_cache[:, :, 0]
    logits = torch.einsum("brhd,bnd->brhn", rows, heads) * 576**-0.5
    live = torch.arange(logits.shape[-1]) < exact.cache_seqlens[:, None]
    if collect == "scores":
        logits = logits.mean((1, 2))[:, None]
    logits = logits.masked_fill(~live.view(2, *[1] * (logits.dim() - 2), -1), -torch.inf)
    close = {"scores": logits.float(), "logits": logits.bfloat16()}[collect]
    assert_accurate(collected.cpu(), logits, close, atol=1e-5)


@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])
def test_gathered_latents(per_row):
    """With 40 heads, a row with a list of its own is two tiles of 32, not all of them heads."""
    p = make(576, 512, True, (50, 40), q_heads=40)
    shape = (2, 3) if per_row else (2, 1)
    chosen = torch.rand(*shape, 40).argsort(-1)[..., :36].sort().values.int()
    counts = torch.tensor([[36, 0, 33], [11, -1, 20]], dtype=torch.int32)[:, : shape[1]]
    lists = (chosen, counts) if per_row else (chosen[:, 0], counts[:, 0].contiguous())
    state = specattn.sparse_gather_attention(
        p.q, p.k_cache, p.v_cache, *(x.to(DEVICE) for x in lists), p.k_tree, p.v_tree,
        p.tree_mask, cache_seqlens=p.cache_seqlens, per_row=per_row,
    )  # fmt: skip
    taken = torch.zeros(*shape, p.k_cache.shape[1], dtype=torch.bool)
    for b, t in torch.ones(shape).nonzero().tolist():
        count = int(counts[b, t])
        taken[b, t, chosen[b, t, :count].long() if count >= 0 else slice(40)] = True

    def dense(x):
        k, v = torch.cat([x.k_cache, x.k_tree], 1), torch.cat([x.v_cache, x.v_tree], 1)
        visible = torch.cat([taken.expand(-1, 3, -1), x.tree_mask], -1)
        return dense_attention(x.q, k, v, visible)

    x = on_cpu(p)
    exact, torch_own = dense(x.to(torch.float64)), dense(x)
    assert_accurate(state[0].cpu(), exact[0], torch_own[0], atol=1e-6)
    assert_accurate(state[1].cpu(), exact[1], dense(x.to(torch.float32))[1], atol=2e-6)


def test_the_tree_alone():
    p = make(576, 512, True)
    state = specattn.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    exact = expected(on_cpu(p).to(torch.float64), prefix=False)
    assert_accurate(state[0].cpu(), exact[0], expected(on_cpu(p), prefix=False)[0], atol=1e-6)


@pytest.mark.parametrize("D", [576, 192])
def test_keys_alone_are_written(D):
    k, cache = torch.randn(5, 1, D, device=DEVICE), torch.zeros(2, 4, 1, D, device=DEVICE)
    slots = torch.tensor([7, 0, -1, 3, 4], device=DEVICE)
    specattn.write_kv(k, None, cache, None, slots)
    exact = torch.zeros(8, 1, D)
    exact[slots[slots >= 0].cpu()] = k.cpu()[slots.cpu() >= 0]
    assert torch.equal(cache.cpu().flatten(0, 1), exact)


def test_values_are_loaded_with_their_keys_only_where_they_begin_with_them():
    whole = _configs.widths_of(576, 512, True)
    assert (whole.block_d, whole.block_r, whole.block_v) == (512, 64, 0)
    assert _configs.widths_of(576, 512).block_v == 512
    assert _configs.widths_of(576, 256, True).block_v == 256  # no part that is loaded by itself
    assert _configs.widths_of(192, 128) == (192, 128, 64, 128, 128)
    assert _configs.widths_of(80, 80) == (80, 128, 0, 80, 128)


def test_wide_heads_of_float32_are_left_to_others():
    p = make(576, 512, True, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="keys of 576 and values of 512 in float32"):
        specattn.hybrid_tree_attention(**call(p))
