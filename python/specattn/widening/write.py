"""Stores a widened model with its drafters: all of it, or nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specattn.decoding.model.checkpoint import load_causal_model
from specattn.files import new_folder
from specattn.widening.checks import Exactness, exactness, same_tokens
from specattn.widening.multiples import Multiples
from specattn.widening.source import Source


def widen(source: Source, output: Path, times: Multiples, dtype: torch.dtype) -> Exactness:
    """Store the widened source in a new folder, and return how exact it is.

    Weights are made and stored layer by layer. Raises ValueError where the widened model or a
    drafter would compute something else, the folder exists, or the disk has no room.
    """
    with new_folder(output) as partial:
        found = exactness(source, times)
        wide: Any = source.empty(times)
        needed, free = wide.num_parameters() * dtype.itemsize, shutil.disk_usage(partial).free
        if free < needed:
            raise ValueError(f"it needs {needed / 1e9:.2g} GB, of which {free / 1e9:.2g} are free")
        _store_weights(source, times, dtype, partial)
        wide.config.dtype = dtype
        for one in (wide.config, source.model.generation_config, source.tokenizer):
            one.save_pretrained(partial)
        for name in source.drafters:
            source.wide_drafter(name, times, str(output)).to(dtype).save_pretrained(partial / name)
        return replace(found, same_tokens=same_tokens(source, load_causal_model(partial, dtype)))


def _store_weights(source: Source, times: Multiples, dtype: torch.dtype, folder: Path) -> None:
    """Store a file for each layer and one for the rest, and which weight is in which."""
    files = dict[str, str]()
    stored = 0
    for number, part in enumerate(source.parts(times), start=1):
        file = f"model-{number:05}-of-{times.layers + 1:05}.safetensors"
        tensors = {name: weight.to(dtype).contiguous() for name, weight in part.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        stored += sum(weight.nbytes for weight in tensors.values())
    index = {"metadata": {"total_size": stored}, "weight_map": files}
    text = json.dumps(index, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
