"""Ragged queries in C++: against the float64 reference, and the bits of each request alone."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu, reference
from tests import covering
from tests.cases import assert_accurate, expected
from tests.cpu import calls
from tests.cpu.conftest import at_once, each
from tests.cpu.test_gather import eager
from tests.ragged import make_ragged, ragged_batches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LUCK = 5e-7  # what one product or exp may be off where PyTorch happens to be exact
FORMS = [{"collect": "logits"}, {"collect": "scores"}, {"collect": "scores", "per_head": False}]
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
batches = ragged_batches(dtypes=DTYPES, head_dims=(8, 24, 64, 80, 128), max_rows=9)


@pytest.fixture
def threads():
    """Set the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def check_state(found, exact, rough):
    """Hold a state to the bound against the reference's in float64 and the oracle's."""
    size = exact[1][exact[1].isfinite()].abs().amax().item() if exact[1].isfinite().any() else 1.0
    assert_accurate(found[0], exact[0], rough[0], atol=LUCK)
    assert_accurate(found[1], exact[1], rough[1], atol=LUCK * max(1.0, size))


def by_oracle(r, **options):
    """Return what PyTorch makes of each request in the dtype of the batch, side by side."""
    parts = [expected(p, **options) for _, _, p in r.requests()]
    return tuple(torch.cat(part, 1)[0] for part in zip(*parts, strict=True))


def check_hybrid(r, *, form=None, isa=None, **options):
    form = form or {}
    wide = {**options}
    if options.get("sinks") is not None:
        wide["sinks"] = options["sinks"].double()
    exact = reference.hybrid_tree_attention(**r.to(torch.float64).arguments(**form), **wide)
    rough = by_oracle(r, **options)
    for _ in each(isa or _cpu.isa()):
        found = calls.hybrid_tree_attention(**r.arguments(**form), **options)
        check_state(found, exact, rough)


@at_once
@per_isa
@given(r=batches, data=st.data())
def test_hybrid_on_random_batches(isa, r, data):
    form = {
        "paged": data.draw(st.booleans()),
        "mask": data.draw(st.sampled_from(["bool", "packed"])),
    }
    options = {
        "window": data.draw(st.sampled_from([None, 1, 3, 20])),
        "softcap": data.draw(st.sampled_from([0.0, 5.0])),
        "sinks": data.draw(st.sampled_from([None, torch.linspace(-2, 2, r.q.shape[1])])),
    }
    check_hybrid(r, form=form, isa=isa, **options)


@at_once
@per_isa
@given(
    r=ragged_batches(dtypes=DTYPES, tree_in_cache=True),
    paged=st.booleans(),
    window=st.sampled_from([None, 2]),
)
def test_trees_that_lie_in_the_cache(isa, r, paged, window):
    check_hybrid(r, form={"paged": paged, "in_cache": True}, isa=isa, window=window)


@at_once
@per_isa
@given(
    r=ragged_batches(dtypes=DTYPES, parents="chain", max_rows=90),
    window=st.sampled_from([None, 1, 3, 64, 70]),
    form=st.sampled_from([{"mask": None}, {"mask": None, "paged": True}]),
)
def test_causal_chains(isa, r, window, form):
    check_hybrid(r, form=form, isa=isa, window=window)


@per_isa
@given(r=batches, data=st.data())
def test_collecting(isa, r, data):
    form = {"paged": data.draw(st.booleans())}
    options = {
        "window": data.draw(st.sampled_from([None, 2, 20])),
        "softcap": data.draw(st.sampled_from([0.0, 4.0])),
    }
    some_row = st.integers(-max(r.rows), max(r.rows) - 1)
    rows = data.draw(st.lists(some_row, min_size=1, max_size=4))
    collect = {**data.draw(st.sampled_from(FORMS)), "collect_rows": rows}
    found = calls.verify_attention(**r.arguments(**form), **options, **collect)
    exact = reference.verify_attention(
        **r.to(torch.float64).arguments(**form), **options, **collect
    )
    narrow = torch.float32 if collect["collect"] == "scores" else torch.bfloat16
    assert_accurate(found[2], exact[2], exact[2].to(narrow), atol=2e-6)
    plain = calls.hybrid_tree_attention(**r.arguments(**form), **options)
    assert_same_bits(found[:2], plain)  # collecting changes no bit of the result


def draw_lists(data, r):
    """Draw lists of positions, of each request or of each head, some standing for the prefix."""
    heads = (r.k_tree.shape[1],) if data.draw(st.booleans()) else ()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    lists = torch.full((len(r.rows), *heads, 7), 2**30, dtype=torch.int32)
    counts = torch.zeros(lists.shape[:-1], dtype=torch.int32)
    for place in torch.ones_like(counts).nonzero().tolist():
        cached = int(r.whole.cache_seqlens[place[0]])
        chosen = torch.randperm(cached, generator=generator)[:7].int()
        lists[tuple(place)][: len(chosen)] = chosen
        whole = data.draw(st.booleans())
        counts[tuple(place)] = -1 if whole else len(chosen)
    return {"indices": lists, "index_lengths": counts, "cache_seqlens": r.whole.cache_seqlens}


def sparse_arguments(r, lists, *, paged, with_tree):
    arguments = r.arguments(paged=paged, new=True, in_cache=not with_tree)
    return {**arguments, **lists} | ({} if with_tree else {"tree_mask": None})


@per_isa
@given(r=batches, data=st.data())
def test_gathered(isa, r, data):
    form = {"paged": data.draw(st.booleans()), "with_tree": data.draw(st.booleans())}
    options = {
        "softcap": data.draw(st.sampled_from([0.0, 5.0])),
        "sinks": data.draw(st.sampled_from([None, torch.linspace(-2, 2, r.q.shape[1])])),
    }
    lists = draw_lists(data, r)
    found = calls.sparse_gather_attention(**sparse_arguments(r, lists, **form), **options)
    parts = {torch.float64: [], None: []}
    for dtype, results in parts.items():
        for index, _, p in r.to(dtype).requests() if dtype else r.requests():
            chosen = listed(lists, index)
            results.append(eager(p, *chosen, form["with_tree"], **options))
    exact, rough = (
        tuple(torch.cat(x, 1)[0] for x in zip(*results, strict=True)) for results in parts.values()
    )
    check_state(found, exact, rough)


def listed(lists, index):
    """Return positions and lengths of one request, prefixes written out."""
    cached = int(lists["cache_seqlens"][index])
    indices, lengths = (lists[name][index : index + 1] for name in ("indices", "index_lengths"))
    whole, room = lengths < 0, max(0, cached - indices.shape[-1])
    everything = torch.arange(indices.shape[-1] + room, dtype=torch.int32)
    indices = torch.nn.functional.pad(indices, (0, room))
    return everything.where(whole[..., None], indices), lengths.where(~whole, cached)


@per_isa
@given(r=ragged_batches(dtypes=DTYPES), data=st.data())
def test_uniform_lists_that_stand_for_the_prefix(isa, r, data):
    p, lists = r.whole, draw_lists(data, r)
    tree = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
    found = calls.sparse_gather_attention(p.q, **p.cache(data.draw(st.booleans())), **tree, **lists)
    for index in range(len(r.rows)):
        request, chosen = p.request(index), listed(lists, index)
        exact = eager(request.to(torch.float64), *chosen, True, sinks=None)
        rough = eager(request, *chosen, True, sinks=None)
        check_state([x[index : index + 1] for x in found], exact, rough)


def assert_same_bits(found, wanted):
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def alone(p, function, paged, **options):
    tree = {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}
    return function(p.q, cache_seqlens=p.cache_seqlens, **p.cache(paged), **tree, **options)


MIXED = {"rows": (1, 300, 0, 5, 64, 1), "lengths": (2500, 130, 9, 1700, 40, 3)}


@covering.pairs(
    "dtype, paged, count", [torch.float32, torch.bfloat16], [False, True], [1, 2, 5], ids=str
)
def test_a_request_has_the_bits_that_it_has_alone(isa, threads, dtype, paged, count):
    threads(count)
    r = make_ragged(**MIXED, dtype=dtype, q_heads=8, page_size=16)
    found = calls.hybrid_tree_attention(**r.arguments(paged=paged))
    for _, rows, p in r.requests():
        wanted = alone(p, calls.hybrid_tree_attention, paged)
        assert_same_bits([x[None, rows] for x in found], wanted)


@pytest.mark.parametrize("form", FORMS, ids=["logits", "scores", "scores of all heads"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_request_collects_what_it_collects_alone(isa, threads, form, count):
    threads(count)
    r = make_ragged(**MIXED, dtype=torch.bfloat16, q_heads=8, page_size=16)
    *state, collected = calls.verify_attention(**r.arguments(), **form, window=2000)
    for index, rows, p in r.requests():
        wanted = alone(p, calls.verify_attention, False, **form, window=2000)
        assert_same_bits([x[None, rows] for x in state], wanted[:2])
        assert torch.equal(collected[index : index + 1], wanted[2])
    assert collected[2].isneginf().all()


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_gathers_what_it_gathers_alone(isa, threads, count):
    threads(count)
    r = make_ragged(**MIXED, dtype=torch.bfloat16, q_heads=8, page_size=16)
    indices = torch.arange(0, 900).repeat(6, 1) % r.whole.cache_seqlens[:, None].int()
    lists = {"indices": indices.int(), "cache_seqlens": r.whole.cache_seqlens}
    lists["index_lengths"] = torch.tensor([-1, -1, 5, 900, 0, 2], dtype=torch.int32)
    found = calls.sparse_gather_attention(**sparse_arguments(r, lists, paged=True, with_tree=True))
    for index, rows, p in r.requests():
        one = {name: x[index : index + 1] for name, x in lists.items()}
        tree = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
        wanted = calls.sparse_gather_attention(p.q, **p.cache(True), **tree, **one)
        assert_same_bits([x[None, rows] for x in found], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_pages_with_heads_outside_of_tokens(isa, threads, dtype, head_dim):
    """vLLM's caches on a CPU are [blocks, Hk, block, D]: their strides are all that differs."""
    threads(2)
    sizes = {"q_heads": 8, "page_size": 16, "head_dim": head_dim}
    r = make_ragged((1, 40, 5), (600, 70, 130), dtype=dtype, **sizes)
    arguments = r.arguments(paged=True)
    found = calls.hybrid_tree_attention(**arguments)
    for name in ("k_cache", "v_cache"):
        stored = arguments[name].transpose(1, 2).contiguous()
        arguments[name] = stored.transpose(1, 2)
        assert arguments[name].stride(2) > arguments[name].stride(1)
    assert_same_bits(calls.hybrid_tree_attention(**arguments), found)
    check_hybrid(r, form={"paged": True})


def test_any_order_of_requests(isa, threads):
    threads(2)
    r = make_ragged(**MIXED, dtype=torch.bfloat16)
    found = calls.hybrid_tree_attention(**r.arguments())
    order = [4, 1, 5, 0, 3, 2]
    starts = r.cu_seqlens_q.tolist()
    rows = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order])
    counts = torch.tensor([0, *(r.rows[b] for b in order)])
    moved = {name: r.arguments()[name][rows] for name in ("q", "k_tree", "v_tree", "tree_mask")}
    moved |= {name: r.arguments()[name][order] for name in ("k_cache", "v_cache", "cache_seqlens")}
    moved["cu_seqlens_q"] = counts.cumsum(0).int()
    again = calls.hybrid_tree_attention(**{**r.arguments(), **moved})
    assert_same_bits(again, [x[rows] for x in found])


def recorded(r):
    """Return a graph of one ragged call, its starts, its cached lengths and its results."""
    arguments = r.arguments()
    starts, lengths = arguments["cu_seqlens_q"].clone(), arguments["cache_seqlens"].clone()
    arguments |= {"cu_seqlens_q": starts, "cache_seqlens": lengths, "max_seqlen_q": 6}
    arguments["tree_mask"] = None
    graph = _cpu.Graph()
    with graph:
        results = calls.hybrid_tree_attention(**arguments)
    return graph, starts, lengths, results, arguments


def test_a_recording_reads_the_starts_again(isa):
    r = make_ragged((3, 1, 0, 5), (5, 12, 7, 0), dtype=torch.bfloat16)
    graph, starts, lengths, results, arguments = recorded(r)
    for again, longer in (((0, 2, 8, 8, 9), (7, 1, 0, 13)), ((0, 0, 6, 7, 9), (0, 5, 12, 3))):
        starts.copy_(torch.tensor(again))
        lengths.copy_(torch.tensor(longer))
        arguments["k_cache"].nan_to_num_()
        arguments["v_cache"].nan_to_num_()
        for result in results:
            result.fill_(torch.nan)
        graph.replay(2)
        assert_same_bits(results, calls.hybrid_tree_attention(**arguments))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((1, 3, 4, 4, 9), "to begin with 0, got 1"),
        ((0, 4, 3, 4, 9), "no decrease, got 3 after 4"),
        ((0, 0, 0, 7, 9), "up to max_seqlen_q=6 rows per request, got 7 of request 2"),
        ((0, 3, 4, 4, 8), "to end with q's 9 rows, got 8"),
        ((0, 3, 4, 9, 10), "to end with q's 9 rows, got 10"),
    ],
)
def test_starts_that_became_wrong_are_an_error(isa, starts, message):
    r = make_ragged((3, 1, 0, 5), (5, 12, 7, 0))
    graph, held, _, results, _ = recorded(r)
    held.copy_(torch.tensor(starts))
    results[0].fill_(torch.nan)
    with pytest.raises(IndexError, match=f"^cu_seqlens_q: expected {message}"):
        graph.replay(1)
    assert results[0].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seqlen_q": None}, "cu_seqlens_q needs max_seqlen_q, at least 1"),
        ({"max_seqlen_q": 0}, "cu_seqlens_q needs max_seqlen_q, at least 1"),
        ({"q": torch.zeros(1, 9, 4, 64)}, "q must have 3 dimensions"),
        ({"cu_seqlens_q": torch.zeros(5, dtype=torch.int64)}, "cu_seqlens_q must be .* of int32"),
        ({"k_tree": torch.zeros(8, 2, 64)}, r"k_tree must be \[9, 2, 64\]"),
    ],
)
def test_wrong_forms(isa, change, message):
    arguments = make_ragged((3, 1, 0, 5), (5, 12, 7, 0)).arguments() | {"tree_mask": None}
    with pytest.raises(ValueError, match=message):
        calls.hybrid_tree_attention(**{**arguments, **change})
