"""What the public operations refuse of ragged queries, and what they hand on."""

import pytest
import torch

import specattn
from specattn.ops.cost import Cost, Sizes
from specattn.ops.hybrid_tree_attention import cost
from tests.ragged import make_ragged

OPS = ("hybrid_tree_attention", "verify_attention", "sparse_gather_attention")


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def backend(request):
    """Check what the kernels check themselves, and what is checked for them."""
    if request.param != "reference":
        pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")
    with specattn.use_backend(request.param):
        yield


def arguments_of(op, paged=False, in_cache=False, **options):
    r = make_ragged((3, 1, 0, 4), **options)
    sparse = op == "sparse_gather_attention"
    arguments = r.arguments(paged=paged, in_cache=in_cache, mask="packed", new=sparse)
    if sparse:
        arguments["indices"] = torch.zeros(4, 3, dtype=torch.int32)
        arguments["index_lengths"] = r.whole.cache_seqlens.clamp(max=3)
    return arguments


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def refuse(op, change, error, message, **options):
    with pytest.raises(error, match=f"^{message}"):
        getattr(specattn, op)(**{**arguments_of(op, **options), **change})


BAD_STARTS = [
    (int32(1, 3, 4, 4, 8), "to begin with 0, got 1"),
    (int32(0, 4, 3, 4, 8), "no decrease, got 3 after 4"),
    (int32(0, 1, 2, 3, 8), r"up to max_seqlen_q=4 rows per request, got 5 of request 3"),
    (int32(0, 3, 4, 4, 7), "to end with q's 8 rows, got 7"),
    (int32(0, 3, 4, 8, 9), "to end with q's 8 rows, got 9"),
    (int32(0, 2**31 - 1, -(2**31), 0, 8), "up to max_seqlen_q=4 rows per request, got 2147483647"),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("starts", "message"), BAD_STARTS, ids=[m for _, m in BAD_STARTS])
def test_starts_that_do_not_deal_the_rows(op, starts, message):
    refuse(op, {"cu_seqlens_q": starts}, IndexError, f"cu_seqlens_q: expected {message}")
    masks = arguments_of(op)["tree_mask"]
    bool_mask = specattn.reference.unpack_tree_mask(masks, 4)
    refuse(
        op,
        {"cu_seqlens_q": starts, "tree_mask": bool_mask}
        | ({} if op == "sparse_gather_attention" else {"window": 2}),
        IndexError,
        f"cu_seqlens_q: expected {message}",
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q: expected an int of at least 1 .*None"),
        ({"max_seqlen_q": 0}, ValueError, "max_seqlen_q: expected an int of at least 1 .*got 0"),
        ({"max_seqlen_q": 4.0}, TypeError, "max_seqlen_q: expected an int of at least 1 .*4.0"),
        ({"cu_seqlens_q": None}, ValueError, "max_seqlen_q: expected None without cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 8]}, TypeError, "cu_seqlens_q: expected a tensor, got list"),
        ({"cu_seqlens_q": torch.zeros(5)}, TypeError, "cu_seqlens_q: expected torch.int32"),
        ({"cu_seqlens_q": int32(0, 8)[None]}, ValueError, r"cu_seqlens_q: expected shape \[B\+1"),
        (
            {"q": torch.zeros(2, 4, 4, 64)},
            ValueError,
            r"q: expected shape \[tokens, Hq, D",
        ),
        ({"cu_seqlens_q": int32(0, 3, 8)}, ValueError, r"\w+: expected shape \[B=2,"),
        (
            {"tree_mask": torch.ones(8, 3, dtype=torch.bool)},
            ValueError,
            r"tree_mask: expected shape \[tokens=8, max_seqlen_q=4\], got \[8, 3\]",
        ),
        (
            {"tree_mask": torch.ones(8, 2, dtype=torch.int64)},
            ValueError,
            r"tree_mask: expected shape \[tokens=8, W=1\], got \[8, 2\]",
        ),
        (
            {"out": torch.zeros(1, 8, 4, 64)},
            ValueError,
            r"out: expected shape \[tokens=8, Hq=4, Dv=64\]",
        ),
        (
            {"lse": torch.zeros(7, 4)},
            ValueError,
            r"lse: expected shape \[tokens=8, Hq=4\], got \[7, 4\]",
        ),
    ],
)
def test_wrong_forms(op, change, error, message):
    refuse(op, change, error, message)


@pytest.mark.parametrize("op", OPS)
def test_tree_keys_of_another_number(op):
    name = "k_new" if op == "sparse_gather_attention" else "k_tree"
    change = {name: torch.zeros(7, 2, 64)}
    refuse(op, change, ValueError, rf"{name}: expected shape \[tokens=8, Hk=2, D=64\]")


@pytest.mark.parametrize("op", OPS[:2])
def test_ragged_rows_without_starts(op):
    change = {"cu_seqlens_q": None, "max_seqlen_q": None}
    refuse(op, change, ValueError, r"q: expected shape \[B, T, Hq, D\], got \[8, 4, 64\]")


@pytest.mark.parametrize("op", OPS[:2])
def test_no_room_for_the_tree_in_the_cache(op):
    options = {"tree_in_cache": True, "in_cache": True}
    assert arguments_of(op, **options)["k_cache"].shape[1] == 20
    change = {"cache_seqlens": int32(17, 19, 20, 17)}
    message = "cache_seqlens: expected values from 0 to 16, got 17"
    refuse(op, change, IndexError, message, **options)
    change["cache_seqlens"] = int32(0, 0, 21, 0)
    message = "cache_seqlens: expected values from 0 to 20, got 21"
    refuse(op, change, IndexError, message, **options)


@pytest.mark.parametrize("op", OPS[:2])
def test_used_page_of_a_tree_in_the_cache_that_does_not_exist(op):
    options = {"paged": True, "tree_in_cache": True, "in_cache": True}
    table = arguments_of(op, **options)["block_table"].clone()
    table[1, 3] = 10**6  # 12 cached tokens and one row: the fourth page of 4
    message = "block_table: expected values from 0 to 21, got 1000000"
    refuse(op, {"block_table": table}, IndexError, message, **options)


@pytest.mark.parametrize("rows", [(), (4,), (-5,)])
def test_rows_that_no_request_has(rows):
    message = "collect_rows: expected at least one row, each below T=4"
    refuse("verify_attention", {"collect_rows": rows}, ValueError, message)


def test_a_batch_costs_what_its_requests_cost():
    r = make_ragged((3, 1, 0, 4))
    found = specattn.hybrid_tree_attention(**r.arguments())
    costs = [
        cost(Sizes(B=1, T=rows, Hq=4, Hk=2, D=64, e=4, S=rows, L=int(length)))
        for rows, length in zip(r.rows, r.whole.cache_seqlens, strict=True)
        if rows > 0
    ]
    total = sum(costs, Cost(0, 0, 0))
    cached = 2 * (5 + 12 + 0) * 2 * 64 * 4  # the third request reads nothing
    assert total.written == sum(x.nbytes for x in found)
    assert total.read == sum(x.nbytes for x in (r.q, r.k_tree, r.v_tree)) + cached
    assert total.operations == 4 * 4 * 64 * (3 * 5 + 1 * 12)


class TestWholePrefixes:
    """Lengths of -1 in the sparse primitive."""

    op = "sparse_gather_attention"

    def test_need_their_lengths(self):
        change = {"index_lengths": int32(1, -1, 0, 0)}
        message = "index_lengths: expected values from 0 to 3 without cache_seqlens, got -1"
        refuse(self.op, change, IndexError, message)

    @pytest.mark.parametrize("length", [-2, 4])
    def test_no_other_length_is_excused(self, length):
        change = {"index_lengths": int32(1, length, 0, 0), "cache_seqlens": int32(5, 12, 7, 0)}
        message = f"index_lengths: expected values from 0 to 3, got {length}"
        refuse(self.op, change, IndexError, message)

    @pytest.mark.parametrize("length", [-1, 17])
    def test_lengths_outside_the_cache(self, length):
        change = {"index_lengths": int32(1, -1, 0, 0), "cache_seqlens": int32(5, length, 7, 0)}
        message = f"cache_seqlens: expected values from 0 to 16, got {length}"
        refuse(self.op, change, IndexError, message)

    def test_pages_of_the_prefix(self):
        table = arguments_of(self.op, paged=True)["block_table"].clone()
        table[1, 2] = 10**6
        change = {"index_lengths": int32(1, 1, 0, 0), "cache_seqlens": int32(5, 12, 7, 0)}
        change["block_table"] = table
        specattn.sparse_gather_attention(**{**arguments_of(self.op, paged=True), **change})
        change["index_lengths"] = int32(1, -1, 0, 0)
        message = "block_table: expected values from 0 to 17, got 1000000"
        refuse(self.op, change, IndexError, message, paged=True)

    def test_wrong_shape(self):
        message = r"cache_seqlens: expected shape \[B=4\], got \[3\]"
        refuse(self.op, {"cache_seqlens": int32(1, 1, 1)}, ValueError, message)
