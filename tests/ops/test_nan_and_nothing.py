"""At the edges of softmax: who sees a NaN says NaN, and who sees nothing says exactly nothing.

Every test holds for every backend and every code path of the C++ kernels that this machine has.
"""

from itertools import product
from typing import NamedTuple

import pytest
import torch

import specattn
from specattn.backends.select import is_forced
from tests.cases import make_problem
from tests.ops.calls import as_tuple
from tests.ops.implementations import forced, paths

NAN = torch.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU = torch.cuda.is_available()
SIZES = {  # for the C++ kernels: rows that are few, and tiles of rows
    "one row": {"rows": 1, "kv_heads": 1},
    "few rows": {"rows": 4, "head_dim": 24},
    "interpreted": {"rows": 3, "head_dim": 16, "kv_heads": 1},
    "tiles": {"rows": 21, "head_dim": 80},
    "warpgroup": {"rows": 21, "head_dim": 64},  # as the Hopper kernel serves
}
PROBLEMS = (
    ("one row", torch.float32),
    ("few rows", torch.bfloat16),
    ("tiles", torch.float32),
    ("tiles", torch.bfloat16),
    ("tiles", torch.float16),
)


class Case(NamedTuple):
    """A problem for one implementation."""

    path: str  # the backend, and of the C++ kernels the code path
    size: str
    dtype: torch.dtype

    @property
    def device(self):
        """Where its tensors lie: on a GPU if there is one that its backend serves."""
        return "cuda" if GPU and self.path in ("cuda", "triton") else "cpu"

    def problem(self):
        """Return three requests of which the first is long enough to be split.

        The last one's last row sees nothing, and no row sees its last tree key, which is NaN.
        """
        length = 40 if self.path in ("reference", "triton") else 1000
        p = make_problem((length, 5, 0), **SIZES[self.size], dtype=self.dtype)
        p.tree_mask[2, -1] = False
        p.tree_mask[2, :, -1] = False
        p.k_tree[2, -1] = p.v_tree[2, -1] = NAN
        return p.to(device=self.device)


def _cases(interpreted, any_scale):
    """Yield what runs on this machine; `interpreted`: Triton in bfloat16, whatever is on record.

    Triton's interpreter takes seconds for every case. `any_scale`: not what
    is made for those above 0, the CUDA kernels and Hopper's.
    """
    available = [name for name, why in specattn.backends().items() if why == "available"]
    if "reference" in available:
        yield from (Case("reference", "few rows", dtype) for dtype in DTYPES)
    if "cuda" in available and not any_scale:
        for problem in product(("one row", "tiles", "warpgroup"), (torch.bfloat16, torch.float16)):
            yield Case("cuda", *problem)
    if "triton" in available and GPU:
        yield from (Case("triton", "few rows", dtype) for dtype in DTYPES)
        if not any_scale:
            yield Case("triton", "warpgroup", torch.bfloat16)
    elif "triton" in available:
        for dtype in DTYPES:
            always = interpreted and dtype == torch.bfloat16
            marks = () if always else pytest.mark.gpu_code("triton")
            size = "interpreted" if always else "few rows"
            yield pytest.param(Case("triton", size, dtype), marks=marks)
    if "cpu" in available:
        for path, problem in product(paths("cpu"), PROBLEMS):
            yield Case(path, *problem)


def _everywhere(*, interpreted, any_scale=False):
    cases = list(_cases(interpreted, any_scale))
    return pytest.mark.parametrize(
        "case", cases, ids=lambda case: ", ".join(map(str, case)), indirect=True
    )


everywhere = _everywhere(interpreted=True)
everywhere_but_interpreted_code_on_record = _everywhere(interpreted=False)
where_any_scale_is_served = _everywhere(interpreted=False, any_scale=True)


@pytest.fixture
def case(request, poisoned_empty):
    """Force one implementation for the length of a test; what it does not write is NaN."""
    with forced(request.param.path):
        yield request.param


def results(p, **options):
    """Return what every primitive that attends makes of a problem, by name, on the CPU."""
    indices = torch.arange(8, dtype=torch.int32, device=p.q.device).expand(3, -1)
    lists = indices, p.cache_seqlens.clamp(max=4)
    tree = (p.k_tree, p.v_tree, p.tree_mask)
    cache = (p.k_cache, p.v_cache, p.cache_seqlens)
    pages, table = (p.k_pages, p.v_pages, p.cache_seqlens), {"block_table": p.block_table}
    hybrid, verify = specattn.hybrid_tree_attention, specattn.verify_attention
    gather, scale = specattn.sparse_gather_attention, options.get("softmax_scale")
    found = {
        "tree": specattn.tree_attention(p.q, *tree, **options),
        "hybrid": hybrid(p.q, *cache, *tree, **options),
        "paged": hybrid(p.q, *pages, *tree, **table, **options),
        "window": hybrid(p.q, *cache, *tree, window=3, **options),
        "scores": verify(p.q, *cache, *tree, **options),
        "scores of all heads": verify(
            p.q, *pages, *tree, **table, collect_rows=(0,), per_head=False, **options
        ),
        "logits": verify(p.q, *cache, *tree, collect="logits", window=60, **options),
        "gather": gather(p.q, p.k_cache, p.v_cache, *lists, *tree, **options),
    }
    if not is_forced("cuda"):  # which does not have it
        found["importance"] = specattn.importance_scores(
            p.q, p.k_cache, p.cache_seqlens, softmax_scale=scale
        )
    return {name: tuple(x.cpu() for x in as_tuple(result)) for name, result in found.items()}


def assert_nan_where_the_reference_has_it(p, *, of_rows=False, **options):
    """Compare the NaN of all results with the reference's, and return the results.

    With `of_rows` (out, lse) may be NaN throughout a row of which the reference has some.
    """
    found = results(p, **options)
    with specattn.use_backend("reference"):
        wanted = results(p.to(device="cpu"), **options)
    for name, tensors in found.items():
        hit = wanted[name][0].isnan().any(-1)
        for number, (x, y) in enumerate(zip(tensors, wanted[name], strict=True)):
            if of_rows and name != "importance" and number < 2:
                assert (x.isnan() >= y.isnan()).all(), name
                assert (x.isnan() <= (hit if number else hit[..., None])).all(), name
            else:
                assert torch.equal(x.isnan(), y.isnan()), name
            assert torch.equal(x.isneginf(), y.isneginf()), name
    return found


@everywhere
def test_a_query_that_is_no_number(case):
    p = case.problem()
    p.q[:, p.q.shape[1] // 2, 1, 3] = NAN
    found = assert_nan_where_the_reference_has_it(p)
    out, lse = found["hybrid"]
    hit = torch.zeros_like(lse, dtype=torch.bool)
    hit[:, p.q.shape[1] // 2, 1] = True
    hit[2, -1] = False  # sees nothing, so it has nothing to say
    assert torch.equal(lse.isnan(), hit)
    assert torch.equal(out.isnan(), hit[..., None].expand_as(out))


@where_any_scale_is_served
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_scale_that_is_no_number(case, softcap):
    p = case.problem()
    found = assert_nan_where_the_reference_has_it(p, softcap=softcap, softmax_scale=NAN)
    assert found["hybrid"][1][:2].isnan().all()


@where_any_scale_is_served
def test_a_query_that_is_no_number_under_a_scale_of_zero(case):
    p = case.problem()
    p.q[:, 0, 1, 3] = NAN
    assert_nan_where_the_reference_has_it(p, softmax_scale=0.0)


@everywhere_but_interpreted_code_on_record
def test_a_key_that_is_no_number(case):
    p = case.problem()
    for keys in (p.k_cache, p.k_pages[None, int(p.block_table[0, 0])]):
        keys[0, 2, 0, 5] = NAN
    p.k_tree[1, -1, 0, 7] = NAN  # a leaf's, which no other row sees
    found = assert_nan_where_the_reference_has_it(p)
    group = p.q.shape[2] // p.k_cache.shape[2]
    lse = found["hybrid"][1]
    hit = torch.zeros_like(lse, dtype=torch.bool)
    hit[0, :, :group] = hit[1, -1, :group] = True
    assert torch.equal(lse.isnan(), hit)


@everywhere_but_interpreted_code_on_record
def test_a_value_that_is_no_number(case):
    p = case.problem()
    for values in (p.v_cache, p.v_pages[None, int(p.block_table[0, 0])]):
        values[0, 2, 0, 5] = NAN
    p.v_tree[1, 0, 0, 7] = NAN  # the root's, which all rows see
    found = assert_nan_where_the_reference_has_it(p, of_rows=case.path in ("triton", "cuda"))
    out, lse = found["hybrid"]
    assert out[0, :, 0, 5].isnan().all()
    assert out[1, :, 0, 7].isnan().all()
    assert lse.isfinite()[0].all()


@everywhere
def test_merging_a_state_that_is_no_number(case):
    outs = torch.randn(3, 1, 5, 2, 24).to(case.device, case.dtype)
    lses = torch.randn(3, 1, 5, 2).to(case.device)
    lses[1, 0, 0], lses[:, 0, 1] = NAN, NAN
    outs[2, 0, 2, 1, 3] = NAN
    outs[2, 0, 3], lses[2, 0, 3] = NAN, -torch.inf  # nobody reads it
    outs[2, 0, 4, 0, 5], lses[2, 0, 4] = NAN, -300.0  # weighs nothing, but was seen
    out, lse = specattn.merge_states(outs, lses)
    pair = specattn.merge_state(outs[0], lses[0], *specattn.merge_state(
        outs[1], lses[1], outs[2], lses[2]))  # fmt: skip
    for merged, merged_lse in ((out, lse), pair):
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[0, :2] = hit[0, 2, 1, 3] = hit[0, 4, 0, 5] = True
        assert torch.equal(merged.isnan(), hit)
        assert merged_lse[0, :2].isnan().all()
        assert merged_lse[0, 2:].isfinite().all()


@everywhere
def test_a_row_that_sees_nothing(case):
    found = results(case.problem())
    found.pop("importance", None)
    for name, (out, lse, *_) in found.items():
        assert (out[2, -1] == 0).all(), name
        assert lse[2, -1].isneginf().all(), name


@everywhere
@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_merging_states_that_saw_nothing(case, empty):
    outs, lses = (
        torch.full((3, 1, 2, 3, 24), NAN, dtype=case.dtype, device=case.device),
        torch.full((3, 1, 2, 3), empty, device=case.device),
    )
    for out, lse in (
        specattn.merge_states(outs, lses),
        specattn.merge_state(outs[0], lses[0], outs[1], -lses[1].abs()),
    ):
        assert (out == 0).all()
        assert lse.isneginf().all()
