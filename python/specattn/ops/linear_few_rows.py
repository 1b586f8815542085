"""A linear layer for the few rows of a verification pass."""

from __future__ import annotations

import math

import torch

from ._check import LINEAR_OUT, check_option, check_tensor, check_tensors
from ._library import define
from ._outputs import output_like
from .cost import Cost

MOST_ROWS = 64
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh")
_operator = define(
    "linear_few_rows(Tensor x, Tensor weight, Tensor? bias, Tensor? up, str? activation, "
    "Tensor? residual, Tensor(a!) out)"
)


def linear_few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    up: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply a few rows with weights as they lie in the model, at the rate of the memory.

    ``act(x @ weight.T + bias)``, with `up` times ``x @ up.T`` (the gate of an MLP, arXiv
    2002.05202), plus `residual`. The C++ kernels sum in float32, round once at the end, and read
    weights in place; the bits of a row depend neither on how many rows there are nor on the number
    of threads, so a verified row is that of plain decoding. On a GPU, and in float64, these are
    torch's own products.

    Parameters
    ----------
    x : Tensor [M, K] or [B, T, K]
        At most 64 rows in all. float32, bfloat16 or float16; float64 on the reference.
    weight : Tensor [N, K]
        As `torch.nn.Linear` has it; dtype as `x`.
    bias : Tensor [N], optional
        Added to the product with `weight`; dtype as `x`.
    up : Tensor [N, K], optional
        Weights of a second product, which the activated first one is multiplied with.
    activation : {None, "silu", "gelu", "gelu_tanh"}
        Of the product with `weight`; "gelu_tanh" is torch's ``approximate="tanh"``.
    residual : Tensor [M, N] or [B, T, N], optional
        Added last; dtype as `x`. May be `out`.
    out : Tensor [M, N] or [B, T, N], optional
        Written in place and returned; must not overlap another argument but `residual`.

    Returns
    -------
    out : Tensor [M, N] or [B, T, N]

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.

    Examples
    --------
    >>> import torch, specattn
    >>> x, gate, up = torch.randn(1, 5, 64), torch.randn(96, 64), torch.randn(96, 64)
    >>> specattn.linear_few_rows(x, gate, up=up, activation="silu").shape
    torch.Size([1, 5, 96])
    """
    sizes = check_tensors(x=x, weight=weight, bias=bias, up=up)
    rows = math.prod(x.shape[:-1])
    check_option("x", rows, rows <= MOST_ROWS, f"at most {MOST_ROWS} rows in all")
    check_option("activation", activation, activation in ACTIVATIONS, f"one of {ACTIVATIONS}")
    spec = LINEAR_OUT[x.dim()]
    check_tensor("residual", residual, spec, x, sizes, first_name="x")
    out = output_like(x, "out", spec, sizes, out, first_name="x")
    x, given = _flat(x), None if residual is None else _flat(residual)
    _operator(x, weight, bias, up, activation, given, _flat(out, "out"))
    return out


def _flat(x: torch.Tensor, written: str | None = None) -> torch.Tensor:
    """Return all rows in one dimension; those that are `written` must lie one stride apart."""
    if x.dim() == 2:
        return x
    batch, rows = x.shape[:2]
    if written:
        apart = batch == 1 or rows == 1 or x.stride(0) == rows * x.stride(1)
        check_option(f"{written}.stride()", x.stride(), apart, "all rows one stride apart")
    return x.flatten(0, 1)


def cost(x: torch.Tensor, weight: torch.Tensor, products: int = 1) -> Cost:
    """Count x and the weights of one or two products in, one result out, without a residual."""
    (N, K), M, e = weight.shape, math.prod(x.shape[:-1]), x.element_size()
    return Cost((M * K + products * N * K) * e, M * N * e, 2 * products * M * N * K)
