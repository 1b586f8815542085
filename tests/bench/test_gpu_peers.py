"""The calls that libraries for GPUs get: stand-ins compute what their arguments say."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from kernels.cases import Case  # noqa: E402
from kernels.inputs import Draw  # noqa: E402
from kernels.measure import compare  # noqa: E402
from kernels.peers import FAMILIES  # noqa: E402
from kernels.peers.task import needs  # noqa: E402
from kernels.workloads import build  # noqa: E402
from tests.cases import dense_attention  # noqa: E402

from specattn import flash_attention  # noqa: E402
from specattn.gpu_checks import times as gpu_times  # noqa: E402
from specattn.planning import MODELS  # noqa: E402

CPU = torch.device("cpu")
BATCH, KEYS = 3, 70
TUNED = [(0, None), (0, True), (1, True)]


def case_of(rows, variant="chain", page_size=0):
    """Return a row of the sweep in bfloat16."""
    shape = MODELS["tiny"]
    return Case("hybrid_tree_attention", variant, shape, "bf16", BATCH, KEYS, rows, page_size)


def attended(q, k, v, keys, mask=None):
    """Return attention of a request's rows [T, Hq, D] to keys [N, Hk, D], the last of them theirs.

    Row i of T sees the first ``keys - T + i + 1``, or what bool [T, keys] says.
    """
    rows = len(q)
    if mask is None:
        mask = torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows
    k, v = (x[None, :keys].float() for x in (k, v))
    out, lse = dense_attention(q[None].float(), k, v, mask[None])
    return out[0].to(q.dtype), lse[0]


class Stand:
    """FlashAttention 2, 3 and 4 by their signatures; `given` is how each call was tuned."""

    def __init__(self, name):
        self.__name__, self.given = name, []

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, *, cache_seqlens, causal=False,
        softmax_scale=None, page_table=None, num_splits=0, pack_gqa=None, return_softmax_lse=False,
    ):  # fmt: skip
        """Read a cache up to `cache_seqlens`, which count the rows' own keys."""
        assert causal
        assert softmax_scale is None
        assert k is None
        assert v is None
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == (len(q),)
        self.given.append((num_splits, pack_gqa))
        out = torch.empty_like(q)
        for b, length in enumerate(cache_seqlens.tolist()):
            caches = [k_cache[b], v_cache[b]] if page_table is None else [
                x[page_table[b, : -(-length // x.shape[1])].long()].flatten(0, 1)
                for x in (k_cache, v_cache)
            ]  # fmt: skip
            out[b] = attended(q[b], *caches, length)[0]
        return out

    def flash_attn_func(self, q, k, v, *, causal=False, num_splits=1, pack_gqa=None):
        """Read all keys; return the log-sum-exp beside the output."""
        assert causal
        assert k.stride(-1) == v.stride(-1) == 1
        self.given.append((num_splits, pack_gqa))
        found = [attended(*request, k.shape[1]) for request in zip(q, k, v, strict=True)]
        return torch.stack([out for out, _ in found]), torch.stack([lse.T for _, lse in found])


class Paged:
    """FlashInfer's wrappers over pages NHD, by its documentation."""

    def __init__(self, workspace, kv_layout, use_tensor_cores=False):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"

    def run(self, q, paged_kv_cache):
        """Attend from the rows of all requests [tokens, Hq, D] as planned."""
        assert q.dtype == self.dtype
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        k, v = paged_kv_cache
        assert k.shape[1:] == (self.heads[3], self.heads[1], self.heads[2]) == v.shape[1:]
        out, first = torch.empty_like(q), 0
        starts = self.starts if self.starts is not None else torch.arange(len(q) + 1)
        for b, rows in enumerate(starts.diff().tolist()):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            keys = (len(pages) - 1) * self.heads[3] + int(self.last[b])
            mask = None
            if self.mask is not None:
                mask, first = self.mask[first : first + rows * keys], first + rows * keys
                mask = mask.view(rows, keys)
            own = slice(int(starts[b]), int(starts[b + 1]))
            out[own] = attended(q[own], k[pages].flatten(0, 1), v[pages].flatten(0, 1), keys, mask)[
                0
            ]
        assert self.mask is None or first == len(self.mask)
        return out


class Decode(Paged):
    """One row of a request."""

    def plan(self, indptr, indices, last_page_len, *heads, q_data_type="float16"):
        """Keep what `run` needs."""
        self.starts, self.mask = None, None
        self.indptr, self.indices, self.last = indptr, indices, last_page_len
        self.heads, self.dtype = heads, q_data_type
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}


class Prefill(Paged):
    """Several rows, with a mask over all keys."""

    def plan(
        self, qo_indptr, indptr, indices, last_page_len, *heads, custom_mask, q_data_type="float16"
    ):
        """Keep what `run` needs."""
        self.starts, self.mask = qo_indptr, custom_mask
        self.indptr, self.indices, self.last = indptr, indices, last_page_len
        self.heads, self.dtype = heads, q_data_type
        assert custom_mask.dtype == torch.bool
        assert custom_mask.dim() == 1


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Decode,
    BatchPrefillWithPagedKVCacheWrapper=Prefill,
    single_decode_with_kv_cache=lambda q, k, v: attended(q[None], k, v, len(k))[0][0],
    single_prefill_with_kv_cache=lambda q, k, v, causal: attended(q, k, v, len(k))[0],
)


@pytest.fixture
def libraries(monkeypatch):
    """Put stand-ins where libraries would be; peers ask for a GPU, and are given a CPU."""
    names = {"flash-attn 2": "flash_attn", "flash-attn 3": "flash_attn_interface"}
    found = {name: Stand(names.get(name, name)) for name in flash_attention.MODULES}
    found["flashinfer"] = FLASHINFER
    monkeypatch.setattr(flash_attention, "loaded", found.__getitem__)
    monkeypatch.setitem(sys.modules, "flashinfer", FLASHINFER)
    for name in found:
        name = name.replace(" ", "-")
        there = FAMILIES[name]._replace(why_not=lambda device: None)
        monkeypatch.setitem(FAMILIES, name, there)
    return found


def held(case, *families):
    """Return the peers of a row, each of which was held against float64."""
    work = build(case, Draw(case, CPU, 0))
    peers = work.peers(families)
    expected = work.expected(torch.float64)
    for name, peer in peers.items():
        error, right = compare(peer(), expected, 2e-2)
        assert right, f"{name} errs by {error}"
    return list(peers)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("version", [2, 3, 4])
def test_chains_by_flash_attention(libraries, rows, version):
    names = held(case_of(rows), f"flash-attn-{version}")
    library = libraries[f"flash-attn {version}"]
    assert library.given == ([(0, None)] if version == 2 else TUNED)
    assert len(names) == len(library.given)


def test_pages_by_flash_attention_3_alone(libraries):
    case = case_of(4, page_size=16)
    families = ("flash-attn-2", "flash-attn-3", "flash-attn-4")
    assert len(held(case, *families)) == len(TUNED)
    libraries["flash-attn 3"].__name__ = "fa3_fwd_interface"  # which is built without pages
    assert held(case, *families) == []


def test_flash_attention_has_no_trees(libraries):
    assert held(case_of(4, "contiguous"), "flash-attn-3") == []


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize(("rows", "variant"), [(1, "chain"), (4, "chain"), (9, "contiguous")])
def test_chains_and_trees_by_flashinfer(libraries, rows, variant, page_size):
    if page_size:
        variant = f"{variant}, paged" if variant == "chain" else "paged"
    name = "decode" if rows == 1 else "prefill"
    assert held(case_of(rows, variant, page_size), "flashinfer") == [f"flashinfer {name}"]


@pytest.mark.parametrize("rows", [1, 16])
def test_all_that_gpu_check_times_computes_the_same(libraries, rows):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, 64, generator=generator)
        for n, heads in ((rows, 8), (KEYS, 2), (KEYS, 2))
    )
    expected = attended(q[0], k[0], v[0], KEYS)[0]
    found = dict(gpu_times.calls(["reference"], q, k, v))
    assert {"torch SDPA", "flashinfer", "flash-attn 2", "flash-attn 3, splits 0"} < found.keys()
    for call in found.values():
        out = call()
        assert out.shape == q.shape
        torch.testing.assert_close(out[0], expected)


def test_what_is_absent_is_said_in_one_line_each(monkeypatch):
    flash_attention.loaded.cache_clear()
    monkeypatch.setattr(flash_attention, "MODULES", {"flash-attn 3": ("no_module", "no.module")})
    assert gpu_times.absent()["flash-attn 3"] == "no_module or no.module is not installed"
    assert needs("no_module", torch.device("cuda")) == "no_module is not installed"
    assert needs("no_module", CPU) == "it runs on a GPU only"


def test_a_library_that_does_not_load_costs_no_run(monkeypatch, tmp_path):
    (tmp_path / "breaks_here.py").write_text("raise OSError('undefined symbol:\\n  _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    flash_attention.loaded.cache_clear()
    why = flash_attention.loaded("breaks_here")
    assert why == "breaks_here does not load: OSError: undefined symbol: _ZN3c10"
