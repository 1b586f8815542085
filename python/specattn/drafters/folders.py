"""Reads a drafter's folder, whoever wrote it: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file


def read_config(folder: Path) -> dict[str, Any]:
    """Return what ``config.json`` says; ValueError: it is no readable JSON object."""
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"{folder} has no readable config.json")
    return given


def check_weights(folder: Path) -> Path:
    """Return the file of weights; ValueError: there is none, but perhaps in formats not loaded."""
    path = folder / "model.safetensors"
    if not path.is_file():
        others = ", ".join(sorted(x.name for x in (*folder.glob("*.bin"), *folder.glob("*.pt*"))))
        but = f" but {others}; other formats are not loaded" if others else ""
        raise ValueError(f"{folder} has no model.safetensors{but}")
    return path


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights by their names; ValueError: they cannot be read."""
    try:
        return load_file(check_weights(folder))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
