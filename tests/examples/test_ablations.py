"""The ablations' script runs from end to end, and its figures are what they are called."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

from ablations import difference  # noqa: E402
from tests import HANGS  # noqa: E402


@pytest.mark.slow
def test_all_steps_run(tmp_path):
    command = [sys.executable, "-W", "ignore", TINY / "ablations.py", "--toy", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=HANGS)
    found = json.loads((tmp_path / "ablations.json").read_text())
    assert len(found["variants"]) == 4
    for variant in found["variants"].values():
        assert len(variant["short"]) == 2
        assert variant["acceptance"][0]["acceptance_length"] >= 1
        assert len(variant["by_position"]) == 2
    for name in ("ablation-anchor-offset.png", "ablation-flash-noise.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_differences_are_taken_in_pairs():
    found = difference([5.0, 1.0, 9.5], [4.0, 0.0, 7.5])
    assert found == {"mean": 1.3333, "error": 0.3333}  # of 1, 1 and 2
