"""The target's features of rows of text, computed on the fly or kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from specattn.files import write_atomically

_STATEMENT = "features.json"


@torch.no_grad()
def features_of(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Return what the head of `model` reads: [B, L, H] for rows of text [B, L]."""
    return model.base_model(input_ids, use_cache=False).last_hidden_state


@torch.no_grad()
def layer_features(
    model: PreTrainedModel, input_ids: torch.Tensor, layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual stream behind so many layers, side by side, and what the head reads.

    [B, L, layers * H] and [B, L, H] for rows of text [B, L]; a layer may be named twice.
    """
    taken: dict[int, torch.Tensor] = {}

    def keeping(number: int) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            taken[number] = output[0] if isinstance(output, tuple) else output

        return keep

    own = cast(Any, model.base_model).layers
    hooks = [own[n - 1].register_forward_hook(keeping(n)) for n in set(layers)]
    try:
        read = features_of(model, input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([taken[n] for n in layers], -1), read


class FeatureCache:
    """A folder with the features of every row that was requested, a safetensors file for each.

    A row's file is named after its tokens, so it serves every epoch, order and run that meets the
    same row; rows that were not met are computed and added. A file appears whole or not at all: a
    run may be killed at any time, and several may share the folder.

    Parameters
    ----------
    folder : path
        Created if missing.
    model : PreTrainedModel
        The target. It shares the folder with no other.

    Raises
    ------
    ValueError
        The folder holds features of another model, or something else.
    """

    def __init__(self, folder: Path | str, model: PreTrainedModel):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        statement = {"model": _fingerprint(model), "dtype": str(model.dtype)}
        path = self.folder / _STATEMENT
        if path.exists():
            if json.loads(path.read_text(encoding="utf-8")) != statement:
                raise ValueError(f"{self.folder} holds the features of another target")
        elif any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty and has no {_STATEMENT}")
        else:
            text = json.dumps(statement)
            write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))

    def __call__(self, model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the features [B, L, H] of rows [B, L], computing those that are not there."""
        paths = [self._path(row) for row in input_ids.cpu()]
        missing = [row for row, path in enumerate(paths) if not path.exists()]
        if missing:
            for row, features in zip(missing, features_of(model, input_ids[missing]), strict=True):
                held = {"features": features.to(model.dtype).cpu().contiguous()}
                paths[row].parent.mkdir(exist_ok=True)
                write_atomically(paths[row], partial(save_file, held))
        rows = [load_file(path)["features"] for path in paths]
        return torch.stack(rows).to(input_ids.device)

    def _path(self, row: torch.Tensor) -> Path:
        name = hashlib.sha256(row.to(torch.int64).numpy().tobytes()).hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.safetensors"


def _fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of a few numbers of every weight, to distinguish models."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        few = weight.flatten()[:: max(1, weight.numel() // 16)][:16].float().cpu()
        digest.update(f"{name} {list(weight.shape)}".encode() + few.numpy().tobytes())
    return digest.hexdigest()
