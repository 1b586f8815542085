"""What the kernels cost on GPUs that are not here: every one compiles, and none spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from specattn.triton_kernels._configs import UNFENCED
from tools.ptx.offline import _loops
from tools.ptx.offline_calls import VARIANTS

KIB = 1024
# What an SM has, with 1 KiB for each program's own use on NVIDIA's.
SHARED_MEMORY_OF_SM = {
    "sm_80": 164 * KIB,
    "sm_90": 228 * KIB,
    "sm_100": 228 * KIB,
    "gfx942": 64 * KIB,
}
REGISTERS_OF_SM = {"sm_80": 65536, "sm_90": 65536, "sm_100": 65536, "gfx942": 4 * 64 * 512}
# What one program may take. The sm_80 rows also serve 8.6, 8.9 and 12.0, which have 99 KiB.
SHARED_MEMORY = {"sm_80": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}


COSTS = """
import json, sys
from dataclasses import asdict
from tools.ptx import offline
which, without, *archs = sys.argv[1:]
calls, left_out = offline.calls, json.loads(without)
for arch in archs:
    offline.calls = lambda which: (x for x in calls(which) if x[0] != left_out.get(arch))
    for cost in offline.costs(arch, which):
        print(json.dumps(asdict(cost)), flush=True)
"""
# Before 3.7 an assertion of Triton's pipeliner fails there (docs/triton.md).
CANNOT = {"sm_100": "gated delta, 64 rows, D 256 and 256, bf16"} if UNFENCED else {}


def compiled(which, *archs):
    """Compile in a process without TRITON_INTERPRET; return the costs and print them as a table."""
    environment = os.environ | {"TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", COSTS, which, json.dumps(CANNOT), *archs],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    costs = [json.loads(line) for line in run.stdout.splitlines()]
    row = "{arch:7} {case:40} {kernel:18} {tile:>8} {warps:5} {stages:6} {registers:9} {spilled:7}"
    row += " {shared:7}  {units}"
    print("\n" + row.format(**{key: key for key in costs[0]}))
    for cost in costs:
        print(row.format(**cost))
    return costs


# Bytes per thread, which `_configs` sums up.
SPILLED = {
    "sm_80": {"logits chain, 512 rows, D 64,": 8},
    "sm_90": {
        "hybrid in cache window e4m3, 32 rows": 8,
        "logits trimmed, 32 rows, D 128": 16,
        "ragged logits, 32 rows, D 128": 8,
        "logits trimmed, 128 rows, D 128": 8,
        "latents logits all, 32 rows": 24,
    },
    "sm_100": {
        "hybrid in cache window e4m3, 32 rows": 8,
        "ragged gather rows all paged, 64 rows, D 128": 16,
    },
    "gfx942": {"scores paged window, 64 rows, D 256": 24},
}
SPILLED_UNFENCED = {
    "sm_80": {
        "64 rows, D 256": 8,
        "logits trimmed, 64 rows, D 64": 40,
        "logits": 8,
        "latents logits all, 32 rows": 24,
        "own values, 64 rows, D 192": 16,
    },
    "sm_90": {"logits": 16},
    "gfx942": {"logits all, 64 rows, D 256": 148},
}


def spills_known(arch, case, tile):
    """Return the bytes per thread that a case is known to spill."""
    if tile == "128 x 128":  # of the Hopper kernel, outside its loops of products
        return 80
    tables = [SPILLED, SPILLED_UNFENCED] if UNFENCED else [SPILLED]
    known = [one for table in tables for one in table.get(arch, {}).items()]
    return max((size for part, size in known if part in case), default=0)


def misfits(cost):
    """Yield what a compiled kernel takes too much of, or lacks."""
    arch, case = cost["arch"], cost["case"]
    if cost["spilled"] > spills_known(arch, case, cost["tile"]):
        yield "spills"
    if cost["in_products"]:
        yield "spills where it multiplies"
    if cost["shared"] > SHARED_MEMORY[arch]:
        yield f"shared memory above {SHARED_MEMORY[arch]}"
    if cost["programs"]:
        yield from not_resident(cost)
    if cost["kernel"] == "split_kv_kernel" and "fp32" not in case:
        if not cost["units"]:
            yield "no matrix instructions"
        # Lookups and masks are 4 bytes, keys and values 16; 16 keys of a tree, of 64 elements each
        # (of latents the last 64), are 8 for each thread of 8 warps.
        few = "64 rows, D 64," in case or "latents" in case
        narrow = {4, 8} if few and cost["warps"] == 8 else {4}
        widest = {16}
        if any(form in case for form in ("int8", "e4m3", "e5m2")):
            narrow = {4, 8}  # half a thread's elements of a tile of 16 bits
            if cost["tile"].startswith("128 x 32") and "D 64," in case:
                widest = set()  # 32 keys are 8 bytes for each of 256 threads
        if arch != "gfx942" and set(cost["copies"]) - narrow != widest:
            yield "copies of other widths"


def not_resident(cost):
    """Yield why fewer programs than `_configs` counts on fit into one SM."""
    arch, threads = cost["arch"], cost["warps"] * (64 if cost["arch"] == "gfx942" else 32)
    own = 0 if arch == "gfx942" else KIB
    registers = -(-cost["registers"] // 8) * 8
    if cost["programs"] * threads * registers > REGISTERS_OF_SM[arch]:
        yield f"too many registers for {cost['programs']} programs"
    if cost["programs"] * (cost["shared"] + own) > SHARED_MEMORY_OF_SM[arch]:
        yield f"too much shared memory for {cost['programs']} programs"


def assert_fit(costs):
    assert costs
    assert not [(problem, cost) for cost in costs for problem in misfits(cost)]


QUICK = ("sm_90", "gfx942")
# The emulator executes sm_80 and sm_90; of the others, which take as long, few are compiled here.
COMPILED = {"sm_80": "chosen", "sm_90": "chosen", "sm_100": "few", "gfx942": "few"}


def test_a_loop_is_what_all_ways_enter_at_its_head():
    """A jump back from what was laid behind a loop into its middle closes none."""
    code = {
        0x00: "MOV R1, R2", 0x10: "HGMMA R4", 0x20: "@P0 BRA 0x60", 0x30: "LDL R3",
        0x40: "@P1 BRA 0x10", 0x50: "EXIT", 0x60: "STL R3", 0x70: "BRA 0x30",
    }  # fmt: skip
    assert list(_loops(code)) == [(0x10, 0x40)]


def test_compiles_without_spills():
    found = compiled("quick", *QUICK)
    assert {cost["arch"] for cost in found} == {*QUICK}
    assert_fit(found)


@pytest.mark.gpu_code("triton")
@pytest.mark.parametrize(("arch", "which"), COMPILED.items())
def test_every_primitive_compiles_without_spills(arch, which):
    assert_fit(compiled(which, arch))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["small", *VARIANTS])
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_configuration_compiles_without_spills(arch, which):
    assert_fit(compiled(which, arch))
