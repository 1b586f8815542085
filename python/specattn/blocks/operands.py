"""What operators of blocks take, and how it is read of a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from specattn.quantised import QuantisedWeight


class Unrecognised(ValueError):
    """A model does something of which its parts say nothing; the message says what."""


class Projection(NamedTuple):
    """``x @ weight.T + bias``: weight [N, K], a tensor or of codes, bias [N] or None."""

    weight: Any
    bias: torch.Tensor | None


class Norm(NamedTuple):
    """``x / sqrt(mean(x**2) + eps) * weight``: weight [H]."""

    weight: torch.Tensor
    eps: float


class Rotation(Protocol):
    """Where rows stand in their texts, and so how their heads are rotated."""

    def cos_sin(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [B or 1, T, 1, half of what turns]."""


class Rotated(NamedTuple):
    """A rotation that was computed before: cosines and sines [B or 1, T, 1, half]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def cos_sin(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return them as they are."""
        return self.cos, self.sin

    def part(self, start: int, x: torch.Tensor) -> Rotated:
        """Return what belongs to rows x [B, T, H] from `start` on, in their dtype."""
        return Rotated(*(one[:, start : start + x.shape[1]].to(x.dtype) for one in self))


class Place(NamedTuple):
    """A rotation by tables.

    `cos` and `sin`, float32 [positions, half of what turns]; `prefix`, int32 [B], is the position
    of the first row, `depths`, int32 [B or 1, T], how far behind it the rows lie: None, one by one.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    prefix: torch.Tensor
    depths: torch.Tensor | None = None

    def cos_sin(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the positions of the rows, which must be known: `depths` are given."""
        assert self.depths is not None
        positions = self.prefix[:, None] + self.depths
        return self.cos[positions][:, :, None].to(dtype), self.sin[positions][:, :, None].to(dtype)


class Drawing(NamedTuple):
    """How tokens are drawn from logits: the largest, of those over a temperature plus noise.

    `places`, int64 [2, B], are rows and lengths of texts, from which noise follows, as does from
    `seed`, int64 [1]: None, greedily. `temperatures` are float32 [B] or None. Before, `processors`
    shape float32 logits [B, V], each as ``processor(None, logits)``; `key` says what they do.
    """

    places: torch.Tensor
    seed: torch.Tensor | None = None
    temperatures: torch.Tensor | None = None
    processors: tuple[Callable[..., Any], ...] = ()
    key: Hashable = ()

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What changes from draft to draft."""
        named = {name: getattr(self, name) for name in ("places", "seed", "temperatures")}
        return {name: x for name, x in named.items() if x is not None}

    def of(self, inputs: dict[str, torch.Tensor]) -> Drawing:
        """Return the same by other `inputs`."""
        seed, temperatures = inputs.get("seed"), inputs.get("temperatures")
        return Drawing(inputs["places"], seed, temperatures, self.processors, self.key)


Pair = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Of keys and of values."""


class Store(NamedTuple):
    """Where new keys and values go: memory [2, B, tokens, Hk, D], from a slot or their position.

    One of 8 bits has scales [2, B, tokens, Hk] beside it, of which rows choose theirs.
    """

    memory: Pair
    slot: int | None = None
    scales: Pair | tuple[None, None] = (None, None)


def whole(weight: torch.Tensor | QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return weights as they are, or those of codes in a dtype."""
    return weight.dequantised(dtype) if isinstance(weight, QuantisedWeight) else weight


def projection(module: Any) -> Projection:
    """Return the weight and bias of a linear module."""
    return Projection(module.weight, module.bias)


def halves(module: nn.Linear) -> tuple[Projection, Projection]:
    """Return the two layers that lie side by side in a linear module without bias."""
    first, second = module.weight.chunk(2)
    return Projection(first, None), Projection(second, None)


def norm_of(module: Any) -> Any:
    """Return the weight and epsilon of a norm, None where there is none."""
    return None if module is None else Norm(module.weight, float(module.eps))


def embedding_scale(embedding: Any) -> float:
    """Return what an embedding's vectors are multiplied with; raises `Unrecognised`."""
    name = type(embedding).__name__
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        raise Unrecognised(f"the embedding is a {name}")
    if type(embedding) is nn.Embedding:
        return 1.0
    if not name.endswith("ScaledWordEmbedding"):
        raise Unrecognised(f"the embedding is a {name}")
    scale: Any = embedding.embed_scale.to(embedding.weight.dtype)
    return float(scale)


def angle_tables(
    rotary: Any, like: torch.Tensor, positions: int, *kind: str, longest: int | None = None
) -> tuple[Any, Any]:
    """Return cosines and sines of a rotary module by position, float32 [positions, half].

    Positions behind the `longest` text, if that is given, are turned as its last one.
    """
    at = torch.arange(max(positions, 2), device=like.device)[None]
    if longest is not None:
        at = at.clamp_max(max(longest, 2) - 1)
    with torch.no_grad():
        angles = rotary(like, at, *kind)
    if isinstance(angles, torch.Tensor):  # DeepSeek V2: a complex number for each
        return angles[0].real.contiguous(), angles[0].imag.contiguous()
    cos, sin = (x[0].float() for x in angles)
    half = cos.shape[-1] // 2
    if not cos[:, :half].equal(cos[:, half:]):  # most modules say every angle twice
        half = cos.shape[-1]
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()
