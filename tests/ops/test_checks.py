"""Every bad argument is refused with the right error, by name."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import specattn
from specattn.ops import _check
from tests.cases import make_problem
from tests.ops.calls import NAMES, WITH_STATE, valid_calls

INT32, INT64 = torch.int32, torch.int64


def int32(*values):
    return torch.tensor(values, dtype=INT32)


def refuse(op, change, error, message, paged=False, **options):
    function, arguments = valid_calls(make_problem(**options), paged)[op]
    with pytest.raises(error, match=message):
        function(**{**arguments, **change(arguments)})


TENSORS = [
    (op, name)
    for op in NAMES
    for name, value in valid_calls()[op][1].items()
    if isinstance(value, torch.Tensor)
]
OPTIONAL = ("tree_mask", "k_tree", "v_tree", "k_new", "v_new", "bias", "up", "residual")
OPTIONAL += ("parents", "nodes")


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_not_a_tensor(op, name):
    refuse(op, lambda a: {name: [1, 2]}, TypeError, f"^{name}: expected a tensor, got list")


@pytest.mark.parametrize(("op", "name"), [t for t in TENSORS if t[1] not in OPTIONAL])
def test_none_where_a_tensor_is_needed(op, name):
    refuse(op, lambda a: {name: None}, TypeError, f"^{name}: expected a tensor, got NoneType")


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_wrong_dtype(op, name):
    message = f"^{name}: expected torch.*got torch.int16"
    refuse(op, lambda a: {name: a[name].short()}, TypeError, message)


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_wrong_number_of_dimensions(op, name):
    refuse(op, lambda a: {name: a[name][None, None]}, ValueError, f"^{name}: expected shape .*got")


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_other_device(op, name):
    first = next(iter(valid_calls()[op][1]))
    blamed = "^[a-z_]+: expected device meta" if name == first else f"^{name}: expected device cpu"
    refuse(op, lambda a: {name: a[name].to("meta")}, ValueError, blamed)


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_last_dimension_not_contiguous(op, name):
    if valid_calls()[op][1][name].shape[-1] == 1:
        pytest.skip("one element has no stride")

    def spread(arguments):
        x = arguments[name]
        return {name: torch.stack([x, x], -1)[..., 0]}

    refuse(op, spread, ValueError, f"^{name}: expected a contiguous last dimension")


FLOATING = [(op, name) for op, name in TENSORS if valid_calls()[op][1][name].is_floating_point()]
COMPILED = {"hybrid_tree_attention", "linear_few_rows", "gated_delta_commit"}
LAST_OF_EACH = {(op, name) for op, name in dict(FLOATING).items() if op in COMPILED}


def check_gradient(op, name, compile):
    function, arguments = valid_calls()[op]
    function(**arguments)
    arguments[name].requires_grad_()
    with torch.no_grad():
        function(**arguments)  # what was right there is not right everywhere
    message = rf"^{name}: expected no gradient .*torch\.no_grad\(\)"
    with pytest.raises(ValueError, match=message):
        compile(function)(**arguments)


@pytest.mark.parametrize(("op", "name"), FLOATING)
def test_a_gradient_is_refused(op, name):
    check_gradient(op, name, lambda function: function)


@pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(*t, marks=() if t in LAST_OF_EACH else pytest.mark.slow) for t in FLOATING],
)
def test_a_gradient_is_refused_where_it_is_compiled(op, name, fresh_compiler):
    check_gradient(op, name, lambda function: torch.compile(function, backend="eager"))


@pytest.mark.parametrize("op", WITH_STATE)
@pytest.mark.parametrize("name", ["out", "lse"])
def test_wrong_outputs(op, name):
    shape = (2, 4, 4, 64) if name == "out" else (2, 4, 4)
    refuse(op, lambda a: {name: torch.empty(shape).half()}, TypeError, f"^{name}: expected")
    refuse(op, lambda a: {name: torch.empty(shape)[:1]}, ValueError, f"^{name}: expected shape")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ([0.0], TypeError, "expected a tensor, got list"),
        (torch.empty(2, 2, 16).half(), TypeError, "expected torch.float32 as q is torch.float32"),
        (torch.empty(2, 3, 16), ValueError, r"expected shape \[B=2, Hk=2, N=16\]"),
        (torch.empty(2, 2, 16, device="meta"), ValueError, "expected device cpu as q, got meta"),
        (torch.empty(2, 2, 16, 2)[..., 0], ValueError, "expected a contiguous last dimension"),
    ],
)
def test_wrong_room_for_scores(change, error, message):
    refuse("verify_attention", lambda a: {"collected": change}, error, f"^collected: {message}")


def test_wrong_room_for_logits():
    change = {"collect": "logits", "collect_rows": (0, 1, 2), "collected": torch.empty(2, 2, 4, 16)}
    refuse("verify_attention", lambda a: change, TypeError, "^collected: expected torch.bfloat16")
    change["collected"] = change["collected"].bfloat16()
    message = r"^collected: expected shape \[B=2, R=3, Hq=4, N=16\], got \[2, 2, 4, 16\]"
    refuse("verify_attention", lambda a: change, ValueError, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": a["q"][:1]}, r"k_cache: expected shape \[B=1, N, Hk, D=64\], got"),
        (lambda a: {"q": a["q"][:, :, :3]}, "q: expected heads in multiples of Hk=2, got 3"),
        (
            lambda a: {"k_cache": a["k_cache"][..., :32]},
            r"k_cache: .* D=64\], got \[2, 16, 2, 32\]",
        ),
        (lambda a: {"v_cache": a["v_cache"][:, :3]}, r"v_cache: expected shape \[B=2, N=16,"),
        (lambda a: {"v_tree": a["v_tree"][:, :3]}, r"v_tree: expected shape \[B=2, S=4,"),
        (lambda a: {"tree_mask": a["tree_mask"][:, :3]}, "tree_mask: expected shape"),
        (lambda a: {"tree_mask": a["tree_mask"].repeat(1, 1, 2)}, r"tree_mask: .*W=1\] or"),
        (lambda a: {"sinks": torch.zeros(3)}, r"sinks: expected shape \[Hq=4\], got \[3\]"),
        (lambda a: {"window": 0}, "window: expected None or at least 1 token, got 0"),
        (lambda a: {"softcap": -1.0}, "softcap: expected 0 or a positive number, got -1.0"),
        (lambda a: {"block_table": torch.zeros(3, 4, dtype=INT32)}, "block_table: expected shape"),
        (lambda a: {"q": a["q"][:, :0], "tree_mask": None}, "q: expected no empty dimension"),
        (
            lambda a: {"k_tree": a["k_tree"][:, :3], "v_tree": a["v_tree"][:, :3]},
            "q: expected rows up to the tree's S=3, got 4",
        ),
    ],
)
@pytest.mark.parametrize("op", ["hybrid_tree_attention", "verify_attention"])
def test_wrong_values_of_a_hybrid_pass(op, change, message):
    refuse(op, change, ValueError, "^" + message)


@pytest.mark.parametrize("op", ["hybrid_tree_attention", "verify_attention"])
@pytest.mark.parametrize("name", ["k_tree", "v_tree"])
def test_keys_without_values(op, name):
    refuse(op, lambda a: {name: None}, TypeError, f"^{name}: expected a tensor, got NoneType")


@pytest.mark.parametrize("head_dim", [4, 60, 584])
@pytest.mark.parametrize("op", ["tree_attention", "importance_scores"])
def test_head_dim_out_of_range(op, head_dim):
    message = f"^q: expected head_dim in multiples of 8 up to 576, got {head_dim}"
    refuse(op, lambda a: {}, ValueError, message, head_dim=head_dim)


@pytest.mark.parametrize("rows", [(), (4,), (-5,), (0, 9)])
def test_rows_that_do_not_exist(rows):
    message = r"^collect_rows: expected at least one row, each below T=4"
    refuse("verify_attention", lambda a: {"collect_rows": rows}, ValueError, message)


def test_logits_are_per_head():
    message = "^per_head: expected True for logits, got False"
    change = {"collect": "logits", "per_head": False}
    refuse("verify_attention", lambda a: change, ValueError, message)


def test_wrong_room_for_scores_of_all_heads():
    message = r"^collected: expected shape \[B=2, N=16\], got \[2, 2, 16\]"
    change = {"per_head": False, "collected": torch.empty(2, 2, 16)}
    refuse("verify_attention", lambda a: change, ValueError, message)


def test_unknown_collection():
    message = "^collect: expected 'scores' or 'logits', got 'weights'"
    refuse("verify_attention", lambda a: {"collect": "weights"}, ValueError, message)


def test_mask_without_new_keys():
    change = {"k_new": None, "v_new": None}
    refuse("sparse_gather_attention", lambda a: change, ValueError, "^tree_mask: expected None")


@pytest.mark.parametrize("shape", [(2, 2), (3,)])
def test_index_lengths_follow_indices(shape):
    lengths = torch.zeros(shape, dtype=INT32)
    message = r"^index_lengths: expected shape \[B=2\]"
    refuse("sparse_gather_attention", lambda a: {"index_lengths": lengths}, ValueError, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": None}, "ratio, budget: expected exactly one of the two"),
        ({"budget": 3}, "ratio, budget: expected exactly one of the two"),
        ({"ratio": 0.0}, r"ratio: expected a share in \(0, 1\], got 0.0"),
        ({"ratio": 1.1}, "ratio: expected"),
        ({"ratio": None, "budget": 0}, "budget: expected at least 1 token, got 0"),
        ({"min_tokens": -1}, "min_tokens: expected 0 or more tokens, got -1"),
        ({"keep_first": -1}, "keep_first: expected"),
        ({"keep_last": -1}, "keep_last: expected"),
    ],
)
def test_wrong_selection(change, message):
    refuse("select_topk", lambda a: change, ValueError, "^" + message)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("lengths", [(-1, 3), (3, 17), (2**31 - 1, 0)])
@pytest.mark.parametrize(
    "op", ["hybrid_tree_attention", "verify_attention", "importance_scores", "select_topk"]
)
def test_lengths_outside_the_cache(op, lengths, paged):
    message = "^cache_seqlens: expected values from 0 to 16, got"
    refuse(op, lambda a: {"cache_seqlens": int32(*lengths)}, IndexError, message, paged)


@pytest.mark.parametrize("op", ["hybrid_tree_attention", "verify_attention"])
def test_no_room_for_the_tree_in_the_cache(op):
    change = {"k_tree": None, "v_tree": None, "cache_seqlens": int32(13, 2)}
    refuse(op, lambda a: change, IndexError, "^cache_seqlens: expected values from 0 to 12, got 13")


@pytest.mark.parametrize("page", [-1, 10, 2**30])
@pytest.mark.parametrize(
    "op",
    ["hybrid_tree_attention", "verify_attention", "importance_scores", "sparse_gather_attention"],
)
def test_used_page_that_does_not_exist(op, page):
    def change(arguments):
        table = arguments["block_table"].clone()
        table[1, 0] = page
        return {"block_table": table}

    message = f"^block_table: expected values from 0 to 9, got {page}"
    refuse(op, change, IndexError, message, paged=True)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("index", [-1, 16, 2**30])
def test_index_outside_the_cache(index, paged):
    indices = int32(0, index, 2).repeat(2, 1)
    message = f"^indices: expected values from 0 to 15, got {index}"
    refuse("sparse_gather_attention", lambda a: {"indices": indices}, IndexError, message, paged)


@pytest.mark.parametrize("lengths", [(4, 1), (1, -2)])
def test_more_indices_than_there_are(lengths):
    message = "^index_lengths: expected values from 0 to 3, got"
    change = {"index_lengths": int32(*lengths)}
    refuse("sparse_gather_attention", lambda a: change, IndexError, message)


def test_a_right_call_does_not_excuse_a_wrong_one():
    function, arguments = valid_calls()["hybrid_tree_attention"]
    wrong = {**arguments, "v_cache": arguments["v_cache"][:, :3]}
    for _ in range(2):
        function(**arguments)
        with pytest.raises(ValueError, match="^v_cache: expected shape"):
            function(**wrong)


def test_what_is_remembered_of_right_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(_check, "_MOST_KNOWN", 8)
    monkeypatch.setattr(_check, "_known", {})  # a call that another test made adds nothing
    for batch in range(1, 20):
        state = torch.zeros(batch, 1, 1, 8), torch.zeros(batch, 1, 1)
        specattn.merge_state(*state, *state)
        assert len(_check._known) <= 8


def test_symbolic_sizes_are_checked_too():
    q, k, v = torch.randn(3, 2, 4, 2, 8)
    trace = make_fx(lambda *x: specattn.tree_attention(*x), tracing_mode="symbolic")
    graph = trace(q, k, v)
    longer = torch.randn(3, 5, 7, 2, 8)
    assert torch.equal(graph(*longer)[0], specattn.tree_attention(*longer)[0])


@pytest.mark.parametrize(
    ("op", "name"), [t for t in TENSORS if valid_calls()[t[0]][1][t[1]].is_floating_point()]
)
def test_a_view_with_the_negative_bit(op, name):
    """Its memory has the opposite sign; and what is complex, with a conjugate bit, is refused."""
    message = rf"^{name}: expected a tensor, got a view that is negated .*resolve_neg\(\)"
    for _ in range(2):  # also once calls with such forms are known
        refuse(op, lambda a: {name: torch._neg_view(a[name])}, TypeError, message)
        function, arguments = valid_calls()[op]
        function(**arguments)
    refuse(
        op, lambda a: {name: a[name].to(torch.complex64).conj()}, TypeError, f"^{name}: expected"
    )


@pytest.mark.parametrize("name", ["out", "lse"])
def test_an_output_with_the_negative_bit(name):
    function, arguments = valid_calls()["hybrid_tree_attention"]
    out, lse = function(**arguments)
    outputs = {"out": out, "lse": lse}
    outputs[name] = torch._neg_view(outputs[name])
    with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got a view that is negated"):
        function(**arguments, **outputs)


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_a_sparse_tensor(op, name):
    message = f"^{name}: expected a tensor, got torch.sparse_coo"
    refuse(op, lambda a: {name: a[name].to_sparse()}, TypeError, message)


def test_values_may_have_a_size_of_their_own():
    p = make_problem()
    v_cache, v_tree = p.v_cache[..., :32], p.v_tree[..., :32]
    given = (p.q, p.k_cache, v_cache, p.cache_seqlens, p.k_tree)
    out, _ = specattn.hybrid_tree_attention(*given, v_tree)
    assert out.shape == (2, 4, 4, 32)
    with pytest.raises(ValueError, match=r"^v_tree: expected shape \[B=2, S=4, Hk=2, Dv=32\]"):
        specattn.hybrid_tree_attention(*given, p.v_tree)
    with pytest.raises(ValueError, match=r"^out: expected shape \[B=2, T=4, Hq=4, Dv=32\]"):
        specattn.hybrid_tree_attention(*given, v_tree, out=torch.empty_like(p.q))


@pytest.mark.parametrize(
    ("head_dim", "v_dim", "message"),
    [
        (584, 512, "^q: expected head_dim in multiples of 8 up to 576, got 584"),
        (576, 520, "^v_cache: expected head_dim in multiples of 8 up to 512, got 520"),
        (64, 20, "^v_cache: expected head_dim in multiples of 8 up to 512, got 20"),
    ],
)
def test_sizes_that_no_kernel_has(head_dim, v_dim, message):
    q, k = torch.empty(1, 1, 2, head_dim), torch.empty(1, 4, 1, head_dim)
    v = torch.empty(1, 4, 1, v_dim)
    indices = torch.zeros(1, 2, dtype=INT32)
    with pytest.raises(ValueError, match=message):
        specattn.sparse_gather_attention(q, k, v, indices, int32(2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": None}, TypeError, "^v: expected a tensor, got NoneType"),
        ({"v_cache": None}, TypeError, "^v_cache: expected a tensor, got NoneType"),
        (
            {"v": None, "v_cache": None, "v_scale": 0.5},
            ValueError,
            "^v_scale: expected None without values, got 0.5",
        ),
    ],
)
def test_values_that_are_written_in_part(change, error, message):
    refuse("write_kv", lambda a: change, error, message)
