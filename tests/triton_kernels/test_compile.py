"""What the kernels cost on GPUs that are not here: every one compiles, and none spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KIB = 1024
# What one program may take. The sm_80 rows also serve 8.6, 8.9 and 12.0, which have 99 KiB.
SHARED_MEMORY = {"sm_80": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}


def compiled(arch, *options):
    """Compile in a process without TRITON_INTERPRET; return the costs and print them as a table."""
    environment = os.environ | {"TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-m", "tests.triton_kernels.offline", arch, *options],
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


def assert_fits(costs):
    assert costs
    for cost in costs:
        collects = cost["case"].startswith(("scores", "logits"))
        known = collects and "D 256, fp32" in cost["case"]  # `_configs` says so
        assert cost["spilled"] == 0 or known, cost
        assert cost["shared"] <= SHARED_MEMORY[cost["arch"]], cost
        if cost["kernel"] == "split_kv_kernel" and "fp32" not in cost["case"]:
            assert cost["units"], f"no matrix instructions: {cost}"


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_compiles_without_spills(arch):
    assert_fits(compiled(arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_configuration_compiles_without_spills(arch):
    assert_fits(compiled(arch, "--all"))
