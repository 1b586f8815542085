"""Caches of 8 bits on the Triton kernels, against attention to the numbers that they mean."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels import _configs

import specattn
from tests.cases import assert_accurate, expected, make_problem, problems
from tests.eight_bits import CODES, EIGHT_BITS, forms, meant, quantise
from tests.writes import make_write

from .conftest import DEVICE, WHOLE, interpreted, mostly

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
types = pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)


def on_device(arguments):
    """Return arguments on the device that is tested."""
    moved = {n: x.to(DEVICE) for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    return arguments | moved


def behind(cache, p):
    """Return the tree's tokens, which lie behind each prefix."""
    size = p.k_tree.shape[1]
    return torch.stack([x[n : n + size] for x, n in zip(cache, p.cache_seqlens, strict=True)])


@interpreted(20)
@given(
    p=problems(max_length=70, dtypes=DTYPES, tree_in_cache=True),
    form=forms(),
    paged=st.booleans(),
    in_cache=st.booleans(),
    window=st.sampled_from([None, 3, 20]),
    softcap=st.sampled_from([0.0, 2.0]),
)
def test_hybrid(p, form, paged, in_cache, window, softcap):
    stored, scales = quantise(p, *form[:2], seed=form[2])
    numbers = meant(stored, scales)
    if in_cache:
        numbers.k_tree, numbers.v_tree = (behind(x, p) for x in (numbers.k_cache, numbers.v_cache))
    keys = (None, None) if in_cache else (p.k_tree, p.v_tree)
    tree = dict(zip(("k_tree", "v_tree"), keys, strict=True))
    options = {"window": window, "softcap": softcap}
    given_ = {"q": p.q, "cache_seqlens": p.cache_seqlens, "tree_mask": p.tree_mask, **tree}
    given_ |= stored.cache(paged) | scales[paged] | options
    out, lse = specattn.hybrid_tree_attention(**on_device(given_))
    exact, exact_lse = expected(numbers, **options)
    plain, _ = expected(numbers.to(p.q.dtype), **options)
    _, plain_lse = expected(numbers.to(torch.float32), **options)
    assert out.dtype == p.q.dtype
    assert_accurate(out.cpu(), exact, plain, atol=1e-6)
    assert_accurate(lse.cpu(), exact_lse, plain_lse, atol=2e-6)


@interpreted(12)
@given(
    p=problems(max_length=60, dtypes=DTYPES),
    form=forms(),
    paged=st.booleans(),
    collect=st.sampled_from(["scores", "logits", "importance"]),
)
def test_collected(p, form, paged, collect):
    stored, scales = quantise(p, *form[:2], seed=form[2])
    numbers = meant(stored, scales)

    def found(x, cache):
        call = {"q": x.q, "cache_seqlens": x.cache_seqlens} | cache
        if collect == "importance":
            call = {n: y for n, y in call.items() if n not in ("v_cache", "v_scale")}
            return specattn.importance_scores(**on_device(call), per_head=False).cpu()
        call |= {"k_tree": x.k_tree, "v_tree": x.v_tree, "tree_mask": x.tree_mask}
        return specattn.verify_attention(**on_device(call), collect=collect)[2].cpu()

    actual = found(p, stored.cache(paged) | scales[paged])
    with specattn.use_backend("reference"):
        exact, plain = (found(x, x.cache()) for x in (numbers, numbers.to(torch.float32)))
    plain = exact.bfloat16() if collect == "logits" else plain
    assert_accurate(actual, exact, plain, atol=2e-6)


@interpreted(10)
@given(p=problems(max_length=60, dtypes=DTYPES), form=forms(), paged=st.booleans())
def test_gathered(p, form, paged):
    stored, scales = quantise(p, *form[:2], seed=form[2])
    numbers = meant(stored, scales)
    generator = torch.Generator().manual_seed(form[2])
    capacity, heads = p.k_cache.shape[1:3]
    live = torch.arange(capacity) < p.cache_seqlens[:, None, None]
    chosen = live & (torch.rand(len(p.q), heads, capacity, generator=generator) < 0.6)
    indices = torch.where(chosen, torch.arange(capacity), 2**30).sort(-1).values.int()
    call = {"indices": indices, "index_lengths": chosen.sum(-1).int()}

    def found(x, cache):
        tree = {"k_new": x.k_tree, "v_new": x.v_tree, "tree_mask": x.tree_mask}
        results = specattn.sparse_gather_attention(**on_device(call | tree | {"q": x.q} | cache))
        return [x.cpu() for x in results]

    actual = found(p, stored.cache(paged) | scales[paged])
    with specattn.use_backend("reference"):
        exact, plain, single = (
            found(x, x.cache()) for x in (numbers, numbers.to(p.q.dtype), numbers.to(torch.float32))
        )
    assert_accurate(actual[0], exact[0], plain[0], atol=1e-6)
    assert_accurate(actual[1], exact[1], single[1], atol=2e-6)


@types
@pytest.mark.parametrize("dtype", mostly(torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_every_code_is_read_as_its_number(stored, dtype):
    """Of one key that is seen, the result is its value, and NaN or infinite as that is."""
    cache = CODES.view(stored).view(1, 1, 1, 256)
    q = torch.zeros(1, 1, 1, 256, dtype=dtype)
    call = {"q": q, "k_cache": torch.zeros_like(cache), "v_cache": cache, "k_tree": q, "v_tree": q}
    call["tree_mask"] = torch.zeros(1, 1, dtype=torch.bool)
    call["cache_seqlens"] = torch.ones(1, dtype=torch.int32)
    out, _ = specattn.hybrid_tree_attention(**on_device(call))
    torch.testing.assert_close(out.cpu(), cache.to(dtype), rtol=0, atol=0, equal_nan=True)


@types
@pytest.mark.parametrize("scale", [1e-6, pytest.param(1.7e-5, marks=WHOLE), 300.0])
def test_small_and_large_scales_keep_the_bound_in_float16(stored, scale):
    """Weights of a float16 times scales as small as e5m2 has would be nothing."""
    p = make_problem((50, 7), 3, dtype=torch.float16)
    problem, scales = quantise(p, stored, "tokens")
    scales[False]["v_scale"] = scale * scales[False]["v_scale"]
    scales[True]["v_scale"] = scale * scales[True]["v_scale"]
    if scale > 1:
        p.v_tree *= scale
    numbers = meant(problem, scales)
    p.tree_mask[:] = False
    numbers.tree_mask[:] = False
    call = {"q": p.q, "cache_seqlens": p.cache_seqlens, **problem.cache(), **scales[False]}
    call |= {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}
    out, _ = specattn.hybrid_tree_attention(**on_device(call))
    exact, plain = (expected(x)[0] for x in (numbers, numbers.to(torch.float16)))
    assert_accurate(out.cpu(), exact, plain, atol=1e-9)


@types
@pytest.mark.parametrize(
    "scales", ["heads", "dynamic", *(pytest.param(x, marks=WHOLE) for x in ("none", "tokens"))]
)
@pytest.mark.parametrize("size", mostly(1.0, 1e-6, 3e4))
def test_written_as_the_reference_writes(stored, scales, size):
    new = make_write((2, 40), pages=4, page_size=32, head_dim=20, scale=size).arguments()
    new["k"][0, 0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    given_ = {"heads": torch.tensor([0.01, 3.0]), "none": None}
    per_token = torch.rand(4, 32, 2, generator=torch.Generator().manual_seed(0)) * size / 9

    def written(device):
        caches = {n: torch.ones_like(new[n]).to(stored) for n in ("k_cache", "v_cache")}
        scale = given_.get(scales, per_token)
        both = {n: None if scale is None else scale.clone() for n in ("k_scale", "v_scale")}
        call = {n: x.to(device) if x is not None else x for n, x in (new | caches | both).items()}
        specattn.write_kv(**call, scale="dynamic" if scales == "dynamic" else "given")
        names = ("k_cache", "v_cache", "k_scale", "v_scale")
        return [call[n].cpu().float() for n in names if call[n] is not None]

    actual = written(DEVICE)
    with specattn.use_backend("reference"):
        wanted = written("cpu")
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_old_compilers_have_large_tiles_of_what_registers_store(rows, arch, monkeypatch):
    """What is copied in 16 bits wgmma would read unfenced; on sm_100 nothing has executed it."""
    monkeypatch.setattr(_configs, "UNFENCED", True)
    widths, large = _configs.widths_of(128, 128), (rows, 32)
    for converts, tile in ((True, large if arch == "sm_90" else (32, 64)), (False, (32, 64))):
        with _configs.forced(arch=arch):
            _configs._forced.pop("block_n")  # of these tests
            config = _configs.attention_config(
                torch.device("cuda"), torch.bfloat16, rows, widths, 0, converts
            )
        assert config[:2] == tile


@pytest.mark.parametrize(
    ("arch", "D", "rows"),
    [
        *(("sm_80", 16, 16), ("sm_80", 64, 32), ("sm_80", 80, 64)),
        *(("sm_90", 16, 16), ("sm_90", 32, 32), ("sm_90", 64, 64)),
    ],
)
def test_old_compilers_have_small_tiles_of_what_they_miscompile(arch, D, rows, monkeypatch):
    monkeypatch.setattr(_configs, "UNFENCED", True)
    with _configs.forced(arch=arch):
        config = _configs.attention_config(
            torch.device("cuda"), torch.bfloat16, 64, _configs.widths_of(D, D), 0, True
        )
    assert config.block_m == rows
