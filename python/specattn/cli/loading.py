"""Checking and loading what options name: texts, devices, dtypes and checkpoints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedModel

import specattn
from specattn.cli.errors import naming, one_of
from specattn.cli.options import DTYPES, DecodingOptions, ModelOptions
from specattn.cli.terminal import status
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.hub import fetched
from specattn.embedded import EMBEDDED, EMBEDDED_TARGET

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def device_named(name: str) -> torch.device:
    """Return the device of a ``--device`` option."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # "meta" takes tensors, but holds no values
        torch.zeros(1, device=device, dtype=torch.float32).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device: {name} cannot be used here: {error}") from None
    return device


def dtype_named(name: str, option: str) -> torch.dtype | str:
    """Return the dtype that `option` names; "auto" is that of the stored weights."""
    one_of(option, name, ("auto", *DTYPES, *DTYPES.values()))
    return name if name == "auto" else getattr(torch, DTYPES.get(name, name))


def model_folder(given: str | Path | None, option: str = "--model") -> Path:
    """Return the folder that `option` names if it holds a model that transformers knows.

    A Hub id is fetched first, unless it is at hand.
    """
    path = EMBEDDED_TARGET if given is None else Path(given)
    if not path.is_dir():
        path = EMBEDDED.get(str(given), path)
    hub_id = str(given) if not path.is_dir() and _HUB_ID.fullmatch(str(given)) else None
    if hub_id is not None:
        with naming(option):
            path = fetched(hub_id, ("config.json",))
    if not path.is_dir():
        raise ValueError(f"{option}: {path} is not a folder, and no Hub id such as Qwen/Qwen3-0.6B")
    try:
        family = json.loads((path / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{option}: {path} has no readable config.json: {reason}") from None
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        known = f"transformers {transformers.__version__} knows no models of type {family!r}"
        raise ValueError(f"{option}: {path}: {known}")
    if hub_id is not None:
        with naming(option):
            path = fetched(hub_id)
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{option}: {path} holds no *.safetensors; other formats are not loaded")
    return path


class Checkpoint:
    """A model's folder, device and dtype, checked at once; weights are loaded when asked for."""

    def __init__(self, options: ModelOptions):
        self.folder = model_folder(options.model)
        self.is_demo = self.folder in EMBEDDED.values()
        named = options.model is not None and not Path(options.model).is_dir()
        self.name = str(options.model) if named else self.folder.resolve().name
        self.device = device_named(options.device)
        # In 16 bits a pass over several rows may round a near-tie otherwise than one row alone.
        on_cpu = options.dtype == "auto" and self.device.type == "cpu"
        self.dtype = dtype_named("fp32" if on_cpu else options.dtype, "--dtype")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.tokenizer = load_tokenizer(self.folder)

    def load(self, parts: int = 1) -> PreTrainedModel:
        """Return the model, divided into `parts` over as many ranks."""
        with status(f"loading {self.name}"), naming("--model", Exception):
            return load_causal_model(self.folder, self.dtype, self.device, tensor_parallel=parts)

    def describe(self, model: PreTrainedModel) -> dict[str, str]:
        """Return what a file of results says of the loaded model."""
        return {
            "name": self.name,
            "path": str(self.folder),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        }


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer."""
    with naming(f"the tokenizer in {folder}", Exception):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def versions() -> dict[str, str]:
    """Return what a file of results says of the software."""
    return {one.__name__: one.__version__ for one in (specattn, torch, transformers)}


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    file: str
    tokens: list[int]  # what is read of it
    dropped: int = 0  # how many are not read


def tokenize(texts: dict[str, str], tokenizer: Any, options: DecodingOptions) -> list[Prompt]:
    """Return the prompts in the order of their files."""
    prompts = []
    for file, text in texts.items():
        # The template of a chat writes the special tokens itself.
        read = _chat(text, tokenizer, options) if options.chat else text
        ids = tokenizer(read, add_special_tokens=not options.chat)["input_ids"]
        if not ids:
            raise ValueError(f"{file} gives no token")
        last = options.last_tokens
        kept = ids[: options.prompt_tokens] if last is None else ids[-last:]
        prompts.append(Prompt(file, kept, len(ids) - len(kept)))
    return prompts


def _chat(text: str, tokenizer: Any, options: DecodingOptions) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the model's tokenizer has no chat template")
    messages = [{"role": "user", "content": text}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    with naming("--chat: the template", Exception):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
