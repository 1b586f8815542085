import importlib.util
import re

import pytest
import torch

import specattn
from specattn.backends import select
from specattn.backends.backend import Backend, function_named
from specattn.call_forms import NotServed
from tests.cases import make_problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def attend(p):
    return specattn.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)


def served_by(device=CPU, dtype=torch.float32, op="tree_attention"):
    return select.chosen(op, device, dtype)


@pytest.fixture
def others(monkeypatch):
    """Return a function that puts backends of that kind in place of all."""

    def put(*backends):
        monkeypatch.setattr(select, "BACKENDS", {backend.name: backend for backend in backends})
        select._chosen.cache_clear()

    yield put
    select._chosen.cache_clear()


def record(name, why_not=None, find=lambda op: print, **fields):
    fields = {"devices": ("cuda",), "dtypes": (torch.float32,)} | fields
    return Backend(name, why_not=lambda device: why_not, find=find, **fields)


def test_every_backend_is_available_or_says_why_not():
    assert list(specattn.backends()) == ["cuda", "triton", "cpu", "reference"]
    assert specattn.backends()["reference"] == "available"
    for name, state in specattn.backends().items():
        if state != "available":
            with pytest.raises(
                RuntimeError, match=re.escape(f"backend {name!r} is not available: {state}")
            ):
                specattn.use_backend(name)


def test_no_backend_of_that_name():
    with pytest.raises(ValueError, match="expected one of cuda, triton, .*got 'gpu'"):
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
    before = select._forced
    with pytest.raises(KeyError), specattn.use_backend("reference"):
        raise KeyError
    assert select._forced is before


def test_call_forces_for_good():
    try:
        specattn.use_backend("reference")
        assert select._forced == "reference"
    finally:
        specattn.use_backend(None)
    assert select._forced is None


def test_results_come_from_the_forced_backend(others):
    called = []

    def find(name):
        return lambda op: lambda *args: called.append((name, op))

    devices = {"devices": ("cpu",)}
    others(*(record(name, find=find(name), **devices) for name in ("fast", "other")))
    with specattn.use_backend("other"):
        attend(make_problem())
    attend(make_problem())
    assert called == [("other", "tree_attention"), ("fast", "tree_attention")]


def test_a_call_that_is_not_served_goes_to_the_next(others):
    called = []

    def refuse(*args):
        raise NotServed("so many rows")

    devices = {"devices": ("cpu",)}
    others(
        record("narrow", find=lambda op: refuse, **devices),
        record("wide", find=lambda op: lambda *args: called.append(op), **devices),
    )
    attend(make_problem())
    assert called == ["tree_attention"]
    with (
        specattn.use_backend("narrow"),
        pytest.raises(RuntimeError, match="'narrow': 'it does not serve so many rows'"),
    ):
        attend(make_problem())


def test_what_is_unproved_comes_behind_what_is_proved_and_before_what_is_slow(others):
    unproved = {"is_unproved": lambda: True}
    others(record("new", **unproved), record("old"), record("reference", slow=True))
    assert served_by(CUDA)[1].name == "old"
    others(record("new", **unproved), record("reference", slow=True))
    assert served_by(CUDA)[1].name == "new"
    with specattn.use_backend("new"):
        assert served_by(CUDA)[1].name == "new"


def test_cuda_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert specattn.backends()["cuda"] in ("no GPU", select.BACKENDS["cuda"].why_not(None))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "CuPy is not installed" in specattn.backends()["cuda"]


def test_triton_without_a_gpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in specattn.backends()["triton"]


def test_triton_with_a_gpu_takes_cpu_tensors_in_the_interpreter_only(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    select._chosen.cache_clear()
    with (
        specattn.use_backend("triton"),
        pytest.raises(RuntimeError, match="it serves CPU tensors only with TRITON_INTERPRET=1"),
    ):
        served_by()
    select._chosen.cache_clear()


def test_cpu_takes_cpu_tensors_only():
    pytest.importorskip("specattn._cpu")
    with (
        specattn.use_backend("cpu"),
        pytest.raises(RuntimeError, match="it serves CPU tensors only"),
    ):
        served_by(CUDA)


def test_float64_is_for_the_reference():
    pytest.importorskip("triton")
    with (
        specattn.use_backend("triton"),
        pytest.raises(RuntimeError, match="torch.float64 is served by reference only"),
    ):
        attend(make_problem(dtype=torch.float64))


@pytest.mark.filterwarnings("error")
def test_float64_works_unforced():
    out, lse = attend(make_problem(dtype=torch.float64))
    assert out.dtype == lse.dtype == torch.float64


def test_unknown_device_has_no_backend():
    with pytest.raises(RuntimeError, match="no backend serves tree_attention of torch.float32 on"):
        served_by(torch.device("mps"))


def test_the_first_that_serves_a_call_is_taken(others):
    others(
        record("absent", why_not="it is not installed"),
        record("elsewhere", devices=("cpu",)),
        record("narrow", dtypes=(torch.bfloat16,)),
        record("small", find=lambda op: None),
        record("right"),
        record("late"),
    )
    assert served_by(CUDA)[1].name == "right"


def test_slow_path_warns_once_and_says_why(others):
    others(record("fast", why_not="gone"), record("plain", slow=True))
    with pytest.warns(UserWarning, match="tree_attention runs on the slow plain; .*fast.*gone"):
        served_by(CUDA)
    served_by(CUDA)


def test_backend_that_does_not_import_says_so(others):
    def fail(op):
        raise ImportError("libdevice is missing")

    others(record("broken", find=fail))
    with pytest.raises(RuntimeError, match="broken.*it does not import: libdevice is missing"):
        served_by(CUDA)


def test_a_function_is_found_in_the_file_of_its_name():
    assert function_named("tree_attention", "reference").__name__ == "tree_attention"
    assert function_named("no_such_attention", "reference") is None


def test_a_file_that_imports_what_is_missing_is_an_error(monkeypatch, tmp_path):
    from specattn import reference

    (tmp_path / "needs_more.py").write_text("import no_such_library")
    monkeypatch.setattr(reference, "__path__", [*reference.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        function_named("needs_more", "reference")
