"""What looks texts up, for the tests that run without vLLM."""

import importlib.util

import pytest


@pytest.fixture(params=["native", "python"])
def each_index(request, monkeypatch):
    """Let texts be looked up by the C++ module, and as where it is not built."""
    if request.param == "python":
        monkeypatch.setattr("specattn.decoding.drafting.corpus.kernels", lambda: None)
    elif importlib.util.find_spec("specattn._cpu") is None:
        pytest.skip("the C++ kernels are not built")
    return request.param
