"""Loading a causal model whose weights are all there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file

from specattn.decoding.model.families import check_supported
from specattn.decoding.model.published import NotRead, as_ours, layout_of
from specattn.decoding.model.quantised import DEVICES
from specattn.decoding.model.text_model import text_model

_NAMED = 5  # tensors that one line has room for


def load_causal_model(
    folder: Path | str,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    *,
    tensor_parallel: int = 1,
) -> PreTrainedModel:
    """Return the folder's model, from safetensors alone, ready to decode.

    With `tensor_parallel` it is divided over so many ranks by transformers' own plan: of more
    ranks, each so many that follow one another hold it once. transformers picks their devices.

    transformers fills what a checkpoint lacks with random numbers; here ValueError says what is not
    all there, not supported, not divisible, or needs a package that reads quantised weights. Those
    of 4 and 8 bits that `published` knows are read here, for a CPU or a GPU of CUDA.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_supported(config)
    where: dict[str, Any] = {}
    if tensor_parallel > 1:
        where["distributed_config"] = _divided(tensor_parallel)
    ours = torch.device(device).type in DEVICES and tensor_parallel == 1
    with _naming(folder):
        layout = layout_of(config) if ours else None
    if layout is not None:
        if layout.activations is not None:
            asked = f"{layout.method} of {folder} asks for activations of 8 bits"
            warnings.warn(
                f"{asked} ({layout.activations}): here they keep their type", stacklevel=2
            )
        config.quantization_config = as_ours(layout, folder)
        where["config"] = config
    with _naming(folder):
        loaded: Any = _class_for(config).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported just below, with their names
            output_loading_info=True,
            **where,
        )
    model, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if keys := sorted(map(str, report[kind])):
            names = ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
            raise ValueError(
                f"the weights in {folder} do not fit its config.json: "
                f"{len(keys)} {kind.replace('_', ' ')}: {names}"
            )
    if tensor_parallel == 1:
        model = model.to(device=device)
    elif model.device.type != torch.device(device).type:
        raise ValueError(f"ranks here hold their parts on {model.device.type}, not on {device}")
    return text_model(model.eval())


def empty_model(folder: Path | str) -> PreTrainedModel:
    """Return the model that a folder's weights belong to, without any; ValueError as above."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_supported(config)
    with torch.device("meta"):
        made: PreTrainedModel = _class_for(config).from_config(config)
    return made


def _class_for(config: Any) -> Any:
    """Return the class of transformers that makes models of a configuration."""
    reads_text_alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if reads_text_alone else AutoModelForImageTextToText


def folder_of(model: PreTrainedModel) -> Path:
    """Return the folder that a model was loaded from: of a name on the Hub, its local copy."""
    name = str(model.config._name_or_path)
    if not Path(name).is_dir():
        with suppress(OSError):
            return Path(cast(str, cached_file(name, "config.json", local_files_only=True))).parent
    return Path(name)


def check_ends(stop_strings: Any, tokens: dict[str, Any]) -> None:
    """Check what a checkpoint says of where texts end: transformers takes whatever it holds."""
    for name, value in tokens.items():
        several = value if isinstance(value, list) else [0 if value is None else value]
        if not all(type(one) is int and abs(one) < 2**63 for one in several):
            raise ValueError(f"{name}: expected token ids, got {value!r}")
    several = stop_strings if isinstance(stop_strings, list) else [stop_strings or ""]
    if not all(isinstance(one, str) for one in several):
        raise ValueError(f"stop_strings: expected strings, got {stop_strings!r}")


@contextmanager
def _naming(folder: Path | str) -> Iterator[None]:
    """Say of errors which folder's weights they are about."""
    try:
        yield
    except ImportError as error:  # of what decodes quantised weights
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"the weights in {folder} cannot be loaded: {lines[0]}") from None
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
    except NotRead as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None


class _Divided(DistributedConfig):
    """A model divided over some of the ranks, and again over others: they run the same texts.

    transformers' data parallelism, which means other texts, would divide the copies' weights too.
    """

    @property
    def dp_size(self) -> int:
        return 1


def _divided(parts: int) -> DistributedConfig:
    if not dist.is_initialized():
        raise ValueError(f"{parts} parts of a model need {parts} ranks of torch.distributed")
    ranks = dist.get_world_size()
    if ranks % parts:
        raise ValueError(f"{ranks} ranks cannot hold {parts} parts of a model equally often")
    return _Divided(tp_plan="auto", tp_size=parts, dp_replicate_size=ranks // parts)
