"""Repeats what a weight reads and writes, so that it computes what it did before.

Every channel, neuron and head becomes so many copies beside each other. A weight that reads copies
takes a share of each; one that writes copies is repeated. RMSNorm of repeated channels is that of
the channels, and attention of repeated heads that of the heads.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from specattn.widening.multiples import Multiples, shares

# By module, what its outputs are, then its inputs: (h)idden channels, (m)LP neurons, (q)uery or
# (k)ey and value heads, (a)ll heads: queries, then keys and values. A point is never repeated.
_SIDES = {
    "lm_head": ".h",
    "q_proj": "qh",
    "k_proj": "kh",
    "v_proj": "kh",
    "kv_proj": "kh",
    "qkv_proj": "ah",
    "o_proj": "hq",
    "gate_proj": "mh",
    "up_proj": "mh",
    "gate_up_proj": "mh",
    "down_proj": "hm",
    "fc": "hh",
    "linears": "hh",
    "q_norm": ".",
    "k_norm": ".",
}
_EMBEDDING = "embed_tokens"


def head_dim(config: Any) -> int:
    """Return the width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def widened_config(config: Any, times: Multiples) -> Any:
    """Return the configuration of a model or drafter that is widened; ValueError if none can be.

    A target's head becomes a table of its own: it takes shares of what the embedding repeats.
    """
    wide = copy.deepcopy(config)
    wide.hidden_size *= times.hidden
    if hasattr(config, "num_attention_heads"):
        wide.head_dim = head_dim(config)
        wide.intermediate_size *= times.intermediate
        wide.num_attention_heads *= times.q_heads
        wide.num_key_value_heads *= times.kv_heads
        if wide.num_attention_heads % wide.num_key_value_heads:
            raise ValueError(
                f"{config.num_attention_heads} query heads times {times.q_heads} cannot share "
                f"{config.num_key_value_heads} KV heads times {times.kv_heads}"
            )
    if hasattr(config, "num_hidden_layers"):
        wide.num_hidden_layers = times.layers
        wide.tie_word_embeddings = config.tie_word_embeddings and times.hidden == 1
        if getattr(config, "layer_types", None):
            wide.layer_types = ["full_attention"] * times.layers
    return wide


def widened(name: str, weight: torch.Tensor, config: Any, times: Multiples) -> torch.Tensor:
    """Return the weight of that name, widened, of a model or drafter of this `config`.

    Raises ValueError where nothing is known of the name.
    """
    module = next(part for part in reversed(name.split(".")[:-1]) if not part.isdigit())
    if module == _EMBEDDING:  # a table of what tokens write
        return _repeated(weight, 1, times.hidden)
    sides = _SIDES.get(module, "h" if module.endswith("norm") else None)
    if sides is None:
        raise ValueError(f"how its {name} is widened is not known")
    width = head_dim(config) if set(sides) & set("qka") else 1
    if sides[0] == "a":
        q_rows = config.num_attention_heads * width
        queries, others = weight[:q_rows], weight[q_rows:]
        parts = [
            _repeated(queries, 0, times.q_heads, width),
            _repeated(others, 0, times.kv_heads, width),
        ]
        weight = torch.cat(parts)
    kinds = {
        "h": (times.hidden, 1),
        "m": (times.intermediate, 1),
        "q": (times.q_heads, width),
        "k": (times.kv_heads, width),
    }
    if sides[0] in kinds:
        weight = _repeated(weight, 0, *kinds[sides[0]])
    if weight.dim() > 1:
        weight = _repeated(weight, 1, *kinds[sides[1]], shared=True)
    return weight


def _repeated(
    weight: torch.Tensor, dim: int, times: int, width: int = 1, *, shared: bool = False
) -> torch.Tensor:
    """Return `times` copies of each `width` entries of a side, beside each other, or shares."""
    if times == 1:
        return weight
    weight = weight.unflatten(dim, (-1, 1, width))
    factors = torch.tensor(shares(times) if shared else [1.0] * times, dtype=weight.dtype)
    factors = factors.view(times, *[1] * (weight.dim() - dim - 2))
    return (weight * factors).flatten(dim, dim + 2)
