"""Checkpoints whose weights were published in 4 or 8 bits: read once, into our own layout.

transformers loads a model around them, on a CPU; its own quantizers would need other packages.
Which module has which tensors follows from the names in the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specattn.decoding.model.quantised import QuantisedLinear
from specattn.quantised import QuantisedWeight, pack_nibbles
from specattn.reference._codes import BLOCK

_OURS = "specattn"  # what transformers calls the quantizer below
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of eight neighbours lies

Tensors = dict[str, torch.Tensor]


class NotRead(ValueError):
    """A checkpoint stores its layers in a way that is not read here; the message says which."""


class Layout(NamedTuple):
    """How a method stores a linear layer: tensors by name, of which one of `first` is there."""

    method: str
    bits: int
    first: tuple[str, ...]
    others: tuple[str, ...]
    read: Callable[[Tensors, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    """Returns codes and zero points, from 0 on, [N, K] and [N, groups], and scales between.

    Codes may be floats of 8 bits, which have no zero points.
    """
    activations: str | None = None
    """How the checkpoint wants activations rounded to 8 bits, which is not done here."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that a layer may have, but for its bias."""
        return (*self.first, *self.others)


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
    if method == "fp8":
        return _float8(settings)
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

    return Layout("gptq", bits, ("qweight",), ("qzeros", "scales", "g_idx"), read)


def _awq(settings: Any) -> Layout:
    bits = _expect("awq", settings, "bits", (4,), None)
    _expect("awq", settings, "version", ("gemm",), "gemm")

    def read(x: Tensors, bits: int) -> Any:
        codes, zeros = (_unpacked(x[n], bits, 1, _AWQ_ORDER).t() for n in ("qweight", "qzeros"))
        return codes, x["scales"].t(), zeros

    return Layout("awq", bits, ("qweight",), ("qzeros", "scales"), read)


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

    return Layout("bitsandbytes", 8, ("SCB",), ("weight", "weight_format"), read)


def _compressed_tensors(settings: Any) -> Layout:
    method = "compressed-tensors"
    asked = None
    stored = _expect(method, settings, "format", ("pack-quantized", "float-quantized"), None)
    groups = list((settings.get("config_groups") or {}).values())
    kinds = [group.get("weights") or {} for group in groups]
    sizes = {(x.get("num_bits"), str(x.get("block_structure"))) for x in kinds}
    if len(sizes) != 1:
        raise NotRead(f"{method} with {len(sizes)} groups of layers is not read, but alike ones")
    for group, weights in zip(groups, kinds, strict=True):
        rounded = group.get("input_activations") or {}
        if stored == "float-quantized":
            _expect(method, weights, "num_bits", (8,), None)
            _expect(method, weights, "type", ("float",), None)
            _expect(method, weights, "strategy", ("tensor", "channel", "block"), None)
            # Rounding to 8 bits makes products faster elsewhere; here rows keep theirs.
            _expect(f"{method} of activations", rounded, "type", ("float",), "float")
            _expect(f"{method} of activations", rounded, "num_bits", (8,), 8)
            if rounded:
                when = "dynamic" if rounded.get("dynamic") else "static"
                asked = f"{when} scales, strategy={rounded.get('strategy')!r}"
            continue
        _expect(method, group, "input_activations", (None,), None)
        _expect(method, weights, "num_bits", (4, 8), None)
        _expect(method, weights, "type", ("int",), "int")
        _expect(method, weights, "strategy", ("group", "channel"), None)
        _expect(method, weights, "actorder", (None, "weight", "static"), None)
    if stored == "float-quantized":
        return _of_floats(method, kinds[0].get("block_structure"), asked)

    def read(x: Tensors, bits: int) -> Any:
        codes = _unpacked(x["weight_packed"], bits, dim=1)[:, : int(x["weight_shape"][1])]
        zeros = x.get("weight_zero_point")
        if zeros is not None:
            zeros = _unpacked(zeros, bits, dim=0)[: len(codes)]
        return codes, x["weight_scale"], zeros

    others = ("weight_scale", "weight_zero_point", "weight_shape")
    return Layout(method, kinds[0]["num_bits"], ("weight_packed",), others, read)


def _float8(settings: Any) -> Layout:
    method = "fp8"
    _expect(method, settings, "fmt", ("e4m3",), "e4m3")
    scheme = _expect(method, settings, "activation_scheme", ("dynamic", "static"), "dynamic")
    return _of_floats(method, settings.get("weight_block_size"), f"{scheme} scales")


def _of_floats(method: str, block: Any, activations: str | None) -> Layout:
    """Return the layout of floats of 8 bits with a scale for each `block`, row or tensor."""
    if block is not None and (len(block) != 2 or block[1] != BLOCK):
        raise NotRead(
            f"{method} with scales for {block} weights is not read, but for [.., {BLOCK}]"
        )

    def read(x: Tensors, bits: int) -> Any:
        codes = x["weight"]
        scale = x["weight_scale_inv"] if "weight_scale_inv" in x else x["weight_scale"]
        if scale.dtype == torch.uint8:  # powers of two
            scale = scale.view(torch.float8_e8m0fnu)
        if scale.dtype.itemsize == 1:
            scale = scale.float()
        if block is None:
            if scale.numel() not in (1, len(codes)):
                raise NotRead(f"expected 1 or {len(codes)} scales, got {list(scale.shape)}")
            return codes, scale.reshape(-1, 1).expand(len(codes), 1), None
        expected = [-(-size // each) for size, each in zip(codes.shape, block, strict=True)]
        if list(scale.shape) != expected:
            raise NotRead(f"expected scales {expected}, got {list(scale.shape)}")
        return codes, scale.repeat_interleave(block[0], 0)[: len(codes)], None

    first = "weight_scale_inv", "weight_scale"
    others = "weight", "input_scale", "activation_scale"
    return Layout(method, 8, first, others, read, activations)


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
    grouped = scale.dim() == 2 and len(scale) == rows and scale.shape[1] > 0
    if codes.shape != (rows, depth) or not grouped:
        found = f"{list(codes.shape)} and scales {list(scale.shape)}"
        raise NotRead(f"expected codes [{rows}, {depth}] and scales [{rows}, groups], got {found}")
    if count := int((~scale.isfinite()).sum()):
        raise NotRead(f"{count} of {scale.numel()} scales are not finite")
    few = (
        _floats(codes, scale)
        if codes.is_floating_point()
        else _integers(layout, codes, scale, zeros)
    )
    return QuantisedLinear(few, module.bias).eval()


def _floats(codes: torch.Tensor, scale: torch.Tensor) -> QuantisedWeight:
    if codes.dtype != torch.float8_e4m3fn:
        raise NotRead(f"expected weights of torch.float8_e4m3fn, got {codes.dtype}")
    if count := int(codes.isnan().sum()):
        raise NotRead(f"{count} of its {codes.numel()} weights are not numbers")
    some = codes.view(torch.int8) & 0x7F != 0
    _check_zero_scales(scale, _of_groups(some, scale.shape[1], BLOCK))
    return QuantisedWeight(codes, scale.contiguous(), None, codes.shape[1])


def _integers(layout: Layout, codes: Any, scale: Any, zeros: Any) -> QuantisedWeight:
    depth, middle = codes.shape[1], 1 << layout.bits - 1
    groups = scale.shape[1]
    size = depth // groups
    if depth % groups:
        raise NotRead(f"{groups} scales of a row do not divide its {depth} codes")
    if groups > 1 and size not in (32, 64) and size % BLOCK:
        raise NotRead(f"groups of {size} are not served, but of 32, 64 and multiples of {BLOCK}")
    if zeros is not None and zeros.shape != scale.shape:
        raise NotRead(f"expected zero points {list(scale.shape)}, got {list(zeros.shape)}")
    meaning = middle if zeros is None else zeros.repeat_interleave(size, 1)
    _check_zero_scales(scale, _of_groups(codes != meaning, groups, size))
    if zeros is not None and (zeros == middle).all():
        zeros = None
    if layout.bits == 4:
        packed, kind, below = pack_nibbles(codes), torch.uint8, 0
    else:
        packed, kind, below = (codes - middle).to(torch.int8).contiguous(), torch.int8, middle
    if zeros is not None:
        zeros = (zeros - below).to(kind).contiguous()
    return QuantisedWeight(packed, scale.contiguous(), zeros, depth)


def _of_groups(some: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """Return of which groups [N, groups] any of [N, K] is true."""
    if groups == 1:
        return some.any(1, keepdim=True)
    return pad(some, (0, groups * size - some.shape[1])).unflatten(1, (groups, size)).any(-1)


def _check_zero_scales(scale: torch.Tensor, some: torch.Tensor) -> None:
    """Raise NotRead where the scale of a group with `some` weight is 0; of zeros it may be."""
    if count := int(((scale == 0) & some).sum()):
        raise NotRead(f"{count} of {scale.numel()} scales are 0, of weights that are not")


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


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads a folder's weights from."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({folder / name for name in names})
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _layers(layout: Layout, folder: Path) -> dict[str, Tensors]:
    """Return the tensors of every layer, without their numbers."""
    found: dict[str, Tensors] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dictionary
                layer, _, name = key.rpartition(".")
                if name not in layout.names:
                    if (kind := opened.get_slice(key).get_dtype()).startswith("F8"):
                        raise NotRead(f"{key} of {kind} is no weight of a linear layer")
                else:
                    like = opened.get_tensor(key)
                    found.setdefault(layer, {})[name] = like.to("meta")

    def coded(tensors: Tensors) -> bool:  # where a scale is missing, too
        weight = tensors.get("weight")
        of_bytes = weight is not None and weight.dtype.itemsize == 1
        return of_bytes or any(name in tensors for name in layout.first)

    return {layer: tensors for layer, tensors in found.items() if coded(tensors)}
