"""How often each part of a small model is repeated to have a real model's sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specattn.planning import ModelShape


@dataclass(frozen=True)
class Multiples:
    """How often channels, neurons and heads are repeated, and how many layers there are then.

    A head's width stays: rope turns each pair of its channels at a rate of its own. The query heads
    of a KV head are repeated, then divided among its copies.

    Attributes
    ----------
    hidden, intermediate, q_heads, kv_heads : int
        Repeats of the channels between layers, of the MLP's neurons, of the heads.
    layers : int
        All of them, the source's included.
    """

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    layers: int

    @classmethod
    def towards(cls, real: ModelShape, source: ModelShape) -> Multiples:
        """Return those that bring `source` closest to `real`, heads by the width of all of them.

        Raises ValueError where `real` is the smaller one in any respect.
        """
        sizes = {
            "layers": (real.layers, source.layers),
            "hidden": (real.hidden, source.hidden),
            "MLP": (real.intermediate, source.intermediate),
            "query heads": (real.q_heads * real.head_dim, source.q_heads * source.head_dim),
            "KV heads": (real.kv_heads * real.head_dim, source.kv_heads * source.head_dim),
        }
        for name, (wanted, own) in sizes.items():
            if wanted < own:
                raise ValueError(f"{name}: {wanted} are fewer than the source's {own}")
        _, hidden, intermediate, q_heads, kv_heads = (x / y for x, y in sizes.values())
        kv_times = _nearest(kv_heads, _up_to(kv_heads))
        group = source.q_heads // source.kv_heads
        q_times = [q for q in _up_to(max(q_heads, kv_times)) if group * q % kv_times == 0]
        return cls(
            _nearest(hidden, _up_to(hidden)),
            _nearest(intermediate, _up_to(intermediate)),
            _nearest(q_heads, q_times),
            kv_times,
            real.layers,
        )


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
