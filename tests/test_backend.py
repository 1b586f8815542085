import pytest
import specattn
import torch
from specattn import _backend

from tests.cases import make_problem

CPU = torch.device("cpu")


def attend(p):
    return specattn.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)


def served_by(device=CPU, dtype=torch.float32, op="tree_attention"):
    return _backend.kernel(op, device, dtype)


def test_every_backend_is_available_or_says_why_not():
    assert list(specattn.backends()) == ["cuda", "triton", "cpu", "reference"]
    assert specattn.backends()["reference"] == "available"
    for name, state in specattn.backends().items():
        if state != "available":
            with pytest.raises(RuntimeError, match=f"backend '{name}' is not available: {state}"):
                specattn.use_backend(name)


def test_no_backend_of_that_name():
    with pytest.raises(ValueError, match="expected one of cuda, triton, cpu, reference, got 'gpu'"):
        specattn.use_backend("gpu")


def test_choice_ends_with_its_block_and_nests():
    before = served_by()
    with specattn.use_backend("reference"):
        forced = served_by()
        with specattn.use_backend(None):
            assert served_by() is before
        assert served_by() is forced
    assert served_by() is before


def test_choice_is_undone_by_an_error():
    before = _backend._forced
    with pytest.raises(KeyError), specattn.use_backend("reference"):
        raise KeyError
    assert _backend._forced is before


def test_call_forces_for_good():
    try:
        specattn.use_backend("reference")
        assert _backend._forced == "reference"
    finally:
        specattn.use_backend(None)
    assert _backend._forced is None


def test_results_come_from_the_forced_backend(monkeypatch):
    called = []
    monkeypatch.setattr(
        _backend, "_kernel", lambda *key: lambda *args: called.append((key[0], key[3]))
    )
    with specattn.use_backend("reference"):
        attend(make_problem())
    attend(make_problem())
    assert called == [("tree_attention", "reference"), ("tree_attention", None)]


def test_triton_without_a_gpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in specattn.backends()["triton"]


def test_float64_is_for_the_reference():
    pytest.importorskip("triton")
    with (
        specattn.use_backend("triton"),
        pytest.raises(RuntimeError, match="float64 is served by the reference only"),
    ):
        attend(make_problem(dtype=torch.float64))


def test_float64_works_unforced():
    out, lse = attend(make_problem(dtype=torch.float64))
    assert out.dtype == lse.dtype == torch.float64


def test_unknown_device_has_no_backend():
    with pytest.raises(RuntimeError, match="no backend serves tree_attention of torch.float32 on"):
        served_by(torch.device("mps"))


def test_slow_path_on_a_gpu_warns_once(monkeypatch):
    monkeypatch.setattr(_backend, "_why_not", lambda name: None if name == "reference" else "gone")
    _backend._kernel.cache_clear()
    with pytest.warns(UserWarning, match="tree_attention runs on the slow reference"):
        served_by(torch.device("cuda"))
    served_by(torch.device("cuda"))
    _backend._kernel.cache_clear()


def test_backend_that_does_not_import_says_so(monkeypatch):
    def fail(name):
        raise ImportError("libdevice is missing")

    monkeypatch.setattr(_backend, "_module", fail)
    reason = _backend._why_not_for("triton", "tree_attention", "cuda", torch.float32)
    assert reason == "it does not import: libdevice is missing"
