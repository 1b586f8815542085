"""Attention of prompts by an installed FlashAttention, where it is faster and seen to be right."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from specattn import flash_attention
from specattn.attention_plans import prompts_by
from specattn.kv_cache import KVCache, NewHeads
from specattn.reference.hybrid_tree_attention import hybrid_tree_attention

_PROBED = 70, 203  # rows and keys: no multiples of any tile
_STEPS = 4  # of the dtype at the largest value: two ways to sum differ by fewer


class _Kind(NamedTuple):
    """What FlashAttention compiles another kernel for, or reads otherwise."""

    dtype: torch.dtype
    device: torch.device
    heads: tuple[int, int]
    head_dim: int
    window: int | None
    softmax_scale: float
    softcap: float


class Prompts:
    """Attends from prompts by FlashAttention, whose first call of a kind is held against ours.

    One that fails or differs is retired for good, with one warning; our kernels serve then.
    """

    def __init__(self, name: str, library: ModuleType):
        self.name, self.library = name, library
        self.agree: dict[Hashable, bool] = {}

    def attend(
        self,
        cache: KVCache,
        new: NewHeads,
        counts: Sequence[int] | None,
        window: int | None,
        *,
        softmax_scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Store a layer's keys and values and attend: [B, T, Hq, D], of ragged rows [total, ..].

        Ragged are rows with `counts`. Every request that has any has as many tokens before them.
        None, and nothing is done, where this is not served.
        """
        q, length = new.q, new.rows.max_seqlen
        if sinks is not None or cache.stored is not None or cache.latent is not None:
            return None
        heads = q.shape[-2], new.k.shape[-2]
        kind = _Kind(q.dtype, q.device, heads, q.shape[-1], window, softmax_scale, softcap)
        if kind not in self.agree:
            self.agree[kind] = self._agrees(kind)
        if not self.agree[kind]:
            return None
        cache.write(new.layer, new.k, new.v, new.rows.slots)
        k, v = cache.layer(new.layer)
        how: Any = {"softmax_scale": softmax_scale, "window": window, "softcap": softcap}
        if counts is None:
            k, v = (x[:, :length] for x in (k, v))
            return flash_attention.chain(self.library, q, k, v, **how)
        parts, before = [], length - max(counts)
        for request, rows in enumerate(q.split(list(counts))):
            if len(rows):
                own = [x[request : request + 1, : before + len(rows)] for x in (k, v)]
                parts.append(flash_attention.chain(self.library, rows[None], *own, **how)[0])
        return torch.cat(parts)

    def _agrees(self, kind: _Kind) -> bool:
        """Whether it computes of random rows what the reference does; waits for both."""
        (rows, keys), (q_heads, kv_heads) = _PROBED, kind.heads
        generator = torch.Generator(kind.device).manual_seed(0)
        sizes = (1, rows, q_heads), (1, keys, kv_heads), (1, keys, kv_heads)
        q, k, v = (
            torch.randn(
                *size, kind.head_dim,
                generator=generator, device=kind.device, dtype=torch.float32,
            ).to(kind.dtype)
            for size in sizes
        )  # fmt: skip
        how: Any = {"softmax_scale": kind.softmax_scale, "window": kind.window}
        how["softcap"] = kind.softcap
        before = torch.full((1,), keys - rows, dtype=torch.int32, device=kind.device)
        behind = [x[:, keys - rows :].float() for x in (k, v)]
        expected, _ = hybrid_tree_attention(q.float(), k.float(), v.float(), before, *behind, **how)
        try:
            out = flash_attention.chain(self.library, q, k, v, **how).float()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a library says of a GPU that it was not built for
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return self._refused(kind, said)
        bound = _STEPS * torch.finfo(kind.dtype).eps * expected.abs().max()
        worst = (out - expected).abs().max()
        if worst <= bound:
            return True
        return self._refused(kind, f"differs by {worst.item():.1e} (at most {bound.item():.1e})")

    def _refused(self, kind: _Kind, why: str) -> bool:
        if all(self.agree.values()):
            of = f"head_dim {kind.head_dim}, window {kind.window}, softcap {kind.softcap}"
            warnings.warn(
                f"specattn: {self.name} of {of}: {why}; our own kernels read such prompts",
                stacklevel=2,
            )
        return False


@lru_cache(maxsize=64)
def prompts_of(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> Prompts | None:
    """Return what attends from prompts of such heads in place of our kernels, if it is faster."""
    if device.type != "cuda" or torch.version.hip or dtype not in (torch.float16, torch.bfloat16):
        return None
    found = {name: flash_attention.loaded(name) for name in flash_attention.MODULES}
    here = {name: one for name, one in found.items() if isinstance(one, ModuleType)}
    of = torch.cuda.get_device_properties(device)
    where = f"sm_{of.major}{of.minor}", of.multi_processor_count
    name = prompts_by(*where, heads, head_dim, tuple(here))
    return None if name is None else Prompts(name, here[name])
