"""Options are numbers of any type that is one; what is none is refused, by name."""

import inspect
import re

import numpy as np
import pytest
import torch

import specattn
from specattn.ops._options import NUMBERS
from tests.cases import make_problem
from tests.ops.calls import NAMES, as_tuple, valid_calls

RAGGED = {"cu_seqlens_q": torch.tensor([0, 4, 8], dtype=torch.int32)}
OTHERS = {"collect_rows", "k_scale", "v_scale"}  # rows, and what may be a tensor, too
OPTIONS = [
    (op, name)
    for op in NAMES
    for name in inspect.signature(getattr(specattn, op)).parameters
    if name in NUMBERS.keys() - OTHERS
]
NO_NUMBERS = ["1", [1], (1,), {}, object(), 1j, True, np.ones(1), torch.ones(1), torch.ones(2, 2)]
RIGHT = {"window": 3, "softcap": 5, "softmax_scale": 1, "query_scale": 1, "ratio": 1, "budget": 2,
         "seed": 7, "min_tokens": 2, "keep_first": 1, "keep_last": 1,
         "max_seqlen_q": 4}  # fmt: skip


def call(op, name, value):
    """Call a primitive with one option of a value, the others valid."""
    torch.manual_seed(0)
    function, arguments = valid_calls(make_problem())[op]
    if name == "max_seqlen_q":
        lines = ("q", "k_tree", "v_tree", "k_new", "v_new", "tree_mask")
        lines += ("k", "v", "g", "beta", "stash", "x")
        if arguments.get("parents") is not None:
            arguments = arguments | {"parents": arguments["parents"].repeat(2)}
        arguments = {n: x[:2].flatten(0, 1) if n in lines else x for n, x in arguments.items()}
        arguments |= RAGGED
    if name == "budget":
        arguments = arguments | {"ratio": None}
    return as_tuple(function(**{**arguments, name: value}))


def test_all_options_are_covered():
    assert {name for _, name in OPTIONS} == set(RIGHT) == set(NUMBERS) - OTHERS


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda x: f"{type(x).__name__}-{np.shape(x)}")
@pytest.mark.parametrize(("op", "name"), OPTIONS)
def test_what_is_no_number_is_refused(op, name, value):
    with pytest.raises(TypeError, match=f"^{name}: expected .*, got "):
        call(op, name, value)


@pytest.mark.parametrize(("op", "name"), [x for x in OPTIONS if not NUMBERS[x[1]].optional])
def test_none_where_a_number_is_needed(op, name):
    with pytest.raises(TypeError, match=f"^{name}: expected .*, got None"):
        call(op, name, None)


@pytest.mark.parametrize("value", [2.5, float("inf"), np.float64(2.0), torch.tensor(2.0)], ids=str)
@pytest.mark.parametrize(("op", "name"), [x for x in OPTIONS if NUMBERS[x[1]].kind is int])
def test_a_float_is_no_count(op, name, value):
    with pytest.raises(TypeError, match=f"^{name}: expected .*, got "):
        call(op, name, value)


@pytest.mark.parametrize(
    "convert",
    [np.int64, np.int32, np.uint8, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int16)],
)
@pytest.mark.parametrize(("op", "name"), OPTIONS)
def test_integers_of_any_type_are_taken(op, name, convert):
    expected, found = (call(op, name, x) for x in (RIGHT[name], convert(RIGHT[name])))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("convert", [np.float32, np.float64, torch.tensor])
@pytest.mark.parametrize(("op", "name"), [x for x in OPTIONS if NUMBERS[x[1]].kind is float])
def test_floats_of_any_type_are_taken(op, name, convert):
    expected, found = (call(op, name, x) for x in (0.5, convert(0.5)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("huge", [2**31, 10**18, 10**400])
@pytest.mark.parametrize(
    ("op", "name"),
    [x for x in OPTIONS if x[1] in ("window", "budget", "min_tokens", "keep_first", "keep_last")],
)
def test_a_count_beyond_any_text_is_the_whole_text(op, name, huge):
    whole = None if name == "window" else 16  # what the cache holds
    expected, found = (call(op, name, x) for x in (whole, huge))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        ("hybrid_tree_attention", "softcap", float("inf")),
        ("hybrid_tree_attention", "softcap", float("nan")),
        ("hybrid_tree_attention", "softcap", 10**400),
        ("hybrid_tree_attention", "max_seqlen_q", 10**18),
        ("select_topk", "ratio", 1.5),
        ("select_topk", "keep_first", -(10**18)),
    ],
)
def test_numbers_out_of_range(op, name, value):
    shown = re.escape(repr(value)[:20])
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got {shown}"):
        call(op, name, value)


@pytest.mark.parametrize("op", ["importance_scores", "verify_attention"])
def test_flags(op):
    for value in (np.bool_(False), torch.tensor(False)):
        for found, right in zip(
            call(op, "per_head", value), call(op, "per_head", False), strict=True
        ):
            assert torch.equal(found, right)
    for value in (1, "yes", None, [True], torch.ones(2).bool()):
        with pytest.raises(TypeError, match="^per_head: expected True or False, got "):
            call(op, "per_head", value)


def test_rows():
    right = call("verify_attention", "collect_rows", (0, -1))
    for rows in ([0, -1], np.array([0, -1]), torch.tensor([0, -1]), (np.int8(0), torch.tensor(-1))):
        found = call("verify_attention", "collect_rows", rows)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    for rows in (
        3,
        "01",
        None,
        torch.tensor(3),
        np.array(3),
        np.array([[0]]),
        torch.ones(2),
        (0.5,),
        ("0",),
        [[0]],
    ):
        with pytest.raises(TypeError, match="^collect_rows: expected .*integers, got "):
            call("verify_attention", "collect_rows", rows)
