"""What holds on a GPU only: nothing waits, graphs follow the lengths, checks can be asked for."""

import pytest
import specattn
import torch

from tests.cases import make_problem
from tests.ops.calls import VARIANTS, valid_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(arguments):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(("function", "arguments"), VARIANTS)
def test_no_call_waits_for_the_device(function, arguments):
    arguments = on_gpu(arguments)
    function(**arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("function", "arguments"), VARIANTS)
def test_a_captured_graph_follows_the_lengths(function, arguments):
    arguments = on_gpu(arguments)
    name = "index_lengths" if "index_lengths" in arguments else "cache_seqlens"
    if name not in arguments:
        pytest.skip("takes no lengths")
    lengths, longest = arguments[name], arguments[name].clone()
    lengths.zero_()
    function(**arguments)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = as_tuple(function(**arguments))
    for change in (longest, longest // 2, torch.zeros_like(longest)):
        lengths.copy_(change)
        graph.replay()
        for x, y in zip(captured, as_tuple(function(**arguments)), strict=True):
            assert torch.equal(x, y)


def test_values_are_checked_on_request(monkeypatch):
    function, arguments = valid_calls(make_problem())["importance_scores"]
    arguments = on_gpu(arguments)
    arguments["cache_seqlens"] += 100
    monkeypatch.setenv("SPECATTN_CHECK", "1")
    with pytest.raises(IndexError, match="cache_seqlens: expected values from 0 to 16"):
        function(**arguments)


def test_triton_serves_cuda_tensors():
    assert specattn.backends()["triton"] == "available"
