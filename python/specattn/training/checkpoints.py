"""The checkpoints and settings of a training run, as `--resume` reads them.

A process may be killed while it writes a checkpoint, so the last one may be incomplete.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specattn.files import write_atomically

SETTINGS = "run.json"
SCHEMA = "specattn.train/1"

_NEEDED = ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt")
_SHARDED = ("global_step*", "pytorch_model_fsdp*")  # DeepSpeed and FSDP write files of their own


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, the last one first, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if re.search(r"-\d+$", path.name)]
    return sorted(found, key=lambda path: -int(path.name.rpartition("-")[2]))


def is_complete(checkpoint: Path) -> bool:
    """Return whether all that a resumed run reads is there and was written to its end."""
    needed = _NEEDED[:1] if any(any(checkpoint.glob(name)) for name in _SHARDED) else _NEEDED
    if not all((checkpoint / name).is_file() for name in needed):
        return False
    if not any(checkpoint.glob("rng_state*.pth")):
        return False
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        for file in checkpoint.glob("*.safetensors"):
            with safe_open(str(file), "pt"):  # compares the file's length with its header
                pass
        for file in (*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")):
            with zipfile.ZipFile(file):  # whose table of contents is written last
                pass
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
        return False
    return True


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings that determine the run's losses to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, **settings}, indent=1) + "\n"
    write_atomically(folder / SETTINGS, lambda partial: partial.write_text(text, encoding="utf-8"))


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError where the run in `folder` was started with other `settings`.

    Runs of earlier versions have no settings file and are not checked. A switch that a version did
    not know was off.
    """
    path = folder / SETTINGS
    if not path.is_file():
        return
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        earlier.pop("schema")
    except (ValueError, KeyError, AttributeError):
        raise ValueError(f"--resume: {path} is no file of specattn train") from None
    now = json.loads(json.dumps(settings))
    for name in {**earlier, **now}:
        if earlier.get(name, False) != now.get(name, False):
            raise ValueError(
                f"--resume: the run in {folder} was started with --{name} {earlier.get(name)}, not "
                f"{now.get(name)}"
            )
