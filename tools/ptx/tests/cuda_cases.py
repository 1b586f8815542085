"""Calls that the CUDA C++ kernels serve, for the emulator: chosen ones, and others at random."""

import random
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
from tests.cases import make_problem
from tests.engine_layouts import LAYOUTS

import specattn
from specattn.backends.cuda import build

from .. import cuda_launch
from ..cuda_launch import emulated_cuda
from ..faults import Fault
from .case import Case
from .checks import CUT_OFF, SCHEDULES, check

ARCHITECTURES = ("sm_80", "sm_90a")
HEAD_DIMS = (64, 80, 96, 128, 256)

QUICK = [
    Case("hybrid", sinks=True),
    Case(
        "hybrid",
        rows=16,
        head_dim=128,
        paged=True,
        softcap=2.0,
        lengths=(150, 0),
        first_unused=True,
    ),
    Case("ragged hybrid", lengths=(200, 9, 0), ragged=(3, 0, 1), paged=True, window=99),
    Case("gather", "fp16", rows=1, head_dim=80, paged=True, sinks=True),
    Case("scores", rows=16, window=100),
    Case("hybrid", lengths=(1300,), kv_heads=1, split_size=64, sinks=True),  # merged twice
    # Prefixes that fill their cache, at a split's end; of pages the last one's table.
    Case("hybrid", lengths=(70, 256), kv_heads=1, split_size=64, spare=0, paged=True),
    Case("hybrid", lengths=(256,), kv_heads=1, spare=0),
    Case("hybrid", lengths=(40, 9), kv_heads=1, paged=True, far="pages"),
]
TWICE, FULL_TABLE, FULL, FAR = QUICK[-4:]
# Every primitive, every shape of block (16, 32, 64 rows; teams of 1, 2, 4 warps), every feature.
SELECTED = [
    *QUICK,
    Case("hybrid", "fp16", lengths=(700, 90, 0), split_size=None, spare=2000, window=500),
    Case("hybrid", rows=8, head_dim=96, tree="chain", window=37),
    Case("hybrid", rows=16, head_dim=256, lengths=(150, 0), kv_heads=1),
    Case("hybrid", rows=3, head_dim=80, group=7, tree="in_cache", paged=True),
    Case("tree", rows=16),
    Case("scores", lengths=(300, 9, 0), split_size=None, spare=500),
    Case("scores", head_dim=128, per_head=False, softcap=2.0, lengths=(150, 0)),
    Case("logits", "fp16", paged=True, window=100, softcap=2.0),
    Case("hybrid", rows=35, group=1, lengths=(90, 0), window=2, kv_heads=1),  # cuts the tree
    Case("ragged logits", rows=9, lengths=(70, 9), ragged=(9, 3), window=3),
    Case("ragged scores", lengths=(200, 9, 0), ragged=(1, 6, 0)),
    Case("ragged gather", "fp16", lengths=(200, 9, 0), ragged=(2, 3, 0), head_dim=80),
    *(Case("hybrid", lengths=(90, 9), paged=True, layout=order) for order in LAYOUTS),
    Case("scores", lengths=(90, 9), paged=True, layout="PSHNC"),
    Case("gather", lengths=(90, 9), paged=True, layout="LPNHSC"),
]  # fmt: skip


def drawn(seed):
    """Return a random case."""
    choose = random.Random(seed)
    op = choose.choice(("hybrid", "hybrid", "tree", "scores", "logits", "gather"))
    ragged = op != "tree" and choose.random() < 0.3
    group = choose.choice((1, 2, 4, 7, 8))
    most = choose.choice((16, 32, 64))
    rows = choose.randint(1, max(1, most // group))
    lengths = tuple(
        choose.choice((0, choose.randint(1, 60), choose.randint(61, 500)))
        for _ in range(choose.randint(1, 4))
    )
    windowed = op in ("hybrid", "scores", "logits") and choose.random() < 0.4
    return Case(
        f"ragged {op}" if ragged else op,
        dtype=choose.choice(("bf16", "fp16")),
        rows=rows,
        head_dim=choose.choice(HEAD_DIMS),
        lengths=lengths,
        group=group,
        kv_heads=choose.choice((1, 2)),
        paged=op != "tree" and choose.random() < 0.5,
        tree=choose.choice(("random", "chain", "in_cache")) if op in ("hybrid", "scores", "logits")
        else "random",
        window=choose.choice((1, 20, 100, 400)) if windowed else None,
        softcap=0.0 if op == "gather" or choose.random() < 0.7 else 2.0,
        sinks=op in ("hybrid", "gather") and not ragged and choose.random() < 0.4,
        per_head=op != "scores" or ragged or choose.random() < 0.7,
        split_size=choose.choice((64, 128, 256, None)),
        spare=choose.choice((1, 3, 200)),
        ragged=(rows, *(choose.choice((0, 1, choose.randint(1, rows))) for _ in lengths[1:]))
        if ragged else None,
    )  # fmt: skip


def check_selected(case, arch):
    """Execute a case in one order."""
    return check(case, arch, emulate=emulated_cuda)


def check_cut_off(case, arch):
    """Execute a case with tensor cores that cut sums off."""
    return check(case, arch, CUT_OFF, emulate=emulated_cuda)


def check_orders(case, arch):
    """Execute a case in two orders, which must agree in every bit."""
    return check(case, arch, SCHEDULES, emulate=emulated_cuda)


# One mistake each: (file, what it says, what it would say, the quick case that shows it).
_AGAIN = "  __syncthreads();  // before the first log-sum-exp makes room for that of all\n"
_BARRIER = "  __shared__ int last;\n  __syncthreads();\n"
_TEAM = "    team_barrier<kTeamThreads>(\n        team);  // what all have copied is here; "
_MATRIX = "(me.lane % 8 + me.lane / 16 * 8) * kPitch + me.lane / 8 % 2 * 16"
_SWAPPED = "(me.lane % 8 + me.lane / 8 % 2 * 8) * kPitch + me.lane / 16 * 16"
_END, _VALUES = "w.end = min(w.begin + size, w.length)", "v_row + c * kLanesPerRow * 8"
PLANTED = {
    "counting does not release": ("ptx.cuh", "atom.acq_rel", "atom.acquire", TWICE),
    "counting does not acquire": ("ptx.cuh", "atom.acq_rel", "atom.release", TWICE),
    "counting orders nothing": ("ptx.cuh", "atom.acq_rel", "atom.relaxed", TWICE),
    "counted before all have written": ("ptx.cuh", _BARRIER, _BARRIER[:23], TWICE),
    "slot 0 is overwritten early": ("combine.cuh", _AGAIN, "", TWICE),
    "partials are constants": ("combine.cuh", "__ldcg(", "__ldg(", TWICE),
    "heads share counters": ("combine.cuh", "gridDim.x + w.head) *", "gridDim.x) *", QUICK[0]),
    "last but one merges": ("combine.cuh", "+ group, count)", "+ group, count - 1)", TWICE),
    "a slot too few": ("combine.cuh", "group * kFanIn);", "group * kFanIn) - 1;", TWICE),
    "a live slot too many": ("decode.cu", "begin + size - 1) / size", "begin + size) / size", FULL),
    "a table past the split": (
        "keys.cuh", "if (first_key(ahead) + row + i * kRowsPerPass < w.end)", "", FULL_TABLE
    ),
    "32 bits for a page's address": (
        "keys.cuh", "in * p.k_b", "in * static_cast<int>(p.k_b)", FAR
    ),
    "a wait too lax": ("decode.cu", "<kStages - 2>", "<kStages - 1>", QUICK[0]),
    "no team barrier": ("decode.cu", _TEAM, "//", QUICK[1]),
    "bits of lanes swapped": ("decode.cu", _MATRIX, _SWAPPED, QUICK[0]),
    "a split ends early": ("decode.cu", _END, f"{_END} - 1", QUICK[0]),
    "no zeros behind values": ("keys.cuh", f"{_VALUES}, valid)", f"{_VALUES})", QUICK[1]),
}  # fmt: skip


def planted(name):
    """Return what is said of the kernels with one mistake in them."""
    file, right, wrong, case = PLANTED[name]
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(shutil.copytree(build.SOURCES, Path(folder, "cuda")))
        text = (sources / file).read_text()
        assert right in text, f"{file} has changed"
        (sources / file).write_text(text.replace(right, wrong))
        with mock.patch.object(build, "SOURCES", sources):
            cuda_launch.compiled.cache_clear()
            try:
                check_selected(case, "sm_80")
            except Fault as fault:
                return fault.kind
            except AssertionError:
                return "result"
            finally:
                cuda_launch.compiled.cache_clear()
    return "nothing"


MERGED = Case("hybrid", lengths=(1300, 70), kv_heads=1, split_size=64, sinks=True)


def check_neighbours(arch):
    """See that a request's bits do not change with its neighbour and its cache's capacity."""
    results = []
    for lengths, spare in (((300, 500), 3), ((300, 0), 700)):
        p = make_problem(lengths, 4, q_heads=8, kv_heads=2, head_dim=64, spare=spare,
                         dtype=torch.bfloat16)  # fmt: skip
        first = make_problem((300,), 4, q_heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
        p.k_cache[0, :300], p.v_cache[0, :300] = first.k_cache[0, :300], first.v_cache[0, :300]
        for name in ("q", "k_tree", "v_tree", "tree_mask"):
            getattr(p, name)[0] = getattr(first, name)[0]
        with emulated_cuda(arch) as launches:
            out, lse = specattn.hybrid_tree_attention(
                p.q, p.k_cache, p.v_cache, p.cache_seqlens, p.k_tree, p.v_tree, p.tree_mask
            )
        assert launches[0].grid[1] > 1, "nothing is split"
        results.append((out[0], lse[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
