"""Stores a checkpoint with the weights of its layers rounded, in the layout of compressed-tensors.

vLLM and transformers read it too. Codes are those that a run with `quantize` makes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import pad

from specattn.decoding.model.checkpoint import empty_model
from specattn.decoding.model.published import weight_files
from specattn.decoding.model.quantised import layers_to_round, round_as
from specattn.files import new_folder
from specattn.quantised import QuantisedWeight, unpack_nibbles

# Weights in other formats, which the ones that are written here would not follow.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt"}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """What was stored.

    Attributes
    ----------
    layers : int
        How many were rounded.
    before, after : int
        Bytes of all weights.
    layers_before, layers_after : int
        Bytes of the rounded ones alone.
    """

    layers: int
    before: int
    after: int
    layers_before: int
    layers_after: int


def store_rounded(folder: Path, output: Path, kind: str) -> Stored:
    """Write a folder's model anew, its linear layers named ``*_proj`` rounded as `kind` says.

    Each file of weights is read and written by itself. What else is in the folder is copied:
    tokenizer, settings, folders of drafters. All of `output` is written, or nothing.

    Raises
    ------
    ValueError
        The weights are of codes already, not finite, or do not belong to the modules of their
        names; `output` exists or cannot be written.
    """
    config = json.loads((folder / "config.json").read_bytes())
    if (found := _quantization(config)) is not None:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ValueError(f"{folder} has weights in few bits already, of {method}")
    model: Any = empty_model(folder)
    layers = _layers(model)
    with new_folder(output) as partial:
        schemes = dict[str, dict[str, Any]]()
        before = after = layers_before = layers_after = 0
        where = dict[str, str]()
        for file in weight_files(folder):
            tensors = dict[str, torch.Tensor]()
            for key, weight in _read(file):
                before += weight.nbytes
                layer = key.removesuffix(".weight")
                if layer == key or layer not in layers:
                    tensors[key] = weight
                    continue
                if weight.shape != layers[layer]:
                    expected = f"{key}: expected shape {list(layers[layer])}"
                    raise ValueError(f"{expected}, got {list(weight.shape)}")
                try:
                    few = round_as(weight, kind)
                except ValueError as error:
                    raise ValueError(f"{layer}: {error}") from None
                stored = {f"{layer}.{name}": x for name, x in _packed(few).items()}
                schemes[layer] = _scheme(few, kind)
                layers_before += weight.nbytes
                layers_after += _bytes(stored)
                tensors |= stored
            save_file(tensors, partial / file.name, {"format": "pt"})
            shutil.copymode(file, partial / file.name)
            where |= dict.fromkeys(tensors, file.name)
            after += _bytes(tensors)
        if left := layers.keys() - schemes.keys():
            names = ", ".join(sorted(left)[:3]) + (", ..." if len(left) > 3 else "")
            raise ValueError(f"{folder} has no weights by the names of {len(left)} layers: {names}")
        if (folder / _INDEX).is_file():
            index = {"metadata": {"total_size": after}, "weight_map": where}
            (partial / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        _copy_others(folder, partial)
        others = [n for n, x in model.named_modules() if isinstance(x, nn.Linear)]
        ignored = [name for name in others if name not in layers]
        config["quantization_config"] = _settings(schemes, ignored, kind)
        text = json.dumps(config, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
    return Stored(len(schemes), before, after, layers_before, layers_after)


def _quantization(config: dict[str, Any]) -> Any:
    """Return what a configuration, or that of its text model, says of codes."""
    parts = (config, config.get("text_config") or {})
    return next((found for x in parts if (found := x.get("quantization_config"))), None)


def _layers(model: Any) -> dict[str, torch.Size]:
    """Return the shapes of the layers that `quantised` rounds, by their names in a checkpoint."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    prefix = next((name for name, x in model.named_modules() if x is decoder), "")
    found = layers_to_round(decoder)
    return {f"{prefix}.{n}" if prefix else n: x.weight.shape for n, x in found.items()}


def _read(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - it is no dictionary
            yield key, opened.get_tensor(key)


def _packed(few: QuantisedWeight) -> dict[str, torch.Tensor]:
    """Return a layer's tensors as compressed-tensors names them."""
    few = few.in_rows()
    if few.codes.dtype == torch.float8_e4m3fn:
        return {"weight": few.codes, "weight_scale": few.scale}
    if few.bits == 4:  # words of eight codes, from their lowest bits on
        codes = unpack_nibbles(few.codes, few.depth)
        codes = pad(codes, (0, -few.depth % 8))
        packed = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        packed = pad(few.codes.view(torch.uint8) ^ 0x80, (0, -few.depth % 4))
    return {
        "weight_packed": packed.contiguous().view(torch.int32),
        "weight_scale": few.scale,
        "weight_shape": torch.tensor([len(few), few.depth]),
    }


def _scheme(few: QuantisedWeight, kind: str) -> dict[str, Any]:
    """Return how a layer is rounded, as compressed-tensors says it."""
    groups = few.scale.shape[1]
    return {
        "num_bits": few.bits,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if groups == 1 else "group",
        "group_size": None if groups == 1 else few.depth // groups,
    }


def _settings(schemes: dict[str, Any], ignored: list[str], kind: str) -> dict[str, Any]:
    """Return the `quantization_config` of a model."""
    by_scheme: list[tuple[dict[str, Any], list[str]]] = []
    for layer, scheme in schemes.items():
        names = next((names for known, names in by_scheme if known == scheme), None)
        if names is None:
            by_scheme.append((scheme, names := []))
        names.append(layer)
    groups = {
        f"group_{i}": {
            # Of layers that are alike the class says enough, which all readers understand.
            "targets": ["Linear"] if len(by_scheme) == 1 else sorted(names),
            "weights": scheme,
            "input_activations": None,
            "output_activations": None,
        }
        for i, (scheme, names) in enumerate(by_scheme)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())


def _copy_others(folder: Path, to: Path) -> None:
    """Copy what is no weight of the model's: its other files, and folders of drafters."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            if path.suffix not in _NOT_COPIED and path.name not in (_INDEX, "config.json"):
                shutil.copyfile(path, to / path.name)
        elif path.is_dir() and (path / "config.json").is_file():
            shutil.copytree(path, to / path.name)
