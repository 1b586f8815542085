"""Which cases run: all unless the files are those on record."""

import json

import pytest

pytest.importorskip("triton")

from .. import executed


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECATTN_GPU_CODE", raising=False)
    monkeypatch.setattr(executed, "RECORD", tmp_path / "executed.json")
    return executed.RECORD


@pytest.mark.parametrize("kind", executed.FILES)
def test_what_is_on_record_need_not_run_again(record, kind):
    assert executed.wanted(kind)
    record.write_text(json.dumps({executed.compiler(kind): "another"}))
    assert executed.wanted(kind)
    record.write_text(json.dumps({executed.compiler(kind): executed.digest(kind)}))
    assert not executed.wanted(kind)


def test_the_environment_has_the_last_word(record, monkeypatch):
    monkeypatch.setenv("SPECATTN_GPU_CODE", "quick")
    assert not executed.wanted("triton")
    record.write_text(json.dumps({executed.compiler("triton"): executed.digest("triton")}))
    monkeypatch.setenv("SPECATTN_GPU_CODE", "whole")
    assert executed.wanted("triton")
    monkeypatch.setenv("SPECATTN_GPU_CODE", "all")
    with pytest.raises(ValueError, match="SPECATTN_GPU_CODE: expected"):
        executed.wanted("triton")


@pytest.mark.parametrize(
    ("file", "text", "kinds"),
    [
        ("triton_kernels/_attend.py", "x = 2", {"triton"}),
        ("triton_kernels/_attend.py", '"""In other words."""\nx = 1  # as before', set()),
        ("csrc/cuda/decode.cu", "", {"cuda"}),
        ("python/specattn/backends/cuda/shape.py", "x = 2", {"cuda"}),
        ("tools/ptx/machine.py", "x = 2", {"triton", "cuda"}),
        ("tools/ptx/tests/cases.py", "x = 2", {"triton", "cuda"}),
        ("csrc/cpu/attention.h", "", set()),
    ],
)
def test_any_change_of_a_kernel_or_of_the_emulator_shows(tmp_path, file, text, kinds):
    def digests(text):
        changed.write_text(text)
        executed.digest.cache_clear()
        return {kind: executed.digest(kind, tmp_path) for kind in executed.FILES}

    assert (executed.ROOT / file).exists()
    changed = tmp_path / file
    changed.parent.mkdir(parents=True)
    before, after = digests("x = 1"), digests(text)
    assert {kind for kind in executed.FILES if before[kind] != after[kind]} == kinds
