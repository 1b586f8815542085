"""Noise with which the argmax of logits is a sample that a seed and a position decide."""

from __future__ import annotations

import torch

from ._check import check_tensors
from ._library import define
from ._options import number
from ._outputs import output_like
from ._specs import GUMBEL_OUT
from .cost import Cost

_operator = define(
    "add_gumbel_noise(Tensor logits, int seed, Tensor requests, Tensor positions, Tensor(a!) out)"
)


def add_gumbel_noise(
    logits: torch.Tensor,
    seed: int,
    requests: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add Gumbel noise that (seed, request, position, token) alone decide.

    The argmax of a row of the result is a sample of the softmax of its logits. The noise comes from
    a counter-based generator (Philox4x32-10: Salmon and others, "Parallel random numbers: as easy
    as 1, 2, 3", SC 2011), so it does not matter what was drafted before, in which batch, or how
    often randomness was used. A draft that is drawn with the same noise is the target's own token
    where the two distributions are close (Daliri, Musco, Suresh, arXiv 2408.07978). Every backend
    has the same random bits; its logarithms round in float32.

    Parameters
    ----------
    logits : Tensor [n, V]
        After temperature and filters, if any. float32, bfloat16 or float16; float64 on the
        reference.
    seed : int
        Its lower 64 bits are the key of the generator.
    requests, positions : Tensor [n], int64
        Which request a row belongs to, and the position of the token that is drawn from it; their
        lower 32 bits are used.
    out : Tensor [n, V], optional
        Written in place and returned; may be `logits` if that is float32.

    Returns
    -------
    out : Tensor [n, V], float32, or float64 where `logits` is
        -inf and NaN stay what they are.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.

    Examples
    --------
    The token of request 0 at position 7, whatever else is drawn:

    >>> import torch, specattn
    >>> logits = torch.tensor([[0.1, 0.6, 0.2, 0.1]]).log()
    >>> request, position = torch.tensor([0]), torch.tensor([7])
    >>> noisy = specattn.add_gumbel_noise(logits, 1, request, position)
    >>> again = specattn.add_gumbel_noise(logits, 1, request, position)
    >>> torch.equal(noisy, again), noisy.argmax(-1).shape
    (True, torch.Size([1]))
    """
    sizes = check_tensors(logits=logits, requests=requests, positions=positions)
    out = output_like(logits, "out", GUMBEL_OUT, sizes, out, first_name="logits")
    seed = number("seed", seed) % 2**64
    _operator(logits, seed - 2**64 if seed >= 2**63 else seed, requests, positions, out)
    return out


def cost(logits: torch.Tensor) -> Cost:
    """Count the logits in and as many float32 out; the generator's operations are not counted."""
    return Cost(logits.numel() * logits.element_size(), 4 * logits.numel(), 0)
