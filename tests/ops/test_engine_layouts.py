"""Caches in the memory of engines are read and written where they lie; the rest is refused."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specattn
from tests.cases import make_problem
from tests.eight_bits import quantise
from tests.engine_layouts import LATENT_LAYOUTS, LAYOUTS, in_engine
from tests.latents import make_latents, quantise_latents
from tests.ops.implementations import forced, paths
from tests.writes import assert_same, make_write

PATHS = paths("reference", "cpu")  # those of GPUs: tools/ptx/tests/cases.py
everywhere = pytest.mark.parametrize("path", PATHS)
ONE_SCALE = ("number", "tensor")  # of a layer, as engines have it


def results_of(p, scales=None):
    """Return what every primitive that reads a cache makes of the pages of a problem."""
    cache = p.cache(paged=True) | (scales or {})
    keys = {name: x for name, x in cache.items() if not name.startswith("v_")}
    lengths = {"cache_seqlens": p.cache_seqlens}
    indices = torch.arange(4, dtype=torch.int32).repeat(len(p.q), 1)
    chosen = {"indices": indices, "index_lengths": p.cache_seqlens.clamp(max=4)}
    tree = {"k_tree": None, "v_tree": None, "tree_mask": p.tree_mask}
    new = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
    calls = [
        specattn.hybrid_tree_attention(p.q, **cache, **lengths, **tree),
        specattn.verify_attention(p.q, **cache, **lengths, **tree),
        specattn.sparse_gather_attention(p.q, **cache, **chosen, **new),
        (specattn.importance_scores(p.q, **keys, **lengths),),
    ]
    return [result for call in calls for result in call]


def assert_read_in_place(path, p, order, scales=None):
    """Hold the bits of an engine's memory against those of plain pages; NaN lies around both."""
    with forced(path):
        for found, expected in zip(
            results_of(in_engine(p, order), scales), results_of(p, scales), strict=True
        ):
            assert not found.isnan().any()
            assert torch.equal(found, expected)


@everywhere
@pytest.mark.parametrize("order", LAYOUTS)
def test_every_order_of_axes(path, order):
    p = make_problem((37, 5), 4, page_size=16, dtype=torch.bfloat16, tree_in_cache=True)
    assert_read_in_place(path, p, order)


@everywhere
@pytest.mark.parametrize("scale", ONE_SCALE)
@pytest.mark.parametrize("order", ["PSNHC", "SPHNC", "LPNHSC"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bits_with_one_scale(path, order, stored, scale):
    p = make_problem((37, 5), 4, page_size=16, dtype=torch.bfloat16, tree_in_cache=True)
    p, scales = quantise(p, stored, scale)
    assert_read_in_place(path, p, order, scales[True])


LATENT = {"q_heads": 4, "page_size": 16, "dtype": torch.bfloat16, "tree_in_cache": True}


@everywhere
@pytest.mark.parametrize("order", LATENT_LAYOUTS)
def test_latents(path, order):
    assert_read_in_place(path, make_latents((37, 5), 2, **LATENT), order)


@everywhere
@pytest.mark.parametrize("scale", ONE_SCALE)
def test_latents_of_8_bits(path, scale):
    p, scales = quantise_latents(make_latents((37, 5), 2, **LATENT), torch.float8_e4m3fn, scale)
    assert_read_in_place(path, p, "PNHC", scales[True])


@everywhere
@pytest.mark.parametrize("order", LAYOUTS)
def test_writes(path, order):
    write = make_write((2, 9), 5, 16, head_dim=64, layout=order, dtype=torch.bfloat16)
    expected = write.expected()
    with forced(path):
        specattn.write_kv(**write.arguments())
    assert_same(write.room, expected)


class Copies(TorchDispatchMode):
    """Names operators that return as many new elements as a cache has."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.found = elements, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        """Call an operator, and note it where its result is large and shares no memory."""
        result = operator(*args, **(kwargs or {}))
        of = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, tuple | list) else (result,):
            large = isinstance(x, torch.Tensor) and x.numel() >= self.elements
            if large and x.untyped_storage().data_ptr() not in of:
                self.found.append(str(operator))
        return result


@pytest.mark.parametrize("path", paths("cpu"))
@pytest.mark.parametrize("order", LAYOUTS)
def test_nothing_is_copied(path, order):
    """Of 64 pages one is in use: whoever copies the others shows."""
    p = make_problem((9,), 1, page_size=16, spare=64 * 16, tree_in_cache=True)
    p = in_engine(p, order)
    with forced(path), Copies(p.k_pages.numel()) as copies:
        results_of(p)
    assert not copies.found
    with Copies(p.k_pages.numel()) as copies:
        p.k_pages.clone()
    assert copies.found


PAGES, PAGE, HK, D = 6, 16, 2, 64


@pytest.mark.parametrize(
    ("shape", "view", "message"),
    [
        pytest.param(
            (PAGES, 2, PAGE, HK, D), lambda x: x,
            r"expected shape \[pages, page_size, Hk, D=64\], got \[6, 2, 16, 2, 64\]",
            id="keys and values together",
        ),
        pytest.param(
            (PAGES, HK, D // 8, PAGE, 8), lambda x: x,
            r"expected shape \[pages, page_size, Hk, D=64\], got \[6, 2, 8, 16, 8\]",
            id="columns cut into groups of 8",
        ),
        pytest.param(
            (PAGES, HK, D, PAGE), lambda x: x.permute(0, 3, 1, 2),
            r"expected a contiguous last dimension, strides \[any, any, any, 1\], "
            r"got strides \[2048, 1, 1024, 16\]",
            id="tokens innermost",
        ),
        pytest.param(
            (PAGES, PAGE, D + 8), lambda x: x[:, :, None],
            r"expected shape \[pages, page_size, Hk, D=64\], got \[6, 16, 1, 72\]",
            id="rows with scales in them",
        ),
    ],
)  # fmt: skip
def test_what_no_view_serves_is_refused(shape, view, message):
    """As older kernels' key caches are, and those of fp8_ds_mla and nvfp4."""
    p = make_problem((5, 12), 4, head_dim=D, page_size=PAGE)
    cache = view(torch.zeros(shape))
    with pytest.raises(ValueError, match=f"^k_cache: {message}$"):
        specattn.hybrid_tree_attention(
            p.q, cache, cache, p.cache_seqlens, None, None, block_table=p.block_table
        )
