"""Files have at most 400 lines, or a reason here; README and the command have their own limits."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 400
# Beside kernels for GPUs: one is as long as it must be.
SUFFIXES = {".py", ".cpp", ".h"}
LONGER = {
    "python/specattn/decoding/passes/runner.py": "the two ways to run a pass, told side by side",
    "python/specattn/distributed/context.py": "one class: a cache whose tokens lie on ranks",
    "python/specattn/gpu_checks/cases.py": "one table: a case for each primitive on a GPU",
    "bench/kernels/bars.py": "one list: the bars of the CPU kernels, and how each is measured",
    "bench/kernels/workloads.py": "one list: how each primitive is timed, checked and counted",
    "csrc/cpu/operators_attention.cpp": "one list: operators around attention, each a few checks",
    "csrc/cpu/operators_layer.cpp": "one list: operators of a layer, each a few checks",
    "tools/ptx/machine.py": "the emulated machine, whose parts take turns in one loop",
    "tools/ptx/offline_calls.py": "one list: the launches of every kernel that are compiled",
    "tests/cli/test_conform.py": "a stand-in for an engine, and what is said of its faults",
    "tests/cli/test_generate.py": "one command, whose options share the fixtures",
    "tests/cpu/test_layer.py": "a test for each operator of a layer",
    "tests/decoding/methods/test_longspec.py": "one method, by its caches, trees and chains",
    "tests/hostile/test_callers.py": "one table: what callers do to a model",
    "tests/test_fingerprint.py": "all that is recorded: primitives, texts and drafts",
    "tests/test_planning.py": "one model of times, on machines whose answers are known",
    "tests/triton_kernels/host_cases.py": "what the host does for each primitive, in one process",
}
FOLDERS = ("bench", "csrc/cpu", "docs", "examples", "python", "reference", "tests", "tools")


def lines(file):
    return file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_short(folder):
    files = [file for file in (ROOT / folder).rglob("*.*") if file.suffix in SUFFIXES]
    assert files
    long = {file.relative_to(ROOT).as_posix() for file in files if len(lines(file)) > MOST}
    assert long == {file for file in LONGER if file.startswith(f"{folder}/")}


def test_readme_is_short_and_narrow():
    """90 lines, of at most 140 characters outside of tables, whose rows cannot be broken."""
    found = lines(ROOT / "README.md")
    assert len(found) <= 90
    assert [line for line in found if len(line) > 140 and not line.startswith("|")] == []


def test_the_command_is_small():
    """What other programs could use too lies in the packages below it."""
    files = (ROOT / "python/specattn/cli").glob("*.py")
    assert sum(len(lines(file)) for file in files) <= 3200
