"""Checking and loading what options name: texts, devices, dtypes and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedModel

import specattn
from specattn.cli.options import DTYPES, ModelOptions
from specattn.cli.terminal import console
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.embedded import EMBEDDED_TARGET


def device_named(name: str) -> torch.device:
    """Return the device of a ``--device`` option."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" takes tensors, but holds no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device: {name} cannot be used here: {error}") from None
    return device


def dtype_named(name: str, option: str) -> torch.dtype | str:
    """Return the dtype that `option` names; "auto" is that of the stored weights."""
    if name == "auto":
        return name
    if (full := DTYPES.get(name, name)) not in DTYPES.values():
        known = ", ".join(["auto", *DTYPES, *DTYPES.values()])
        raise ValueError(f"{option}: expected one of {known}, got {name!r}")
    dtype: torch.dtype = getattr(torch, full)
    return dtype


def decoding_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype of a ``--dtype`` option; "auto" is float32 on a CPU."""
    if name == "auto" and device.type == "cpu":
        # In 16 bits a pass over several rows may round a near-tie otherwise than one row alone.
        return torch.float32
    return dtype_named(name, "--dtype")


def model_folder(path: Path | None, option: str = "--model") -> Path:
    """Return the folder that `option` names if it holds a model that transformers knows."""
    path = EMBEDDED_TARGET if path is None else path
    if not path.is_dir():
        raise ValueError(f"{option}: {path} is not a folder")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        raise ValueError(f"{option}: {path} has no readable config.json") from None
    if (family := config.get("model_type")) not in CONFIG_MAPPING:
        known = f"transformers {transformers.__version__} knows no models of type {family!r}"
        raise ValueError(f"{option}: {path}: {known}")
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{option}: {path} holds no *.safetensors; other formats are not loaded")
    return path


class Checkpoint:
    """A model's folder, device and dtype, checked at once; its weights are loaded when asked for.

    Raises
    ------
    ValueError
        The folder holds no model, or the device or the dtype cannot be used.
    """

    def __init__(self, options: ModelOptions):
        self.folder = model_folder(options.model)
        self.device = device_named(options.device)
        self.dtype = decoding_dtype(options.dtype, self.device)
        silence_transformers()
        self.tokenizer = load_tokenizer(self.folder)

    def load(self, parts: int = 1) -> PreTrainedModel:
        """Return the model, divided into `parts` over as many ranks."""
        with console.status(f"loading {self.folder}"):
            return load_causal_model(self.folder, self.dtype, self.device, tensor_parallel=parts)

    def describe(self, model: PreTrainedModel) -> dict[str, str]:
        """Return what a file of results says of the loaded model."""
        return {
            "path": str(self.folder),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        }


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def silence_transformers() -> None:
    """Let transformers report errors only, and no progress of its own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def versions() -> dict[str, str]:
    """Return what a file of results says of the software."""
    return {
        "specattn": specattn.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
