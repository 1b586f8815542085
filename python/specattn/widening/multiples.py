"""How often each part of a small model is repeated to have a real model's sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specattn.planning import ModelShape


@dataclass(frozen=True)
class Multiples:
    """How often channels, neurons and heads are repeated, and how many layers there are then.

    A head's width stays: rope turns each pair of its channels at a rate of its own, and a state's
    keys are normed. The query heads of a KV head are repeated, then divided among its copies, and
    so are the value heads of a state's key head.

    Attributes
    ----------
    hidden, intermediate, q_heads, kv_heads : int
        Repeats of the channels between layers, of the MLP's neurons, of the heads.
    layers : int
        All of them, the source's included.
    state_v_heads, state_k_heads : int
        Repeats of the heads of layers with a state.
    attends_every : int
        Of so many layers, if there are more than the source's, the last one attends.
    """

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    layers: int
    state_v_heads: int = 1
    state_k_heads: int = 1
    attends_every: int = 1

    @classmethod
    def towards(cls, real: ModelShape, source: ModelShape) -> Multiples:
        """Return those that bring `source` closest to `real`, heads by the width of all of them.

        Raises ValueError where `real` is the smaller one in any respect, or one of the two alone
        has layers with a state.
        """
        _check_layers(real, source)
        sizes = {
            "layers": (real.layers, source.layers),
            "hidden": (real.hidden, source.hidden),
            "MLP": (real.intermediate, source.intermediate),
            "query heads": (real.q_heads * real.head_dim, source.q_heads * source.head_dim),
            "KV heads": (real.kv_heads * real.head_dim, source.kv_heads * source.head_dim),
            "state's values": (_width(real, "v"), _width(source, "v")),
            "state's keys": (_width(real, "k"), _width(source, "k")),
        }
        for name, (wanted, own) in sizes.items():
            if wanted < own:
                raise ValueError(f"{name}: {wanted} are fewer than the source's {own}")
        _, hidden, intermediate, q, kv, v, k = (x / (y or 1) for x, y in sizes.values())
        states = (1, 1)
        if source.state_layers:
            states = _heads(v, k, source.state_v_heads // source.state_k_heads)
        return cls(
            _nearest(hidden, _up_to(hidden)),
            _nearest(intermediate, _up_to(intermediate)),
            *_heads(q, kv, source.q_heads // source.kv_heads),
            real.layers,
            *states,
            real.attends_every,
        )


def _check_layers(real: ModelShape, source: ModelShape) -> None:
    """Raise ValueError where layers of `real` are of no kind that the source has, or lack one."""
    if bool(real.state_layers) != bool(source.state_layers):
        of_real, of_source = ("", "no ") if real.state_layers else ("no ", "")
        raise ValueError(
            f"{real.name} has {of_real}layers with a state, the source has {of_source}such layers"
        )
    if real.layers % real.attends_every:
        raise ValueError(
            f"layers: expected a multiple of {real.attends_every}, as the last of so many attends, "
            f"got {real.layers}"
        )


def _width(shape: ModelShape, side: str) -> int:
    """Return how wide all heads of a state are together, by keys or by values."""
    heads, width = (getattr(shape, f"state_{side}_{size}") for size in ("heads", "dim"))
    return heads * width


def _heads(many: float, few: float, group: int) -> tuple[int, int]:
    """Return repeats of heads of which `group` share one, and of these, near two ratios."""
    few_times = _nearest(few, _up_to(few))
    possible = [times for times in _up_to(max(many, few_times)) if group * times % few_times == 0]
    return _nearest(many, possible), few_times


def _up_to(ratio: float) -> range:
    return range(1, math.ceil(ratio) + 1)


def _nearest(ratio: float, choices: Iterable[int]) -> int:
    return min(choices, key=lambda times: abs(math.log(times / ratio)))


def shares(times: int) -> list[float]:
    """Return powers of two that sum to 1: what each of so many copies of an input contributes.

    Weights multiplied with them are exact in every dtype, as thirds would not be.
    """
    power = 1 << (times.bit_length() - 1)
    halved = times - power
    return [1 / power] * (power - halved) + [0.5 / power] * (2 * halved)
