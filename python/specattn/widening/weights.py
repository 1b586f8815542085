"""Repeats what a weight reads and writes, so that it computes what it did before.

Every channel, neuron and head becomes so many copies beside each other. A weight that reads copies
takes a share of each; one that writes copies is repeated. RMSNorm of repeated channels is that of
the channels, attention of repeated heads that of the heads, and what a repeated state says that
of the state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from specattn.widening.multiples import Multiples, shares

# By module, what its outputs are, then its inputs: (h)idden channels, (m)LP neurons, (q)uery or
# (k)ey and value heads, (a)ll heads: queries, then keys and values. Of (s)tates what each has,
# its values or a number, and (c)onvolved channels of queries and keys, then values. A point is
# never repeated.
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
    "eh_proj": "hh",
    "linears": "hh",
    "q_norm": ".",
    "k_norm": ".",
}
_OF_STATE = {
    "in_proj_qkv": "ch",
    "in_proj_z": "sh",
    "in_proj_a": "sh",
    "in_proj_b": "sh",
    "conv1d": "c.",
    "A_log": "s",
    "dt_bias": "s",
    "norm": ".",
    "out_proj": "hs",
}
_EMBEDDING = "embed_tokens"
_ATTENDS, _KEEPS_STATE = "full_attention", "linear_attention"


def head_dim(config: Any) -> int:
    """Return the width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def placed(config: Any, times: Multiples) -> list[tuple[int, bool]]:
    """Return of each widened layer which one of the source it is like, and whether it is that one.

    Layers of the source are spread evenly and end with its last, whose cache LongSpec reads, each
    where a layer of its kind is. Raises ValueError where there is no such place.
    """
    own = config.num_hidden_layers
    if times.layers == own:
        return [(n, True) for n in range(own)]
    kinds: Sequence[str] = getattr(config, "layer_types", None) or [_ATTENDS] * own
    wide = [_KEEPS_STATE] * times.layers
    wide[times.attends_every - 1 :: times.attends_every] = [_ATTENDS] * (
        times.layers // times.attends_every
    )
    like = {kind: [n for n in range(own) if kinds[n] == kind] for kind in set(kinds)}
    found = [(like[kind][n % len(like[kind])], False) for n, kind in enumerate(wide)]
    room = times.layers
    for n in reversed(range(own)):
        last = min(room, (n + 1) * times.layers // own) - 1
        room = next((place for place in range(last, -1, -1) if wide[place] == kinds[n]), -1)
        if room < 0:
            raise ValueError(
                f"its layers {', '.join(kinds)} do not fit in order into {times.layers}, of each "
                f"{times.attends_every} of which the last attends"
            )
        found[room] = n, True
    return found


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
        if kinds := getattr(config, "layer_types", None):
            wide.layer_types = [kinds[n] for n, _ in placed(config, times)]
    if hasattr(config, "linear_num_key_heads"):
        wide.linear_num_key_heads *= times.state_k_heads
        wide.linear_num_value_heads *= times.state_v_heads
    return wide


def widened(name: str, weight: torch.Tensor, config: Any, times: Multiples) -> torch.Tensor:
    """Return the weight of that name, widened, of a model or drafter of this `config`.

    Raises ValueError where nothing is known of the name.
    """
    parts = name.split(".")
    module = next(part for part in reversed(parts[:-1]) if not part.isdigit())
    if module == _EMBEDDING:  # a table of what tokens write
        return _repeated(weight, 1, times.hidden)
    if "linear_attn" in parts:
        sides = _OF_STATE.get(parts[parts.index("linear_attn") + 1])
    else:
        sides = _SIDES.get(module, "h" if module.endswith("norm") else None)
    if sides is None:
        raise ValueError(f"how its {name} is widened is not known")
    written = _pieces(sides[0], config, times, len(weight))
    pieces = weight.split([rows for rows, _, _ in written])
    weight = torch.cat(
        [
            _repeated(piece, 0, copies, width)
            for piece, (_, copies, width) in zip(pieces, written, strict=True)
        ]
    )
    if weight.dim() > 1:
        ((_, copies, width),) = _pieces(sides[1], config, times, weight.shape[1])
        weight = _repeated(weight, 1, copies, width, shared=True)
    return weight


def _pieces(side: str, config: Any, times: Multiples, size: int) -> list[tuple[int, int, int]]:
    """Return of each part of a side its entries, how often they are repeated, and how many at once.

    What is repeated at once is a channel, a neuron, or what one head has.
    """
    if side == "h":
        return [(size, times.hidden, 1)]
    if side == "m":
        return [(size, times.intermediate, 1)]
    if side == "q":  # gates are beside each head's queries
        return [(size, times.q_heads, size // config.num_attention_heads)]
    if side == "k":
        return [(size, times.kv_heads, head_dim(config))]
    if side == "a":
        queries = config.num_attention_heads * head_dim(config)
        return [
            (queries, times.q_heads, head_dim(config)),
            (size - queries, times.kv_heads, head_dim(config)),
        ]
    if side == "s":
        return [(size, times.state_v_heads, size // config.linear_num_value_heads)]
    if side == "c":
        width = config.linear_key_head_dim
        keys = 2 * config.linear_num_key_heads * width
        return [
            (keys, times.state_k_heads, width),
            (size - keys, times.state_v_heads, config.linear_value_head_dim),
        ]
    return [(size, 1, 1)]


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
