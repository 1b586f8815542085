"""Checkpoints whose weights were published in 4 or 8 bits: read once, into our own layout.

transformers loads a model around them, on a CPU; its own quantizers would need other packages.
Which module has which tensors follows from the names in the files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specattn.decoding.model.quantised import QuantisedLinear
from specattn.quantised import QuantisedWeight, pack_nibbles

_OURS = "specattn"  # what transformers calls the quantizer below
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of eight neighbours lies

Tensors = dict[str, torch.Tensor]


class NotRead(ValueError):
    """A checkpoint stores its layers in a way that is not read here; the message says which."""


class Layout(NamedTuple):
    """How a method stores a linear layer: tensors by name, of which `first` is always there."""

    method: str
    bits: int
    first: str
    others: tuple[str, ...]
    read: Callable[[Tensors, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    """Returns codes and zero points, from 0 on, [N, K] and [N, groups], and scales between."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that a layer may have, but for its bias."""
        return (self.first, *self.others)


def layout_of(config: Any) -> Layout | None:
    """Return how a checkpoint of this configuration stores its layers, None of other methods.

    `NotRead` names what of a method is not read.
    """
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method"))
    if method == "gptq":
        return _gptq(settings)
    if method == "awq":
        return _awq(settings)
    if method in ("auto-round", "intel/auto-round"):
        return _auto_round(settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return _bitsandbytes()
    return None


def _expect(method: str, settings: Any, name: str, served: tuple[Any, ...], default: Any) -> Any:
    value = settings.get(name, default)
    if value not in served:
        wanted = " or ".join(map(repr, served))
        raise NotRead(f"{method} with {name}={value!r} is not read here, but with {wanted}")
    return value


def _gptq(settings: Any) -> Layout:
    bits = _expect("gptq", settings, "bits", (4, 8), None)
    form = _expect("gptq", settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    _expect("gptq", settings, "desc_act", (False,), False)
    shift = int(form == "gptq")  # what the first version takes from zero points

    def read(x: Tensors, bits: int) -> Any:
        codes = _unpacked(x["qweight"], bits, dim=0).t()
        zeros = _unpacked(x["qzeros"], bits, dim=1).t() + shift & (1 << bits) - 1
        order = x.get("g_idx")
        if order is not None:
            groups = torch.arange(codes.shape[1], device="cpu") // (
                codes.shape[1] // zeros.shape[1]
            )
            if not torch.equal(order.long(), groups):
                raise NotRead("its groups are not neighbours (act-order)")
        return codes, x["scales"].t(), zeros

    return Layout("gptq", bits, "qweight", ("qzeros", "scales", "g_idx"), read)


def _awq(settings: Any) -> Layout:
    bits = _expect("awq", settings, "bits", (4,), None)
    _expect("awq", settings, "version", ("gemm",), "gemm")

    def read(x: Tensors, bits: int) -> Any:
        codes, zeros = (_unpacked(x[n], bits, 1, _AWQ_ORDER).t() for n in ("qweight", "qzeros"))
        return codes, x["scales"].t(), zeros

    return Layout("awq", bits, "qweight", ("qzeros", "scales"), read)


def _auto_round(settings: Any) -> Layout:
    method, formats = "auto-round", {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
    packed = _expect(method, settings, "packing_format", tuple(formats), None)
    _expect(method, settings, "data_type", ("int",), "int")
    _expect(method, settings, "act_bits", (None, 16, 32), None)
    return formats[packed]({"bits": settings.get("bits")})._replace(method=method)


def _bitsandbytes() -> Layout:
    def read(x: Tensors, bits: int) -> Any:
        if int(x.get("weight_format", torch.tensor(0, device="cpu"))) != 0:
            raise NotRead("its codes do not lie in rows")
        return x["weight"].int() + 128, (x["SCB"].float() / 127)[:, None], None

    return Layout("bitsandbytes", 8, "SCB", ("weight", "weight_format"), read)


def _compressed_tensors(settings: Any) -> Layout:
    method = "compressed-tensors"
    _expect(method, settings, "format", ("pack-quantized",), None)
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise NotRead(f"{method} with {len(groups)} groups of layers is not read, but one")
    _expect(method, groups[0], "input_activations", (None,), None)
    weights = groups[0].get("weights") or {}
    bits = _expect(method, weights, "num_bits", (4, 8), None)
    _expect(method, weights, "type", ("int",), "int")
    _expect(method, weights, "strategy", ("group", "channel"), None)
    _expect(method, weights, "actorder", (None, "weight", "static"), None)

    def read(x: Tensors, bits: int) -> Any:
        codes = _unpacked(x["weight_packed"], bits, dim=1)[:, : int(x["weight_shape"][1])]
        zeros = x.get("weight_zero_point")
        if zeros is not None:
            zeros = _unpacked(zeros, bits, dim=0)[: len(codes)]
        return codes, x["weight_scale"], zeros

    others = ("weight_scale", "weight_zero_point", "weight_shape")
    return Layout(method, bits, "weight_packed", others, read)


def _unpacked(
    words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return what words of 32 bits hold along a dimension, in order from their lowest bits on."""
    places = torch.tensor(order or range(32 // bits), device="cpu")
    parts = words.movedim(dim, -1)[..., None] >> places * bits & (1 << bits) - 1
    return parts.flatten(-2).movedim(-1, dim)


class _Stored(nn.Module):
    """A layer as its checkpoint has it, until it is read."""

    def __init__(self, tensors: Tensors, bias: torch.Tensor | None):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = bias


def _read(layout: Layout, module: _Stored, depth: int, rows: int) -> QuantisedLinear:
    """Return a layer in our own layout; raises NotRead, KeyError, RuntimeError."""
    codes, scale, zeros = layout.read(dict(module.named_buffers()), layout.bits)
    middle = 1 << layout.bits - 1
    if codes.shape != (rows, depth) or scale.shape[0] != rows or depth % scale.shape[1]:
        found = f"{list(codes.shape)} and scales {list(scale.shape)}"
        raise NotRead(f"expected codes [{rows}, {depth}] and their scales, got {found}")
    size = depth // scale.shape[1]
    if scale.shape[1] > 1 and size not in (32, 64) and size % 128:
        raise NotRead(f"groups of {size} are not served, but of 32, 64 and multiples of 128")
    if zeros is not None and zeros.shape != scale.shape:
        raise NotRead(f"expected zero points {list(scale.shape)}, got {list(zeros.shape)}")
    if not scale.isfinite().all():
        raise NotRead("some scales are not finite")
    if zeros is not None and (zeros == middle).all():
        zeros = None
    if layout.bits == 4:
        packed, kind, below = pack_nibbles(codes), torch.uint8, 0
    else:
        packed, kind, below = (codes - middle).to(torch.int8).contiguous(), torch.int8, middle
    if zeros is not None:
        zeros = (zeros - below).to(kind).contiguous()
    few = QuantisedWeight(packed, scale.contiguous(), zeros, depth)
    return QuantisedLinear(few, module.bias).eval()


@register_quantization_config(_OURS)
class _Config(QuantizationConfigMixin):
    """Names the quantizer, and hands it a layout and the folder."""

    def __init__(self, layout: Layout, folder: Path, **_: Any):
        self.quant_method: Any = _OURS
        self.layout, self.folder = layout, folder

    @classmethod
    def from_dict(cls, config_dict: Any, *_: Any, **__: Any) -> Any:
        return cls(**config_dict)


def as_ours(layout: Layout, folder: Path | str) -> dict[str, Any]:
    """Return the `quantization_config` with which transformers leaves layers to us."""
    return {"quant_method": _OURS, "layout": layout, "folder": Path(folder)}


@register_quantizer(_OURS)
class _Quantizer(HfQuantizer):
    """Puts modules of a checkpoint's own tensors into a model, and ours in their place."""

    quantization_config: Any

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        layout, folder = self.quantization_config.layout, self.quantization_config.folder
        self._sizes: dict[str, tuple[int, int]] = {}
        for name, tensors in _layers(layout, folder).items():
            try:
                module: Any = model.get_submodule(name)
            except AttributeError:
                module = None
            if type(module) is not nn.Linear:
                raise NotRead(f"{name} is of {layout.method}, and no linear layer of the model")
            self._sizes[name] = module.in_features, module.out_features
            model.set_submodule(name, _Stored(tensors, module.bias))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for name, sizes in self._sizes.items():
            stored: Any = model.get_submodule(name)
            try:
                model.set_submodule(name, _read(self.quantization_config.layout, stored, *sizes))
            except (KeyError, RuntimeError, NotRead) as error:
                reason = f"it lacks {error}" if isinstance(error, KeyError) else error
                raise NotRead(f"{name}: {reason}") from None
        self.remove_quantization_config(model)


def _layers(layout: Layout, folder: Path) -> dict[str, Tensors]:
    """Return the tensors of every layer, without their numbers."""
    found: dict[str, Tensors] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dictionary
                layer, _, name = key.rpartition(".")
                if name in layout.names:
                    like = opened.get_tensor(key)
                    found.setdefault(layer, {})[name] = like.to("meta")
    return {layer: tensors for layer, tensors in found.items() if layout.first in tensors}
