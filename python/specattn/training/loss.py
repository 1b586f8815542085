"""Cross entropy of a frozen language-model head, without the logits of all tokens at once.

A head over a large vocabulary makes logits that dwarf everything else in training: 32k tokens times
a vocabulary of 152k are 19 GiB in float32. So head, softmax and gradient are computed for a chunk
of tokens at a time, and only the gradient of the hidden states is kept (the head is frozen).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

IGNORED = -100
"""Label of a token that counts for nothing, as in `torch.nn.functional.cross_entropy`."""

_CHUNK_LOGITS, _CACHED_LOGITS = 2**25, 2**19  # the latter on a CPU: what its cache holds


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross entropy of ``hidden @ weight.T`` in nats.

    On a GPU with Liger installed its fused kernel computes it, else `chunked_cross_entropy`.

    Parameters
    ----------
    hidden : Tensor [..., H]
    weight : Tensor [V, H]
        The head; frozen, it receives no gradient.
    labels : Tensor, int64 [...]
        The token that follows each hidden state; `IGNORED` ones add nothing.

    Returns
    -------
    Tensor, float32 []
        float64 if `hidden` is float64.

    Raises
    ------
    ValueError
        `weight` requires a gradient, or shapes do not fit.
    """
    if weight.requires_grad:
        raise ValueError("weight must be frozen: its gradient is not computed here")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            "expected hidden [..., H], weight [V, H] and labels [...], got "
            f"{list(hidden.shape)}, {list(weight.shape)} and {list(labels.shape)}"
        )
    rows, labels = hidden.flatten(0, -2), labels.flatten()
    if rows.is_cuda and importlib.util.find_spec("liger_kernel") is not None:
        return liger_cross_entropy(rows, weight, labels)
    return chunked_cross_entropy(rows, weight, labels, max(1, _CHUNK_LOGITS // len(weight)))


def liger_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Compute `linear_cross_entropy` of hidden [N, H] with Liger's Triton kernels."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(
        hidden.to(weight.dtype), weight, labels, ignore_index=IGNORED, reduction="sum"
    )


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Compute `linear_cross_entropy` of hidden [N, H] with the logits of `chunk` tokens at a time.

    Products are made in the dtype of `weight` (or of autocast), the softmax in float32 or better.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk)


@torch.no_grad()
def top1_hits(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count the tokens whose label is the head's first guess: int64 [].

    Arguments are those of `linear_cross_entropy`; `IGNORED` labels are never hit.
    """
    rows, labels = hidden.flatten(0, -2), labels.flatten()
    chunk = max(1, _CHUNK_LOGITS // len(weight))
    guesses = [(part.to(weight.dtype) @ weight.T).argmax(-1) for part in rows.split(chunk)]
    return (torch.cat(guesses) == labels).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient is a by-product of the forward pass, so nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows].to(weight.dtype) @ weight.T).to(wide)
            counts = labels[rows] != IGNORED
            label = labels[rows].masked_fill(~counts, 0)[:, None]
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(1, label))[:, 0] * counts).sum()
            if gradient is not None:
                slope = logits.sub_(lse).exp_()  # the softmax, in the memory of the logits
                slope.scatter_add_(1, label, slope.new_full((1, 1), -1.0).expand_as(label))
                slope *= counts[:, None]
                gradient[rows] = slope.to(weight.dtype) @ weight
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (ctx.gradient * grad_output).to(ctx.gradient.dtype), None, None, None


def soft_cross_entropy(
    hidden: torch.Tensor, features: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return the cross entropy between the distributions of `features` and `hidden`, in nats.

    Both are the frozen head's. That of `features` is made once for all S rows, and the logits
    of a chunk of tokens at a time exist, no more.

    Parameters
    ----------
    hidden : Tensor [S, N, H]
        Drafted features.
    features : Tensor [N, H]
        The target's own; they receive no gradient.
    weight : Tensor [V, H]
        The head; frozen, it receives no gradient.
    counts : Tensor, bool [S, N]
        What counts: the rest adds nothing.

    Returns
    -------
    Tensor, float32 [S]
        Summed over N; float64 if `hidden` is float64.

    Raises
    ------
    ValueError
        `weight` requires a gradient, or shapes do not fit.
    """
    if weight.requires_grad:
        raise ValueError("weight must be frozen: its gradient is not computed here")
    if (
        hidden.shape[1:] != features.shape
        or hidden.shape[:-1] != counts.shape
        or hidden.shape[-1] != weight.shape[-1]
    ):
        raise ValueError(
            "expected hidden [S, N, H], features [N, H], weight [V, H] and counts [S, N], got "
            f"{list(hidden.shape)}, {list(features.shape)}, {list(weight.shape)} and "
            f"{list(counts.shape)}"
        )
    logits = _CACHED_LOGITS if hidden.device.type == "cpu" else _CHUNK_LOGITS
    chunk = max(1, logits // len(weight))
    return _SoftCrossEntropy.apply(hidden, features, weight, counts, chunk)


class _SoftCrossEntropy(torch.autograd.Function):
    """As `_ChunkedCrossEntropy`, for distributions in place of labels.

    Logits are linear in the hidden state. So their mean under a distribution is the hidden state's
    product with the mean row of the head, which is made once for all S rows; and the gradient is
    the mean row under the drafted distribution, less that one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        features: torch.Tensor,
        weight: torch.Tensor,
        counts: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        totals = torch.zeros(len(hidden), dtype=wide, device=hidden.device)

        def unnormalised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Return the softmax's numerators [n, V], their sum and log-sum-exp, [n, 1] each."""
            logits = (rows.to(weight.dtype) @ weight.T).to(wide)
            top = logits.amax(-1, keepdim=True)
            numerators = logits.sub_(top).exp_()
            total = numerators.sum(-1, keepdim=True)
            return numerators.to(weight.dtype), total, total.log() + top

        for start in range(0, hidden.shape[1], chunk):
            rows = slice(start, start + chunk)
            numerators, total, _ = unnormalised(features[rows])
            mean_row = (numerators @ weight) / total
            for step, at in enumerate(counts[:, rows]):
                drafted = hidden[step, rows]
                numerators, total, lse = unnormalised(drafted)
                losses = lse[:, 0] - torch.linalg.vecdot(mean_row, drafted.to(wide))
                totals[step] += (losses * at).sum()
                if gradient is not None:
                    slope = (numerators @ weight) / total - mean_row
                    gradient[step, rows] = slope * at[:, None]
        ctx.gradient = gradient
        return totals

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slope = ctx.gradient * grad_output[:, None, None]
        return slope.to(ctx.gradient.dtype), None, None, None, None
