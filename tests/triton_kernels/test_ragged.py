"""Ragged queries on the Triton kernels: float64 on each request alone, and its own uniform call."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels import _configs

import specattn
from specattn import reference
from tests.cases import assert_accurate, expected
from tests.ragged import lists_of, make_ragged, ragged_batches

from .conftest import DEVICE, WHOLE, interpreted, mostly

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = {"max_length": 70, "dtypes": DTYPES}
ROWS = st.sampled_from([(0, -1), (-1,), (0, 0, -1)])


def on_device(arguments):
    return {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
    }


def call(op, arguments, **options):
    """Call a primitive on the device; return its results on the CPU."""
    return [x.cpu() for x in getattr(specattn, op)(**on_device(arguments | options))]


def assert_as_good_as_torch(actual, r, **options):
    """Bound the error of each request's rows by twice that of eager PyTorch in the same dtype."""
    for _, rows, p in r.requests():
        exact_out, exact_lse = expected(p.to(torch.float64), **options)
        out, lse = (x[None, rows] for x in actual)
        assert_accurate(out, exact_out, expected(p, **options)[0], atol=1e-6)
        torch_lse = expected(p.to(torch.float32), **options)[1]
        assert_accurate(lse, exact_lse, torch_lse, atol=2e-6)


@interpreted(20)
@given(
    r=ragged_batches(**BATCHES),
    mask=st.sampled_from(["bool", "packed"]),
    paged=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
)
def test_hybrid_agrees_with_dense_attention(r, mask, paged, window, softcap, with_sinks):
    sinks = torch.linspace(-2, 3, r.q.shape[1]) if with_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    arguments = r.arguments(paged=paged, mask=mask)
    assert_as_good_as_torch(call("hybrid_tree_attention", arguments, **options), r, **options)


@WHOLE
@interpreted(10)
@given(r=ragged_batches(parents="chain", **BATCHES), window=st.sampled_from([None, 1, 2, 9]))
def test_no_mask_is_a_causal_chain_per_request(r, window):
    found = call("hybrid_tree_attention", r.arguments(mask=None), window=window)
    assert_as_good_as_torch(found, r, window=window)


@WHOLE
@interpreted(10)
@given(
    r=ragged_batches(tree_in_cache=True, **BATCHES),
    paged=st.booleans(),
    window=st.sampled_from([None, 3]),
)
def test_the_trees_may_lie_in_the_cache(r, paged, window):
    found = call("hybrid_tree_attention", r.arguments(paged=paged, in_cache=True), window=window)
    assert_as_good_as_torch(found, r, window=window)


@pytest.mark.parametrize("window", mostly(20, None))
def test_requests_of_several_tiles_beside_short_ones(window):
    r = make_ragged((1, 30, 0, 9), (40, 9, 33, 0), dtype=torch.bfloat16)
    with _configs.forced(block_m=16):
        found = call("hybrid_tree_attention", r.arguments(), window=window)
    assert_as_good_as_torch(found, r, window=window)


@WHOLE
def test_many_requests():
    rows = [1 + (b % 7 == 3) - (b % 5 == 4) for b in range(140)]
    r = make_ragged(rows, [b % 40 for b in range(140)], q_heads=2, kv_heads=1, head_dim=16)
    assert_as_good_as_torch(call("hybrid_tree_attention", r.arguments()), r)


def assert_collected(r, arguments, **options):
    found = call("verify_attention", arguments, **options)
    wide = r.to(torch.float64).arguments(mask="packed"), r.to(torch.float32).arguments()
    exact, by_torch = (reference.verify_attention(**x, **options)[2] for x in wide)
    if options["collect"] == "logits":
        assert_accurate(found[2], exact, exact.bfloat16(), atol=1e-6)
    else:
        assert_accurate(found[2], exact, by_torch, atol=2e-6)
    for index, count in enumerate(r.rows):
        assert count > 0 or found[2][index].isneginf().all()
    if options["window"] is None:  # with one, plain attention splits the window alone
        plain = call("hybrid_tree_attention", arguments, softcap=options.get("softcap", 0.0))
        assert all(torch.equal(x, y) for x, y in zip(found[:2], plain, strict=True))


@interpreted(15)
@given(
    r=ragged_batches(**BATCHES),
    rows=ROWS,
    paged=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([0.0, 2.0]),
    form=st.sampled_from(
        [{"collect": "logits"}, {"collect": "scores"}, {"collect": "scores", "per_head": False}]
    ),
)
def test_collected_rows_are_those_of_each_request(r, rows, paged, window, softcap, form):
    options = {"collect_rows": rows, "window": window, "softcap": softcap, **form}
    assert_collected(r, r.arguments(paged=paged), **options)


@pytest.mark.parametrize("collect", ["scores", "logits"])
@pytest.mark.parametrize("window", mostly(None, 20))
def test_what_a_short_request_collects_in_tiles_of_a_long_one(collect, window):
    """The collected rows are dealt to all tiles, of which a short request has one or none."""
    r = make_ragged((1, 5, 0, 3), (20, 9, 13, 40), q_heads=8, kv_heads=1, dtype=torch.bfloat16)
    with _configs.forced(block_m=16):
        assert_collected(r, r.arguments(), collect=collect, collect_rows=(0, 1, -1), window=window)


@interpreted(15)
@given(
    r=ragged_batches(**BATCHES),
    paged=st.booleans(),
    each=st.sampled_from(["row", "head", "request"]),
    new=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gathered_lists_and_whole_prefixes(r, paged, each, new, seed):
    lists = lists_of(r, each, seed)

    def arguments(x):
        given = x.arguments(paged=paged, in_cache=not new, new=True) | lists
        return given if new else given | {"tree_mask": None}

    out, lse = call("sparse_gather_attention", arguments(r))
    op = reference.sparse_gather_attention
    exact = op(**arguments(r.to(torch.float64)))
    assert_accurate(out, exact[0], op(**arguments(r))[0], atol=1e-6)
    assert_accurate(lse, exact[1], op(**arguments(r.to(torch.float32)))[1], atol=2e-6)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_whole_prefixes_of_uniform_queries(paged):
    r = make_ragged((3, 3), (5, 60), dtype=torch.bfloat16)
    p, lists = r.whole, lists_of(r, "head", 1)
    assert (lists["index_lengths"] == -1).any()
    assert (lists["index_lengths"] != -1).any()
    tree = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
    found = call("sparse_gather_attention", {"q": p.q, **p.cache(paged), **tree, **lists})
    ragged = call("sparse_gather_attention", r.arguments(paged=paged, new=True) | lists)
    assert all(torch.equal(x.flatten(0, 1), y) for x, y in zip(found, ragged, strict=True))


@contextmanager
def one_configuration():
    """Cut every call alike, however many rows it has."""
    with _configs.forced(block_m=32, block_n=16, split_size=32):
        yield


@interpreted(15)
@given(
    r=ragged_batches(**BATCHES),
    op=st.sampled_from(["hybrid", "scores", "logits", "gather", "gather per row"]),
    paged=st.booleans(),
    window=st.sampled_from([None, 3]),
)
def test_a_request_has_the_bits_of_its_uniform_call(r, op, paged, window):
    gathers, per_row = op.startswith("gather"), op == "gather per row"
    name = "sparse_gather_attention" if gathers else "verify_attention"
    if op == "hybrid":
        name = "hybrid_tree_attention"
    options = {"per_row": per_row} if gathers else {"window": window}
    options |= {"collect": op} if name == "verify_attention" else {}
    lists = {}
    if gathers:
        lists = lists_of(r, "row" if per_row else "request", 3)
        del lists["per_row"]
    arguments = r.arguments(paged=paged, new=gathers) | lists
    with one_configuration():
        together = call(name, arguments, **options)
        for index, rows, p in r.requests():
            tree = dict(zip(("k_new", "v_new") if lists else ("k_tree", "v_tree"),
                            (p.k_tree, p.v_tree), strict=True))  # fmt: skip
            own = {n: x[index : index + 1] for n, x in lists.items()}
            if per_row:
                own |= {n: lists[n][None, rows] for n in ("indices", "index_lengths")}
            own = own or {"cache_seqlens": p.cache_seqlens}
            alone = call(
                name,
                {"q": p.q, **p.cache(paged), **own, **tree, "tree_mask": p.tree_mask},
                **options,
            )
            for x, y in zip(together[:2], alone, strict=False):
                assert torch.equal(x[None, rows], y)
            if len(together) == 3:
                assert torch.equal(together[2][index : index + 1], alone[2])
