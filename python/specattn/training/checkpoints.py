"""The checkpoints and settings of a training run, as `--resume` reads them.

A process may be killed while it writes a checkpoint, so the last one may be incomplete.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import ExplicitEnum

from specattn.files import write_atomically

SETTINGS = "run.json"
SCHEMA = "specattn.train/1"

_NEEDED = ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt")
_SHARDED = ("global_step*", "pytorch_model_fsdp*")  # DeepSpeed and FSDP write files of their own
# Of the trainer's own arguments, those that decide the losses.
_SHAPING = (
    "per_device_train_batch_size", "num_train_epochs", "max_steps", "lr_scheduler_type",
    "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "bf16", "fp16", "seed", "data_seed",
)  # fmt: skip


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


def settings_of(
    options: Any, recipe: Any, preset: Any, arguments: Any, files: list[Path]
) -> dict[str, Any]:
    """Return what decides the losses of a run, by the names of the options that say it."""
    size = sum(file.stat().st_size for file in files)
    paths = ", ".join(str(path.absolute()) for path in options.data)
    found = {
        "method": type(recipe).__name__,
        "target": Path(options.target).absolute(),
        "data": f"{paths} ({len(files)} files of {size} bytes)",
        **{
            name: getattr(options, name)
            for name in ("text_field", "drafter", "target_dtype", "muon")
        },
        **{field.name: getattr(preset, field.name) for field in fields(preset)},
        **{field.name: getattr(recipe, field.name) for field in fields(recipe)},
        **{name: getattr(arguments, name) for name in _SHAPING},
    }
    if options.patience:  # then what is held out decides where the run ends
        names = ("patience", "eval_rows", "metric_for_best_model", "eval_strategy", "eval_steps")
        found |= {name: getattr(options, name, getattr(arguments, name, None)) for name in names}
        found["eval_data"] = ", ".join(str(path.absolute()) for path in options.eval_data)
    found["heads"] = found.pop("num_heads", None)
    left_out = "preset", "feature_cache"  # whose fields are there; and what changes no loss
    return {
        name.replace("_", "-"): str(value) if isinstance(value, (Path, ExplicitEnum)) else value
        for name, value in found.items()
        if value is not None and name not in left_out
    }


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
