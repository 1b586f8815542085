"""The examples run as a reader would run them, and show what they say."""

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests import HANGS

EXAMPLES = Path(__file__).parents[2] / "examples"


NAMES = ("engine", "engine_layouts", "custom_method", "hf_generate", "merge_with_flashinfer")
RUN_EACH = """
import os, runpy, sys
import specattn.decoding  # once for all, with torch and transformers: that takes longest
folder, *scripts = sys.argv[1:]
for script in scripts:
    if os.fork() == 0:
        sys.argv, sys.path[0] = [script], os.path.dirname(script)
        sys.stdout = open(os.path.join(folder, os.path.basename(script)), "w")
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, script
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return what an example prints where there is no GPU; each has a process of its own."""
    folder = tmp_path_factory.mktemp("printed")
    scripts = [EXAMPLES / f"{name}.py" for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, folder, *scripts],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    return lambda name: (folder / f"{name}.py").read_text()


def test_engine(run):
    steps, *requests, last = run("engine").splitlines()
    assert "[8, 5, 1]" in steps, "one step should have read a prompt, verified a tree and decoded"
    assert len(requests) == 3
    assert all(line.endswith("plain greedy: True") for line in requests)
    assert last.endswith("steps, one call per layer each")


def test_drafts_of_the_engine_are_accepted():
    """The text is the same without, in more steps."""
    module = runpy.run_path(str(EXAMPLES / "engine.py"))
    torch.manual_seed(0)
    model, prompt = module["Model"](), torch.randint(module["VOCABULARY"], (9,))
    pages, taken = torch.arange(6, dtype=torch.int32), {}
    for drafts in (True, False):
        engine, request = (
            module["Engine"](model, 6),
            module["Request"](prompt, pages, drafts=drafts),
        )
        while len(request.text) < 72:
            engine.step([request])
            taken[drafts] = taken.get(drafts, 0) + 1
        assert torch.equal(request.text[:72], model.greedy(prompt, 72))
    assert taken[True] < 0.9 * taken[False]


def test_layouts_of_engines(run):
    """What is stored in 8 bits differs from what was given, by less than a tenth."""
    found = [line.rsplit(maxsplit=1) for line in run("engine_layouts").splitlines()]
    assert len(found) == 7
    for name, difference in found:
        assert float(difference) < (0.1 if "fp8" in name else 1e-5), name


def test_custom_method(run):
    *_, acceptance, equal = run("custom_method").splitlines()
    assert float(acceptance.split()[-1]) > 1.2
    assert equal == "equals plain greedy: True"


def test_hf_generate(run):
    *_, acceptance, inside, own = run("hf_generate").splitlines()
    assert float(acceptance.split()[-1]) > 1.5
    assert inside == "model.generate equals plain greedy: True"
    assert own == "specattn generate equals plain greedy: True"


def test_merging_says_what_is_missing(run):
    (line,) = run("merge_with_flashinfer").splitlines()
    assert line.startswith("nothing was run: FlashInfer ")


def test_merging_with_a_stand_in_for_flashinfer(monkeypatch, capsys):
    """A plain softmax that keeps FlashInfer's documented layouts and base."""

    def prefill(q, k, v, *, causal, kv_layout, return_lse):
        assert (causal, kv_layout, return_lse) == (False, "NHD", True)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        logits = torch.einsum("thd,lhd->thl", q, k) / math.sqrt(q.shape[-1])
        out = torch.einsum("thl,lhd->thd", logits.softmax(-1), v)
        return out, logits.logsumexp(-1) / math.log(2)

    stand_in = SimpleNamespace(single_prefill_with_kv_cache=prefill)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    example = runpy.run_path(str(EXAMPLES / "merge_with_flashinfer.py"))
    monkeypatch.setitem(example["main"].__globals__, "why_not", lambda: None)
    example["main"](device="cpu", dtype=torch.float32)
    errors = re.findall(r"\d\.\de-\d+", capsys.readouterr().out)
    assert len(errors) == 2
    assert max(map(float, errors)) < 1e-5
