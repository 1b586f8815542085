"""The host's side of the CUDA kernels: what they are told, where they run, what is built when."""

import re

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cupy")

from tools.ptx.tests import cuda_cases

from specattn import gpu_record
from specattn.backends.cuda import attention, build, merging, selection, shape

from . import cuda_host_cases, device_cases

TYPES = {"i64": "q", "int": "i", "u32": "I", "float": "f", "double": "d", "signed char": "b"}


def fields(file, structure):
    """Return [(name, struct's letter, how many)] of a C++ structure, its own Split spelled out."""
    text = (build.SOURCES / file).read_text()
    body = re.sub(r"//[^\n]*", "", text.split(f"struct {structure} {{")[1].split("};")[0])
    found = []
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        kind, names = re.match(r"(?:const )?(signed char|\w+)\s*(.*)", statement, re.S).groups()
        if kind == "Split":
            found += [(name, "i", 1) for name in ("wanted", "least", "most")]
            continue
        for name in names.split(","):
            name = name.strip()
            pointer, name = "*" in statement, name.strip("* ")
            many = re.search(r"\[(\w+)\]", name)
            letter = "Q" if pointer else TYPES[kind]
            found.append((name.split("[")[0], letter, attention.MOST_COLLECTED if many else 1))
    return found


def letters(of):
    return "".join(letter * many for _, letter, many in of)


def spelled_out(format):
    expanded = re.sub(r"(\d+)([a-zA-Z])", lambda m: m[2] * int(m[1]), format.lstrip("<"))
    return expanded.replace("x", "")


def test_the_structure_of_decode_is_the_kernels():
    of_kernel = fields("params.cuh", "Params")
    names = [name for name, _, _ in of_kernel]
    ours = (*attention.ADDRESSES, *attention.LONGS, *attention.INTS, *attention.MAGIC)
    ours += (*attention.LAST_INTS, *attention.FLOATS, *attention.COLLECTED, "collected_rows")
    assert names == list(ours)
    assert letters(of_kernel) == spelled_out(attention._STRUCT.format)


@pytest.mark.parametrize(
    ("file", "name", "module"),
    [("merge.cu", "MergeParams", merging), ("select_topk.cu", "SelectParams", selection)],
)
def test_the_other_structures_are_the_kernels(file, name, module):
    assert letters(fields(file, name)) == spelled_out(module._STRUCT.format)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 24, 100, 256])
def test_numbers_are_divided_by_pages(size):
    magic = attention._magic(size)
    for n in [*range(3 * size), 2**31 - 1, 2**31 - size, 2**20 + 1]:
        assert n * magic["page_magic"] >> magic["page_shift"] == n // size
    assert magic["page_magic"] < 2**32


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_blocks_fit(arch):
    from tools.ptx.cuda_launch import device

    gpu = device(arch)
    for rows in (1, 16, 17, 32, 33, 64):
        for D in shape.HEAD_DIMS:
            block = shape.shape_of(rows, D, gpu)
            assert block.rows >= rows
            assert block.shared < gpu.shared_per_block
            assert block.blocks * (block.shared + 1024) <= gpu.shared_per_multiprocessor


@pytest.mark.parametrize("device", [0, 1])
def test_launches_are_on_the_tensors_device_in_its_stream(compiler_process, device):
    launches, current = compiler_process(cuda_host_cases.places, device)
    assert {(at, stream) for _, at, stream in launches} == {(device, 1000 + device)}
    assert {program for program, _, _ in launches} == {"decode", "merge"}
    assert len(launches) == 10
    assert current == 0


def test_a_plan_is_filled_with_the_addresses_of_each_call(compiler_process):
    given, told, planned = compiler_process(cuda_host_cases.addresses)
    assert planned == 1
    assert given[0]["q"] != given[1]["q"]
    for wanted, had in zip(given, told, strict=True):
        assert had["partials"]
        assert had["counters"]
        assert {name: had[name] for name in wanted} == wanted


def test_the_same_counters_serve_a_stream(compiler_process):
    _, told, _ = compiler_process(cuda_host_cases.addresses)
    assert told[0]["counters"] == told[1]["counters"]


def test_a_captured_call_is_one_launch_with_counters_of_its_own(compiler_process):
    launches, cleared, (eager, first, second) = compiler_process(cuda_host_cases.captured)
    assert (launches, cleared) == (3, 0)
    assert len({eager, first, second}) == 3
    assert not (first - second) % 128


@pytest.mark.parametrize(
    ("kind", "served", "said"),
    [
        ("agrees", ["cuda", "triton", "cuda", "cuda", "cuda"], None),
        ("differs", ["cuda", *["triton"] * 5], "1 of 40 elements|elements differ from another"),
        ("NaN", ["cuda", *["triton"] * 5], "1 of 40 elements differ from another backend's"),
        ("empty", ["cuda", *["triton"] * 5], "1 of 40 elements differ"),
        ("ImportError", ["triton"] * 4, "ImportError: libnvrtc.so is missing"),
        ("CompileException", ["triton"] * 4, "CompileException: libnvrtc"),
        ("captured", ["triton"] * 4, None),
    ],
)
def test_an_unforced_call_is_served_whatever_cuda_does(compiler_process, kind, served, said):
    """The first call of a program is held against Triton's; one warning, then Triton alone."""
    who, warned = compiler_process(cuda_host_cases.unforced, kind)
    assert who == served
    assert len(warned) == (said is not None)
    assert not said or re.search(said, warned[0])


def test_a_long_selection_is_four_launches_over_one_workspace(compiler_process):
    (alone,) = compiler_process(cuda_host_cases.launches_of_a_selection, 32768)
    assert alone == ((2, 1, 1), 0, (0, 0))
    launches = compiler_process(cuda_host_cases.launches_of_a_selection, 131072)
    assert [step for _, step, _ in launches] == [0, 1, 2, 3]
    assert {grid for grid, _, _ in launches} == {(2, 16, 1)}
    ((workspace, counters),) = {places for _, _, places in launches}
    assert workspace
    assert counters


def test_a_kernel_may_take_all_shared_memory(compiler_process):
    """Plans of all sizes share a function: whoever came last had set the limit of all."""
    allowed, _ = compiler_process(cuda_host_cases.of_a_module)
    assert allowed == (227 << 10) - 2048


def test_a_kernel_is_loaded_for_the_tensors_device(compiler_process):
    """Whatever CuPy's current device is: it loads modules there."""
    _, devices = compiler_process(cuda_host_cases.of_a_module, 1)
    assert devices == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"T": 13}, "65 query rows per KV head, more than 64"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"softmax_scale": -0.5}, "a softmax_scale of -0.5"),
        ({"skip": 4}, "a tensor does not begin at a multiple of 16 bytes"),
        ({"pad": 4}, "q has strides that are no multiples of 16 bytes"),
    ],
)
def test_what_is_not_served_is_named(compiler_process, options, reason):
    assert f"it does not serve {reason}" in compiler_process(cuda_host_cases.refusal_of, options)


@pytest.mark.parametrize("primitive", ["hybrid", "verify"])
def test_a_window_costs_no_operators(compiler_process, primitive):
    computing, launches = compiler_process(cuda_host_cases.operators_within_a_window, primitive)
    assert not computing
    assert launches == 1


def test_rows_of_a_warpgroup_are_left_to_triton_unless_forced(compiler_process):
    forced, unforced = compiler_process(cuda_host_cases.slower_is_left)
    assert forced == "decode"
    assert unforced == "no launch"


@pytest.mark.parametrize(
    ("rows", "gpu", "fastest", "launched"),
    [
        (12, "H200", "cuda", "decode"),
        (1, "H200", "triton", "no launch"),
        (1, "another", "triton", "decode"),
        (12, "another", "cuda", "no launch"),
    ],
)
def test_what_was_measured_on_a_gpu_decides(
    compiler_process, tmp_path, monkeypatch, rows, gpu, fastest, launched
):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    shape = gpu_record.Shape("hybrid_tree_attention", "bf16", 128, 5 * rows, 512, 1)
    gpu_record.note_fastest(gpu, [{"shape": shape._asdict(), "winner": fastest}])
    forced, chosen = compiler_process(cuda_host_cases.slower_is_left, rows, "H200", tmp_path)
    assert forced == "decode"
    assert chosen == launched


# Attention cases, and selections.
ON_A_DEVICE = [cuda_cases.QUICK[0], cuda_cases.QUICK[1], None]


@pytest.mark.parametrize("case", ON_A_DEVICE, ids=str)
def test_what_runs_on_a_device_passes_where_kernels_are_emulated(compiler_process, case):
    assert compiler_process(device_cases.check_in_the_emulator, case) > 0


@pytest.mark.parametrize("case", ON_A_DEVICE, ids=str)
def test_what_runs_on_a_device_fails_where_kernels_do_nothing(compiler_process, case):
    said = compiler_process(device_cases.what_is_said_of_kernels_that_do_nothing, case)
    assert said != "nothing"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    return tmp_path / "cuda"


PROGRAM = build.Program("merge", (("ELEMENT", 0),))


def test_a_cubin_is_built_once(cache, monkeypatch):
    path = build.cubin(PROGRAM, "sm_90a")
    assert path.parent == cache
    assert path.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr(build, "compiled", lambda *args: pytest.fail("it is built again"))
    assert build.cubin(PROGRAM, "sm_90a") == path


def test_other_programs_architectures_and_sources_have_other_cubins(cache, monkeypatch):
    other = build.Program("merge", (("ELEMENT", 1),))
    paths = {build.cubin(PROGRAM, "sm_90a"), build.cubin(PROGRAM, "sm_80")}
    paths.add(build.cubin(other, "sm_90a"))
    monkeypatch.setattr(build, "_sources", lambda: b"changed")
    paths.add(build.cubin(PROGRAM, "sm_90a"))
    assert len(paths) == 4


def test_what_nvrtc_refuses_is_shown():
    with pytest.raises(RuntimeError, match=r"NVRTC does not compile .*merge.*ELEMENT"):
        build.compiled(build.Program("merge", ()), "sm_90a", ptx=False)
