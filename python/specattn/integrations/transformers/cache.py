"""A cache for transformers that grows in place.

transformers' own `DynamicCache` concatenates: for every token it copies all keys and values that it
holds, which at long contexts costs several times what attention does. Here a layer's tensors are
views of memory with room behind them, laid out as the CPU kernels read best: the heads of a token
side by side. Everything else is `DynamicCache`: cropping, beams, assisted generation, windows.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM = 256  # tokens; memory that is not written to yet costs nothing on a CPU
_ROOM = 4  # room for one token more in so many that are held


class Cache(DynamicCache):
    """Keys and values of a generation, to be given to `generate` as ``past_key_values``.

    Layers with a sliding window, and other kinds, are transformers' own.

    Parameters
    ----------
    config : PreTrainedConfig, optional
        The model's, which says which layers have a window and so keep no more than that. Without
        it all layers keep everything.

    Examples
    --------
    >>> import torch
    >>> from specattn.integrations.transformers import Cache
    >>> cache = Cache()
    >>> k, v = torch.randn(2, 1, 2, 5, 16)
    >>> keys, values = cache.update(k, v, layer_idx=0)
    >>> keys.shape, cache.get_seq_length()
    (torch.Size([1, 2, 5, 16]), 5)
    """

    def __init__(self, config: PreTrainedConfig | None = None):
        super().__init__(config=config)
        self.layers = [
            GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers
        ]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = GrowingLayer


class GrowingLayer(DynamicLayer):
    """A layer of `Cache`."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Begin anew, in new memory: views of the former may still be in use."""
        super().lazy_initialization(key_states, value_states)
        self._rooms: list[torch.Tensor | None] = [None, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, Hk, T, D], and return all."""
        new = key_states, value_states
        if torch.is_grad_enabled() and any(x.requires_grad for x in new):
            return super().update(*new, *args, **kwargs)  # what is written over has no gradient
        if not self.is_initialized:
            self.lazy_initialization(*new)
        self._rooms[0], self.keys = _appended(self._rooms[0], self.keys, key_states)
        self._rooms[1], self.values = _appended(self._rooms[1], self.values, value_states)
        return self.keys, self.values


def _appended(
    room: torch.Tensor | None, held: torch.Tensor | None, new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory [B, capacity, Hk, D], and the view of it that holds `held` and then `new`.

    `held` stays where it is if it lies at the start of `room` and there is space behind it.
    """
    batch, heads, count, dim = new.shape
    if held is None or held.dim() != 4:  # nothing yet
        held = new[:, :, :0]
    before = held.shape[2]
    after = before + count
    if room is None or after > room.shape[1] or not _at_head(held, room, batch) or _sealed(room):
        room = new.new_empty(batch, after + max(_LEAST_ROOM, after // _ROOM), heads, dim)
        room[:, :before] = held.transpose(1, 2)
    room[:, before:after] = new.transpose(1, 2)
    return room, room[:, :after].transpose(1, 2)


def _sealed(room: torch.Tensor) -> bool:
    """Whether torch lets nobody write to memory now, since it was made in inference mode."""
    return room.is_inference() and not torch.is_inference_mode_enabled()


def _at_head(held: torch.Tensor, room: torch.Tensor, batch: int) -> bool:
    """Whether a view [B, Hk, n, D] is what `_appended` returned, maybe cropped."""
    return (
        held.data_ptr() == room.data_ptr()
        and held.shape[0] == room.shape[0] == batch
        and held.transpose(1, 2).stride() == room.stride()
    )
