"""A key that a row does not see adds nothing to it, be the key, its value or a scale NaN or inf."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specattn
from tests import covering
from tests.cases import make_problem
from tests.ops.implementations import forced, paths
from tests.ragged import ragged_batches
from tests.states import causal_convs, gated_deltas, path_of
from tests.unseen import Bad, make_unseen, places_of, same, unseen_calls

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (None, "bool", "packed")
PATHS = paths("reference", "cpu")  # those of GPUs: tools/ptx/tests/test_unseen_keys.py
# Triton's interpreter takes seconds for a call.
INTERPRETED = [pytest.param(x, marks=pytest.mark.gpu_code("triton")) for x in paths("triton")]
everywhere = pytest.mark.parametrize("path", [*PATHS, *INTERPRETED])
in_any_case = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
# Rows that share a vector of a matrix unit move their maximum together: that shows in rounding.
INEXACT = ("amx",)


def first_of(drawn):
    return drawn[0]  # the problem; rows are given ragged here


def is_exact(path):
    """Return whether what is not seen may change no bit."""
    return not any(name in path for name in INEXACT)


@everywhere
@in_any_case
@given(unseen=unseen_calls(DTYPES))
def test_wherever_they_lie(path, unseen):
    with forced(path):
        unseen.check(is_exact(path), whole_rows="triton" in path)


@pytest.mark.parametrize("path", PATHS)
@covering.pairs(
    "where, rows, part, value, dtype",
    ["apart", "cache"],
    [2, 16],
    ["k", "v"],
    [torch.nan, torch.inf, -torch.inf],
    DTYPES,
)
def test_a_rejected_draft(path, where, rows, part, value, dtype):
    """The smallest: a leaf that no other row sees, behind a long prefix."""
    leaf = Bad(0, True, rows - 1, 0, part, None, value)
    calls = make_unseen([leaf], (1000,), rows, tree="chain", where=where, head_dim=64, dtype=dtype)
    with forced(path):
        calls.check(is_exact(path))


@everywhere
@in_any_case
@given(ragged=ragged_batches(dtypes=DTYPES, tree_in_cache=True), data=st.data())
def test_ragged_rows(path, ragged, data):
    index = data.draw(st.sampled_from([b for b, count in enumerate(ragged.rows) if count]))
    node = data.draw(st.integers(0, ragged.rows[index] - 1))
    token = int(ragged.cu_seqlens_q[index]) + node
    call = {"paged": data.draw(st.booleans()), "mask": data.draw(st.sampled_from(MASKS))}
    call["in_cache"] = data.draw(st.booleans())
    changed = copy.deepcopy(ragged)
    for name in data.draw(st.sampled_from([("k",), ("v",), ("k", "v")])):
        value = data.draw(st.sampled_from([torch.nan, torch.inf]))
        getattr(changed, f"{name}_tree")[token, 0] = value
        position = int(ragged.whole.cache_seqlens[index]) + node
        for cache, place in places_of(ragged.whole, index, position):
            getattr(changed.whole, f"{name}_{cache}")[(*place, 0)] = value
    saw = torch.zeros(ragged.q.shape[:-1], dtype=torch.bool)
    first, stop = ragged.cu_seqlens_q[index : index + 2].tolist()
    chain = torch.arange(stop - first) >= node
    sees = chain if call["mask"] is None else ragged.tree_mask[first:stop, node]
    saw[first:stop, : ragged.q.shape[1] // ragged.k_tree.shape[1]] = sees[:, None]
    with forced(path):
        wanted = specattn.hybrid_tree_attention(**ragged.arguments(**call))
        found = specattn.hybrid_tree_attention(**changed.arguments(**call))
    for x, y in zip(found, wanted, strict=True):
        same(x[~saw], y[~saw], is_exact(path))


@pytest.mark.parametrize("path", PATHS)  # Triton declines some of these layers
@in_any_case
@given(problem=gated_deltas().map(first_of), data=st.data())
def test_a_node_of_a_gated_delta_layer(path, problem, data):
    """Of nodes that are not behind it neither outputs nor what is committed change."""
    arguments, changed, behind = _with_a_bad_node(problem, ("q", "k", "v", "g", "beta"), data)
    with forced(path):
        out, stash = specattn.gated_delta_tree(**arguments)
        found, left = specattn.gated_delta_tree(**changed)
        same(found[~behind], out[~behind], exact=True)
        same(left[~behind], stash[~behind], exact=True)
        nodes, counts, clean = _path_beside(problem, behind, data)
        states = [problem.state.clone() for _ in range(2)]
        for state, kept in zip(states, (stash, left), strict=True):
            options = problem.row_options(ragged=True)
            specattn.gated_delta_commit(state, kept, nodes, counts, **options)
    same(states[1][clean], states[0][clean], exact=True)


@everywhere
@in_any_case
@given(problem=causal_convs().map(first_of), data=st.data())
def test_a_node_of_a_short_convolution(path, problem, data):
    arguments, changed, behind = _with_a_bad_node(problem, ("x",), data)
    with forced(path):
        out = specattn.causal_conv_tree(**arguments)
        found = specattn.causal_conv_tree(**changed)
        same(found[~behind], out[~behind], exact=True)
        nodes, counts, clean = _path_beside(problem, behind, data)
        states = [problem.conv_state.clone() for _ in range(2)]
        for state, x in zip(states, (arguments["x"], changed["x"]), strict=True):
            options = problem.row_options(ragged=True)
            specattn.causal_conv_commit(state, x, nodes, counts, **options)
    same(states[1][clean], states[0][clean], exact=True)


def _with_a_bad_node(problem, names, data):
    """Return ragged arguments, the same with a bad node, and which tokens lie behind it."""
    index = data.draw(st.sampled_from([b for b, count in enumerate(problem.rows) if count]))
    node = data.draw(st.integers(0, problem.rows[index] - 1))
    first = problem.starts[index]
    arguments = problem.arguments(ragged=True)
    name = data.draw(st.sampled_from(names))
    changed = arguments | {name: arguments[name].clone()}
    changed[name][first + node] = data.draw(st.sampled_from([torch.nan, torch.inf]))
    behind = torch.zeros(sum(problem.rows), dtype=torch.bool)
    parents = problem.parents[first : first + problem.rows[index]].tolist()
    for other in range(len(parents)):
        behind[first + other] = node in path_of(parents, other)
    return arguments, changed, behind


def _path_beside(problem, behind, data):
    """Return `(nodes, counts)` of a path of each request, and whose have no token `behind`."""
    nodes, counts = problem.paths(data.draw(st.integers(0, 100)))
    clean = [
        not any(behind[problem.starts[b] + node] for node in nodes[b, : counts[b]].tolist())
        for b in range(len(counts))
    ]
    return nodes, counts, torch.tensor(clean)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_key_of_which_the_importance_is_asked(path, value, dtype):
    p = make_problem((100, 7), dtype=dtype)
    changed = copy.deepcopy(p)
    changed.k_cache[0, 30, 1] = value
    with forced(path):
        wanted, found = (
            specattn.importance_scores(x.q, x.k_cache, x.cache_seqlens) for x in (p, changed)
        )
    assert not found[0, 1, 30].isfinite()
    wanted[0, 1, 30] = found[0, 1, 30] = 0
    same(found, wanted, is_exact(path))


@everywhere
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_token_that_is_written(path, value, dtype, stored):
    k, v = torch.randn(2, 1, 6, 2, 24).to(dtype)
    bad = k.clone(), v.clone()
    bad[0][0, 3, 1], bad[1][0, 3, 0, 5] = value, value
    caches = []
    with forced(path):
        for new in ((k, v), bad):
            cache = torch.zeros(2, 1, 8, 2, 24).to(stored or dtype)
            scales = torch.zeros(2, 1, 8, 2)
            options = {"scale": "dynamic", "k_scale": scales[0], "v_scale": scales[1]}
            options = options if stored else {}
            specattn.write_kv(*new, *cache, torch.arange(6)[None] + 1, **options)
            caches.append((cache.float(), scales))
    others = torch.arange(8) != 4
    for found, wanted in zip(caches[1], caches[0], strict=True):
        same(found[:, :, others], wanted[:, :, others], exact=True)
