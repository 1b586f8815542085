"""A linear layer for the few rows of a verification pass."""

from __future__ import annotations

import math
from typing import Any

import torch

from ._check import check_option, check_tensor, check_tensors
from ._library import define
from ._outputs import output_like
from ._specs import LINEAR_OUT
from .cost import Cost

MOST_ROWS = 64
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh")
_operator = define(
    "linear_few_rows(Tensor x, Tensor weight, Tensor? bias, Tensor? up, str? activation, "
    "Tensor? residual, Tensor? scale, Tensor? zero, Tensor? up_scale, Tensor? up_zero, "
    "Tensor(a!) out)"
)


def linear_few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    up: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    up_zero: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply a few rows with weights as they lie in the model, at the rate of the memory.

    ``act(x @ weight.T + bias)``, with `up` times ``x @ up.T`` (the gate of an MLP, arXiv
    2002.05202), plus `residual`. The C++ and Triton kernels sum in float32, round once at the end,
    and read weights in place; the bits of a row depend neither on how many rows there are nor on
    the number of threads, so a verified row is that of plain decoding. In float64 these are torch's
    own products.

    With a `scale` weights are codes of 8 or 4 bits, in groups along K: what is multiplied is
    ``(code - zero) * scale``, exactly, and the sum of each group is float32. Codes are read as they
    lie; `specattn.quantised` makes and packs them. Floats of 8 bits are codes without zero points;
    that they are numbers is not looked at. Integers in tiles are served on a CPU.

    Parameters
    ----------
    x : Tensor [M, K] or [B, T, K]
        At most 64 rows in all. float32, bfloat16 or float16; float64 on the reference.
    weight : Tensor [N, K]
        As `torch.nn.Linear` has it; dtype as `x`. Of codes: int8 or float8_e4m3fn [N, K], or of 4
        bits, packed by `specattn.quantised.pack_nibbles`, uint8 [N, 64 ceil(K / 128)]. Or in tiles,
        as `specattn.quantised.QuantisedWeight.laid` makes them: int32 [N, K / 4], or of 4 bits
        [N, K / 8]; then scales and zero points are in tiles, too.
    bias : Tensor [N], optional
        Added to the product with `weight`; dtype as `x`.
    up : Tensor [N, K], optional
        Weights of a second product, which the activated first one is multiplied with; codes as
        `weight` is.
    activation : {None, "silu", "gelu", "gelu_tanh"}
        Of the product with `weight`; "gelu_tanh" is torch's ``approximate="tanh"``.
    residual : Tensor [M, N] or [B, T, N], optional
        Added last; dtype as `x`. May be `out`.
    scale : Tensor [N, groups], optional
        Of each group of K / groups codes: one for all, or of 32, 64 or a multiple of 128. Of floats
        one for all, or for 128, of which the last may have fewer. float32, bfloat16 or float16. On
        a GPU best with those of neighbouring outputs side by side, as
        `specattn.quantised.QuantisedWeight.laid` has them.
    zero : Tensor [N, groups], optional
        The codes that mean zero; dtype as `weight` in rows. None is 0, and 8 for codes of 4 bits.
    up_scale, up_zero : Tensor [N, groups], optional
        The same of `up`.
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
    >>> from specattn.quantised import quantise
    >>> few = quantise(gate, bits=4, group=32)
    >>> specattn.linear_few_rows(x, few.codes, scale=few.scale).shape
    torch.Size([1, 5, 96])
    """
    tensors: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "up": up}
    codes: dict[str, Any] = {"scale": scale, "zero": zero, "up_scale": up_scale, "up_zero": up_zero}
    if scale is not None:
        tensors |= codes
        check_option("up_scale", up_scale, (up is None) == (up_scale is None), "one beside `up`")
    else:
        for name, given in codes.items():
            check_option(name, given, given is None, "None without a scale")
    sizes = check_tensors(**tensors)
    if weight.dtype == torch.int32:
        where = x.device.type
        check_option("weight", where, where == "cpu", "integers in rows, or tiles on a CPU")
    rows = math.prod(x.shape[:-1])
    check_option("x", rows, rows <= MOST_ROWS, f"at most {MOST_ROWS} rows in all")
    check_option("activation", activation, activation in ACTIVATIONS, f"one of {ACTIVATIONS}")
    spec = LINEAR_OUT[x.dim()]
    check_tensor("residual", residual, spec, x, sizes, first_name="x")
    out = output_like(x, "out", spec, sizes, out, first_name="x")
    x, given = _flat(x), None if residual is None else _flat(residual)
    _operator(x, weight, bias, up, activation, given, *codes.values(), _flat(out, "out"))
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


def cost(
    x: torch.Tensor, weight: torch.Tensor, products: int = 1, scale: torch.Tensor | None = None
) -> Cost:
    """Count x and the weights of one or two products in, one result out, without a residual."""
    N, K, M, e = len(weight), x.shape[-1], math.prod(x.shape[:-1]), x.element_size()
    read = sum(t.numel() * t.element_size() for t in (weight, scale) if t is not None)
    return Cost(M * K * e + products * read, M * N * e, 2 * products * M * N * K)
