"""`specattn gpu-check`: what it says of right, wrong, declined, failing and dying kernels.

No GPU is here: kernels of the CPU stand for those of a GPU, or a stub driver takes the launches.
"""

import multiprocessing
import os
import time
import warnings
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import specattn
from specattn import gpu_record
from specattn.backends import select
from specattn.call_forms import NotServed
from specattn.cli import gpu_check
from specattn.gpu_checks import report, times, workers
from specattn.gpu_checks.cases import CASES, Verdict, check
from tests import HANGS
from tests.decoding.fake_gpu import FakeGPU

FIRSTS = [next(case for case in CASES if case.op == op) for op in {case.op: None for case in CASES}]
REST = [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in FIRSTS]
SELECTION = next(case for case in CASES if case.op == "select_topk")


def states(verdicts):
    return [verdict.state for verdict in verdicts]


@pytest.mark.parametrize("case", [*FIRSTS, *REST], ids=str)
def test_right_kernels_are_right(case):
    pytest.importorskip("specattn._cpu")
    assert check(case, "cpu", lambda x: x) == [Verdict("cpu", str(case), "right")]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.op == "captured_pass"], ids=str)
def test_interpreted_kernels_make_right_passes(case, monkeypatch):
    """In a graph that is a stub; the weights lie as on a GPU."""
    if specattn.backends()["triton"] != "available":
        pytest.skip("Triton is not available here")
    from specattn.decoding.engine.target import Target
    from specattn.kv_cache import KVCache
    from tests.decoding.captured import captured_runner

    own, graphs = Target._runner, []

    def captured(target, model):
        served = select.chosen("hybrid_tree_attention", torch.device("cpu"), torch.bfloat16)[1]
        return captured_runner(target, graphs) if served.name == "triton" else own(target, model)

    monkeypatch.setattr(Target, "_runner", captured)
    monkeypatch.setattr("specattn.quantised._IN_KERNELS", ())  # of a CPU, which no graph keeps
    monkeypatch.setattr("specattn.quantised._BY_TILES", ())
    monkeypatch.setattr(KVCache, "places", lambda self, at: at[0] * self.capacity + at[1])
    assert check(case, "triton", lambda x: x) == [Verdict("triton", str(case), "right")]
    product = "linear_codes_kernel" if "weights" in case.label else "linear_few_rows_kernel"
    assert all(product in graph.tape.kernels for graph in graphs)
    assert graphs


class OnGPU(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


def test_passes_that_are_not_captured_as_kernels_fail():
    """Graphs of modules, or none, would be right too, and slow."""
    case = next(case for case in CASES if case.op == "captured_pass")
    given = case.make()
    given["tokens"] = given["tokens"].as_subclass(OnGPU)
    with (
        specattn.use_backend("reference"),
        pytest.raises(ValueError, match="in graphs, got through"),
    ):
        case.run(given)


@pytest.mark.parametrize(
    ("said", "fails"),
    [
        ("Deterministic behavior was enabled, but this operation uses CuBLAS", False),
        ("LlamaForCausalLM decodes through graphs of its own, slower modules: why", True),
        ("passes of 6 rows and more run through the model's own, slower modules: why", True),
    ],
)
def test_only_what_makes_passes_slower_is_a_fault_of_theirs(said, fails, monkeypatch):
    """Checks fill memory with NaN by torch's deterministic mode, in which cuBLAS is warned of."""
    pytest.importorskip("specattn._cpu")
    from specattn.decoding.engine.target import Target

    def warned(target, *given, **options):
        warnings.warn(said, stacklevel=2)
        return own(target, *given, **options)

    case, own = next(case for case in CASES if case.op == "captured_pass"), Target.prefill
    monkeypatch.setattr(Target, "prefill", warned)
    with pytest.raises(UserWarning, match="slower") if fails else nullcontext():
        case.run(case.make())


@pytest.mark.parametrize(("fails", "how"), [(False, "in a graph"), (True, "one by one")])
def test_calls_that_no_graph_takes_are_timed_one_by_one(fails, how, monkeypatch):
    """By what leaves torch as it was where a capture fails: random numbers are made behind it."""
    ran = []

    class Graph:
        def __init__(self, pool):
            self.replay = lambda: ran.append("replay")

        def capture(self, run):
            run()
            if fails:
                raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(times, "CudaGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    with FakeGPU().serving():
        seconds, said = times._median(lambda: ran.append("call"))
    assert said == how
    assert seconds == pytest.approx(1e-3 / times._CALLS)
    windows = 1 + times._WINDOWS
    assert ran.count("replay") == (0 if fails else windows)
    assert ran.count("call") == times._CALLS * (2 + windows * fails)


def replaced(kernel):
    """Let a function stand for all kernels of the CPU backend."""
    backend = mock.Mock(wraps=select.BACKENDS["reference"], plans=False, checks_values=True)
    backend.find = lambda op: kernel
    backend.name, backend.devices = "cpu", ("cpu",)
    backend.dtypes = torch.float32, torch.bfloat16, torch.float16
    backend.why_not = lambda device: None
    select._chosen.cache_clear()
    return mock.patch.dict(select.BACKENDS, cpu=backend)


@pytest.fixture(autouse=True)
def _choose_anew():
    yield
    select._chosen.cache_clear()


def on_stub():
    """Return what becomes of all cases whose launches a stub of the driver takes."""
    from tools.ptx.stub_driver import on_gpu, stubbed

    with stubbed() as stub:
        primitives = [case for case in CASES if case.call is None]
        verdicts = [v for case in primitives for v in check(case, "triton", on_gpu)]
        return verdicts, len(stub.launches)


def test_a_stub_of_the_driver_takes_every_launch(compiler_process):
    """What is served reaches the driver; since nothing runs there, no result is right.

    A model would not: whatever is compared there differs.
    """
    pytest.importorskip("triton")
    verdicts, launches = compiler_process(on_stub)
    served = [verdict for verdict in verdicts if verdict.state != "declined"]
    assert [(v.case, v.said) for v in served if v.state != "wrong"] == []
    assert {str(case) for case in CASES[:6]} <= {verdict.case for verdict in served}
    assert launches >= len(served) >= 14


def nothing(*args):
    """Write no result."""


def one_too_far(*args):
    """Select as the reference does, but for one index."""
    select.BACKENDS["reference"].find("select_topk")(*args)
    args[-2][0, 0, 0] += 1


def broken(*args):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def declining(*args):
    raise NotServed("this shape")


@pytest.mark.parametrize(
    ("kernel", "state", "said"),
    [
        (one_too_far, "wrong", "1 of "),
        (broken, "failed", "AcceleratorError: CUDA error: an illegal memory access"),
        (declining, "declined", "it does not serve this shape"),
    ],
)
def test_what_is_not_right_is_told(kernel, state, said):
    with replaced(kernel):
        (verdict,) = check(SELECTION, "cpu", lambda x: x)
    assert verdict.state == state
    assert said in verdict.said


@pytest.mark.parametrize("case", FIRSTS, ids=str)
def test_kernels_that_do_nothing_are_never_right(case):
    """Every result is as it was allocated, perhaps where the expected one has lain."""
    with replaced(nothing):
        (verdict,) = check(case, "cpu", lambda x: x)
    assert verdict.state == ("wrong" if case.call is None else "failed")


def outcomes(job, device):
    """Right, but for what the name of a backend asks for."""
    if job.backend == "dies":
        os._exit(7)
    if job.backend == "hangs":
        time.sleep(HANGS)
    return [Verdict(job.backend, str(job.case), "failed" if job.backend == "fails" else "right")]


def test_what_dies_or_fails_costs_no_other_job(monkeypatch):
    """Each of the first two ends its process, and another one goes on.

    They are forks here: a process that begins anew, as beside a GPU, imports torch for seconds.
    """
    monkeypatch.setattr(workers, "get_context", lambda kind: multiprocessing.get_context("fork"))
    jobs = [workers.Job(backend, SELECTION) for backend in ("dies", "fails", "works")]
    found = list(workers.verdicts(jobs, 0, 1, HANGS, outcomes))
    assert states(found) == ["lost", "failed", "right"]
    assert found[0].said == "its process ended with status 7"


def test_a_job_reaches_a_process_that_begins_anew():
    (found,) = workers.verdicts([workers.Job("works", SELECTION)], 0, 1, HANGS, outcomes)
    assert found == Verdict("works", str(SELECTION), "right")


def test_what_hangs_is_given_up():
    jobs = workers.jobs(["hangs"], "write_kv")
    found = list(workers.verdicts(jobs, 0, 1, 0.5, outcomes))
    assert states(found) == ["not done", "not done"]
    assert {x.said for x in found} == {"within 0 s"}


def test_without_a_gpu_it_says_so(specattn):
    code, text, said = specattn("gpu-check")
    assert code == 2
    assert text == ""
    assert "finds no GPU here; nothing was checked" in said


def test_an_unknown_primitive_is_refused(specattn):
    code, _, said = specattn("gpu-check", "--only", "softmax")
    assert code == 2
    assert "--only: expected one of hybrid_tree_attention, " in said


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("fails", 1)])
def test_the_report_and_its_exit_code(specattn, monkeypatch, name, code):
    """On a GPU that is not there: what it prints around the checks, with times or without."""
    measured = [
        times.Time(1, name, 40e-6, "in a graph", 134217728),
        times.Time(1, "flashinfer", None, "ImportError: flashinfer is not installed", 1),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(gpu_check, "facts", lambda: [("GPU 0", "one")])
    monkeypatch.setattr(report, "on_gpus", lambda device: [name])
    monkeypatch.setattr(times, "times", lambda backends: measured)

    def verdicts(jobs, *options):
        return (verdict for job in jobs for verdict in outcomes(job, 0))

    monkeypatch.setattr(workers, "verdicts", verdicts)
    actual, text, _ = specattn("gpu-check", "--only", "select_topk")
    assert actual == code
    assert ("3355 GB/s  in a graph" in text) == (code == 0)
    assert ("not measured: ImportError: flashinfer" in text) == (code == 0)
    assert ("first all has to be right" in text) == (code == 1)
    state = "1 failed" if code else "1 right"
    assert f"{name}: {state}" in text


def test_what_passed_is_recorded(tmp_path, monkeypatch):
    """A backend of which one check is wrong, or that has none, is not among them."""
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    states = {"cuda": ("right", "declined"), "triton": ("right", "lost"), "gluon": ("declined",)}
    found = [Verdict(name, "a case", state) for name, of in states.items() for state in of]
    report.note(found, (9, 0))
    passed = {name for name in states if gpu_record.has_passed(name, (9, 0))}
    assert passed == {"cuda"}


@pytest.mark.parametrize("passed", [(), ("triton",)])
def test_what_was_not_done_stays_what_it_was(tmp_path, monkeypatch, passed):
    """Kernels that had passed are not given up because a machine compiles slowly."""
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    gpu_record.note_passed([*passed, "cuda"], (9, 0))
    states = {"triton": ("right", "not done"), "cuda": ("not done", "wrong")}
    found = [Verdict(name, "a case", state) for name, of in states.items() for state in of]
    assert "cuda" not in report.note(found, (9, 0))
    assert gpu_record.has_passed("triton", (9, 0)) == bool(passed)
    assert not gpu_record.has_passed("cuda", (9, 0))


def test_whole_passes_are_triton_s_alone():
    """Others lack operators of them, which is no fault of theirs."""
    found = workers.jobs(["triton", "cuda", "gluon"], "captured_pass")
    assert [job.backend for job in found] == ["triton"] * len(found)
    assert len(found) == sum(case.op == "captured_pass" for case in CASES) > 1


def test_gluon_is_checked_where_it_serves():
    assert {str(job.case) for job in workers.jobs(["gluon"])} == {
        "hybrid_tree_attention 1 row",
        "hybrid_tree_attention 4 rows, sinks",
        "hybrid_tree_attention 16 rows",
        "hybrid_tree_attention 32 rows",
        "hybrid_tree_attention 16 rows, pages, window, fp16",
        "verify_attention scores, 16 rows",
        "verify_attention scores, 32 rows",
    }
