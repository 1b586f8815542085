"""Our kernels, compiled for GPUs that are not here and executed: right, and the same every way."""

from unittest import mock

import pytest

pytest.importorskip("triton")

from specattn.triton_kernels import _configs
from specattn.triton_kernels._configs import UNFENCED

from ..faults import Fault
from . import cases, checks, mutate
from .case import Case

ARCHITECTURES = ["sm_80", "sm_90"]
WHOLE = pytest.mark.gpu_code("triton")
# The quick ones each on one of the two.
QUICK = [(case, ARCHITECTURES[i % 2]) for i, case in enumerate(cases.QUICK)]
OTHERS = [(c, a) for c in cases.SELECTED for a in ARCHITECTURES if (c, a) not in QUICK]


@pytest.mark.parametrize(
    ("case", "arch"), [*QUICK, *(pytest.param(*x, marks=WHOLE) for x in OTHERS)], ids=str
)
def test_selected(compiler_process, case, arch):
    compiler_process(checks.check, case, arch)


@WHOLE
@pytest.mark.parametrize(("case", "arch"), QUICK, ids=str)
def test_tensor_cores_may_cut_sums_off(compiler_process, case, arch):
    """The bounds hold on a GPU too, whose products are not summed as exactly as here."""
    compiler_process(checks.check, case, arch, checks.CUT_OFF)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_all_in_every_order(compiler_process, case, arch):
    compiler_process(checks.check, case, arch, checks.SCHEDULES)


def merged(length, states):
    """Return what a call of ``length`` keys returns, and one whose combine expects ``states``."""
    case = Case("hybrid", rows=5, head_dim=128, lengths=(length,), kv_heads=1, split_size=64)
    blocks = _configs.combine_blocks
    with mock.patch.object(
        _configs, "combine_blocks", lambda device, _, *rest: blocks(device, states, *rest)
    ):
        wide = checks.run(case, "sm_90")
    return checks.run(case, "sm_90").same_bits(wide)


@pytest.mark.parametrize("length", [120, 250, 500])
def test_how_many_states_a_combine_may_meet_shows_in_no_bit(compiler_process, length):
    """Capacity decides how many that are, a request's length how many it has."""
    assert compiler_process(merged, length, 16)


def within_a_warp(arch, slots):
    """Return (barriers, whether shared memory is used) of the combine of so many states."""
    case = Case(
        "hybrid", rows=5, lengths=(64 * slots - 8,), head_dim=128, kv_heads=1, split_size=64
    )
    _, combine = checks.run(case, arch).launches
    return combine.ptx.count("bar.sync"), ".shared" in combine.ptx


# Of few states four rows are merged at once, and their sums change lanes by shared memory.
BARRIERS = {2: 0, 4: 0 if UNFENCED else 2, 8: 0, 16: 0}


@WHOLE
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("slots", BARRIERS)
def test_a_combine_is_one_warps_own(compiler_process, arch, slots):
    assert compiler_process(within_a_warp, arch, slots) == (BARRIERS[slots], slots < 8)


def waits(arch):
    """Return how often each kernel of a call waits for the launch before it."""
    case = Case("hybrid", rows=1, lengths=(300, 130), kv_heads=1)
    launches = checks.run(case, arch).launches
    return {x.name: x.ptx.count("griddepcontrol.wait") for x in launches}


@pytest.mark.parametrize(("arch", "times"), [("sm_90", 1), pytest.param("sm_80", 0, marks=WHOLE)])
def test_attention_and_its_combine_start_early_and_wait_once(compiler_process, arch, times):
    """Attention for what a layer writes before it; GPUs before sm_90 have no such launches."""
    assert compiler_process(waits, arch) == {"split_kv_kernel": times, "combine_kernel": times}


def test_a_fault_names_the_kernel_and_its_source(compiler_process):
    """Without their guards loads go beyond their tensors; nothing on a GPU would say so."""
    message = compiler_process(mutate.without_guards)
    assert "bounds" in message
    assert "split_kv_kernel" in message
    assert "_blocks.py:" in message


# What none of the two kernels can do without, and which detectors may say so.
NEEDED = {
    "hybrid": {
        "barrier removed": {"race"},
        "copy wait weakened": {"race"},
        "zero-fill of a copy dropped": {"undefined", "bounds"},
    },
    "hopper": {
        "barrier removed": {"race", "barrier"},
        "mbarrier wait removed": {"race", "undefined"},
        "arrival removed": {"barrier"},
        "product wait weakened": {"undefined", "race"},
        "register fence removed": {"race"},
        "proxy fence removed": {"race"},
    },
    "hybrid wgmma": {
        "product wait weakened": {"undefined", "race"},
        "register fence removed": {"race"},
        "proxy fence removed": {"race"},
    },
}


@WHOLE
@pytest.mark.skipif(not UNFENCED, reason="this Triton fences what wgmma reads")
def test_wgmma_of_old_tritons_reads_what_is_not_fenced(compiler_process):
    """Why `_configs` keeps tiles below 64 rows there."""
    case = Case("hybrid", rows=16, block_m=64, hopper=False)
    with pytest.raises(Fault, match=r"without fence\.proxy\.async"):
        compiler_process(checks.check, case, "sm_90")


@WHOLE
@pytest.mark.parametrize("name", NEEDED)
def test_removed_synchronisation_is_caught(compiler_process, name):
    if UNFENCED and name == "hybrid wgmma":
        pytest.skip("wgmma is not used with this Triton")
    caught = compiler_process(mutate.first_caught, name, set(NEEDED[name]))
    assert caught.keys() == NEEDED[name].keys()
    for kind, how in caught.items():
        assert how in NEEDED[name][kind]


# Gluon puts a barrier beside every operation on an mbarrier, needed or not.
PLACED_BY_TRITON = [name for name in mutate.TARGETS if not name.startswith("hopper")]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACED_BY_TRITON)
def test_nearly_every_barrier_is_needed(compiler_process, name):
    """Triton places few barriers too many; the emulator sees what each of them is for."""
    counts = compiler_process(mutate.barriers, name)
    assert counts["harmless"] <= 1 + counts["caught"] // 4  # `importance` has four
