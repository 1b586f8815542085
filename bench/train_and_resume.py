"""Train a drafter for some steps, as if interrupted half way, and see that it has learnt.

    python bench/train_and_resume.py --output out --steps 20 --bf16 True

`specattn train dflash --causal` for the embedded target, on this package's own source; what is not
an option here is one of that command. Its last checkpoint is then taken away, so that `--resume`
goes on from the one before. Exit status 1 where a step is missing or the loss has not fallen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
QUIET = ("--disable_tqdm", "True", "--report_to", "none", "--logging_steps", "1")
SMALL = ("--row-length", "1024", "--batch-size", "4", "--per_device_train_batch_size", "4")
SMALL += ("--anchors", "64", "--layers", "3", "--learning-rate", "1e-3")


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice; return 0 when all steps are there and the loss has fallen, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="an even number")
    options, rest = parser.parse_known_args(argv)
    if options.steps < 4 or options.steps % 2:
        parser.error(f"--steps: expected an even number from 4, got {options.steps}")
    half = options.steps // 2
    shutil.rmtree(options.output, ignore_errors=True)
    command = [sys.executable, "-m", "specattn.cli", "train", "dflash", "--causal"]
    command += ["--target", str(ROOT / "examples" / "tiny"), "--output", str(options.output)]
    command += ["--data", str(ROOT / "python" / "specattn"), *QUIET, *SMALL]
    command += ["--max_steps", str(options.steps), "--save_steps", str(half), *rest]
    subprocess.run(command, check=True)
    shutil.rmtree(options.output / f"checkpoint-{options.steps}")
    subprocess.run([*command, "--resume"], check=True)
    return verdict(options.output, options.steps)


def verdict(folder: Path, steps: int) -> int:
    """Print the losses of a run; return 1 where one is missing or they have not fallen, else 0."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    losses = {one["step"]: one["loss"] for one in history if "loss" in one}
    print("loss by step: " + " ".join(f"{loss:.2f}" for loss in losses.values()))
    if missing := set(range(1, steps + 1)) - losses.keys():
        print(f"no loss of steps {sorted(missing)}", file=sys.stderr)
        return 1
    few = max(1, steps // 5)
    first, last = (mean(losses[step] for step in some) for some in (
        range(1, few + 1), range(steps - few + 1, steps + 1)
    ))  # fmt: skip
    print(f"first {few} steps {first:.3f}, last {few} {last:.3f}, resumed behind {steps // 2}")
    return int(not last < first)


if __name__ == "__main__":
    sys.exit(main())
