"""What holds for every operator: registration, tracing, outputs, and the same bits every time."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import specattn
from tests.cases import make_problem
from tests.ops.calls import (
    IN_PLACE,
    NAMES,
    PRIMITIVES,
    TRACED,
    VARIANTS,
    WITH_STATE,
    as_tuple,
    valid_calls,
)


class Recorder(TorchDispatchMode):
    """Record every operator that reaches the dispatcher, with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def assert_same_bits(actual, expected):
    for x, y in zip(as_tuple(actual), as_tuple(expected), strict=True):
        assert torch.equal(x, y)


def test_every_primitive_is_called_here():
    assert set(NAMES) == set(PRIMITIVES)


@pytest.mark.parametrize(("function", "arguments"), TRACED)
def test_opcheck(function, arguments):
    with Recorder() as recorder:
        function(**arguments)
    operator, inputs = next(c for c in recorder.calls if c[0].namespace == "specattn")
    torch.library.opcheck(operator, inputs)


@pytest.mark.parametrize(("function", "arguments"), TRACED)
def test_compiles_into_one_graph(function, arguments, fresh_compiler):
    """What follows the graph, `opcheck` tries for each operator."""
    compiled = torch.compile(lambda **a: function(**a), fullgraph=True, backend="eager")
    assert_same_bits(compiled(**arguments), function(**arguments))


def test_lengths_do_not_recompile(fresh_compiler):
    p = make_problem((3, 11), spare=1)
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def attend(lengths):
        return specattn.hybrid_tree_attention(
            p.q, p.k_cache, p.v_cache, lengths, p.k_tree, p.v_tree, p.tree_mask, window=5
        )

    for lengths in ((3, 11), (0, 0), (2, 9)):
        attend(torch.tensor(lengths, dtype=torch.int32))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", WITH_STATE)
def test_outputs_are_written_in_place_and_nothing_else_is_allocated(name):
    function, arguments = valid_calls()[name]
    expected = function(**arguments)
    out, lse = torch.full_like(expected[0], torch.nan), torch.full_like(expected[1], torch.nan)
    with Recorder() as recorder:
        result = function(**arguments, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    assert_same_bits(result, expected)
    called = [operator for operator, _ in recorder.calls]
    collected = [torch.ops.aten.new_empty.default] if name == "verify_attention" else []
    assert called == [*collected, getattr(torch.ops.specattn, name).default]


@pytest.mark.parametrize("collect", ["scores", "logits"])
def test_what_is_collected_is_written_in_place_too(collect):
    function, arguments = valid_calls()["verify_attention"]
    expected = function(**arguments, collect=collect)
    out, lse, collected = (torch.full_like(x, torch.nan) for x in expected)
    with Recorder() as recorder:
        result = function(**arguments, collect=collect, out=out, lse=lse, collected=collected)
    assert result[2] is collected
    assert_same_bits(result, expected)
    assert [operator for operator, _ in recorder.calls] == [
        torch.ops.specattn.verify_attention.default
    ]


@pytest.mark.parametrize("collect", ["scores", "logits"])
def test_strided_collection(collect):
    function, arguments = valid_calls()["verify_attention"]
    expected = function(**arguments, collect=collect)[2]
    room = torch.full([n + 3 for n in expected.shape], torch.nan, dtype=expected.dtype)
    inside = room[tuple(slice(2, 2 + n) for n in expected.shape)]
    function(**arguments, collect=collect, collected=inside)
    assert_same_bits((inside.clone(),), (expected,))
    inside.fill_(torch.nan)
    assert room.isnan().all()


@pytest.mark.parametrize("name", WITH_STATE)
def test_strided_outputs(name):
    function, arguments = valid_calls()[name]
    expected = function(**arguments)
    room, lse = torch.full((2, 4, 9, 72), torch.nan), torch.full((2, 4, 9), torch.nan)
    function(**arguments, out=room[:, :, 2:6, :64], lse=lse[:, :, 2:6])
    assert_same_bits((room[:, :, 2:6, :64], lse[:, :, 2:6]), expected[:2])
    assert room[:, :, 6:].isnan().all()
    assert room[..., 64:].isnan().all()
    assert lse[:, :, 6:].isnan().all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("function", "arguments"), VARIANTS)
def test_every_element_of_a_result_is_written(function, arguments):
    for result in as_tuple(function(**arguments)):
        assert not result.isnan().any()
        assert (result > -(2**30)).logical_or(result == -torch.inf).all()


@pytest.mark.parametrize(("function", "arguments"), VARIANTS)
def test_same_bits_twice(function, arguments):
    assert_same_bits(function(**arguments), function(**arguments))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith(("merge", "select", "write"))]
)
def test_a_request_does_not_depend_on_its_neighbours(name, paged):
    if name == "linear_few_rows":
        pytest.importorskip("specattn._cpu", reason="only the C++ kernels promise it")
    p = make_problem((300, 7, 0, 150), 6, head_dim=64)
    function, arguments = valid_calls(p, paged)[name]
    together = as_tuple(function(**arguments))
    for index in range(4):
        _, arguments = valid_calls(p.request(index), paged)[name]
        alone = function(**arguments)
        assert_same_bits(alone, tuple(x[index : index + 1] for x in together))


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_flows(name):
    function, arguments = valid_calls()[name]
    arguments = {
        k: v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert not any(result.requires_grad for result in as_tuple(function(**arguments)))


def test_inputs_are_left_alone():
    for op, (function, arguments) in valid_calls(make_problem(tree_in_cache=True)).items():
        inputs = {k: v for k, v in arguments.items() if k not in IN_PLACE.get(op, ())}
        before = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        function(**arguments)
        for name, tensor in before.items():
            assert torch.equal(tensor.nan_to_num(7.0), arguments[name].nan_to_num(7.0))
