"""Linear layers of codes in the emulator: results, a row's bits, and what a launch moves."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from specattn.triton_kernels.linear_few_rows import linear_parts
from tests.codes import FLOATS, apart_in_words, grouped_by_columns, weights
from tests.cpu.tensors import apart, normal
from tests.linear import check

from ..launch import emulated
from ..machine import Options
from .linear import CUT_OFF, ORDERS, SOME

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Codes:
    """A layer of ``outputs`` x ``depth`` by codes; strided tensors have room between their rows.

    Of a layer ``by_columns`` the scales of neighbouring outputs lie side by side.
    """

    rows: int
    outputs: int
    depth: int
    groups: int
    bits: int | str  # as `tests.codes` names kinds
    dtype: torch.dtype = BF16
    scales: torch.dtype = BF16
    zeros: bool = False
    activation: str | None = None
    gated: bool = False
    added: bool = False
    strided: bool = False
    by_columns: bool = True

    @property
    def arguments(self):
        """What the operator takes, in its order, without the result."""
        shapes = (self.rows, self.depth), (self.outputs,), (self.rows, self.outputs)
        x, bias, residual = normal(0, *shapes, dtype=self.dtype)
        found = []
        for seed in (1, 2):
            size = self.outputs, self.depth, self.groups
            weight, *rest = weights(*size, self.bits, self.zeros, self.scales, seed)
            if self.by_columns:
                rest = grouped_by_columns(rest)
            found.append([apart_in_words(weight) if self.strided else weight, *rest])
        (weight, *rest), (up, *up_rest) = found
        if self.strided:
            x, residual = apart(x, 0, 8), apart(residual, 0, 8)
        if not self.gated:
            up, up_rest = None, [None, None]
        bias, residual = (bias, residual) if self.added else (None, None)
        return [x, weight, bias, up, self.activation, residual, *rest, *up_rest]


LAYERS = {
    "4 bits, gate": Codes(8, 64, 512, 8, 4, activation="silu", gated=True, zeros=True),
    "4 bits, groups of 32": Codes(5, 4096 + 32, 256, 8, 4, FP16, FP16, added=True),
    "4 bits, one scale": Codes(1, 96, 301, 1, 4, zeros=True, scales=FP32, by_columns=False),
    "4 bits, 20 rows": Codes(20, 75, 160, 5, 4, FP16, FP32, True, "gelu", True, True, True),
    "4 bits, 64 rows": Codes(64, 64, 512, 2, 4, zeros=True, activation="silu", gated=True),
    "4 bits, float32": Codes(40, 48, 192, 3, 4, FP32, FP32, True, "silu", True, True),
    "8 bits, gate": Codes(8, 64, 512, 8, 8, activation="silu", gated=True, zeros=True),
    "8 bits, groups of 32": Codes(3, 40, 160, 5, 8, FP16, FP16, added=True, by_columns=False),
    "8 bits, one scale": Codes(16, 4096, 256, 1, 8, added=True),
    "8 bits, no multiples": Codes(33, 37, 301, 1, 8, FP16, FP32, True, None, True, True, True),
    "8 bits, 64 rows": Codes(64, 64, 512, 2, 8, zeros=True, activation="gelu_tanh", gated=True),
    "8 bits, float32": Codes(7, 40, 256, 4, 8, FP32, BF16, True, "gelu", False, True, True),
    "floats, gate": Codes(8, 64, 512, 4, "e4m3", scales=FP32, activation="silu", gated=True),
    "floats, one scale": Codes(3, 4096 + 32, 256, 1, "e4m3", FP16, BF16, added=True),
    "floats, no multiples": Codes(
        20, 37, 301, 3, "e4m3", FP16, FP32, False, None, True, True, True
    ),
    "floats, 64 rows": Codes(64, 64, 448, 4, "e4m3", scales=FP32, activation="gelu", gated=True),
    "floats, float32": Codes(7, 40, 320, 3, "e4m3", FP32, FP32, False, "gelu", False, True, True),
}
PARTS = {  # of as many outputs
    "4 bits": ((64, 32, 32), Codes(5, 0, 256, 4, 4, zeros=True)),
    "8 bits": ((64, 24, 40), Codes(40, 0, 256, 2, 8, added=True, zeros=True)),
    "floats": ((33, 50), Codes(17, 0, 301, 3, "e4m3", added=True)),
    "4 bits, no multiples": ((2, 30, 7), Codes(3, 0, 192, 6, 4, FP16, zeros=True)),
    "8 bits, float32": ((32, 16), Codes(20, 0, 128, 1, 8, FP32)),
}


def _called(arguments):
    x, weight = arguments[:2]
    out = torch.empty(len(x), len(weight), dtype=x.dtype)
    torch.ops.specattn.linear_few_rows(*arguments, out)
    return out


def check_layer(layer, arch, orders=ORDERS):
    """Run `Codes` in several orders, which agree in every bit; right, or AssertionError."""
    arguments, found = layer.arguments, []
    for order in orders:
        with emulated(arch, order):
            found.append(_called(arguments))
    assert all(torch.equal(x, found[0]) for x in found), "the order shows in the result"
    check(arguments, found[0])


def check_every_float(dtype, arch):
    """Each float of 8 bits times one is that number, or AssertionError."""
    codes = FLOATS[:, None].repeat(1, 64).view(torch.float8_e4m3fn)
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 5] = 1
    with emulated(arch, Options(count=False)):
        found = _called([x, codes, *[None] * 4, torch.ones(len(codes), 1), *[None] * 3])
    assert torch.equal(found[0], codes[:, 0].to(dtype))


def check_bits(bits, dtype, arch):
    """Rows have the bits that they have among 64, or AssertionError."""
    groups = 3 if bits == "e4m3" else 5
    arguments = Codes(64, 40, 320, groups, bits, dtype, BF16, True, "gelu", True, True).arguments
    x, residual = arguments[0], arguments[5]
    for options in (Options(count=False), *CUT_OFF):
        with emulated(arch, options):
            whole = _called(arguments)
            for first, last in SOME:
                rows = slice(first, last)
                arguments[0], arguments[5] = x[rows].clone(), residual[rows].clone()
                some = _called(arguments)
                assert torch.equal(some, whole[rows]), f"rows {first} to {last} are others"
            arguments[0], arguments[5] = x, residual


def _side_by_side(layers):
    """Return x, parts of layers as `linear_parts` takes them, and what is added to all."""
    parts = [(one[1], one[2], *one[6:8]) for one in layers]
    added = None if layers[0][5] is None else torch.cat([one[5] for one in layers], 1)
    return layers[0][0], parts, added


def check_parts(sizes, layer, arch):
    """Codes side by side give in one launch the bits that each gives in its own."""
    layers = [replace(layer, outputs=size).arguments for size in sizes]
    x, parts, residual = _side_by_side(layers)
    out = torch.full((len(x), sum(sizes)), torch.nan, dtype=x.dtype)
    with emulated(arch, Options(count=False)) as launches:
        linear_parts(x, parts, residual, out)
    assert len(launches) == 1
    columns = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
    with emulated(arch, Options(count=False)):
        for part, alone in zip(columns, layers, strict=True):
            assert torch.equal(out[:, part], _called([x, *alone[1:]])), f"outputs {part} are others"


def matrix_instructions(arch, bits):
    """Return the shapes of all products of matrices, by the rows of a call."""
    found = {}
    for rows in (1, 17, 64):
        with emulated(arch, Options(count=False)) as launches:
            _called(Codes(rows, 64, 128, 2, bits).arguments)
        lines = map(str.strip, launches[0].ptx.splitlines())
        found[rows] = {x.split()[0] for x in lines if x.startswith(("mma", "wgmma", "tcgen"))}
    return found


def counted(rows, sizes, depth, groups, bits, gated, zeros=False, arch="sm_90"):
    """Return (counts, bytes of codes, of what groups have, programs), scaled from few blocks.

    Weights of several `sizes` stand side by side.
    """
    like = Codes(rows, 0, depth, groups, bits, gated=gated, zeros=zeros)
    layers = [replace(like, outputs=size).arguments for size in sizes]
    with emulated(arch, Options(sample=True)) as launches:
        if len(layers) == 1:
            _called(*layers)
        else:
            x, parts, _ = _side_by_side(layers)
            linear_parts(x, parts, None, torch.empty(rows, sum(sizes), dtype=x.dtype))
    (launched,) = launches
    codes = sum(t.nbytes for one in layers for t in one[1:4:2] if t is not None)
    beside = sum(t.nbytes for one in layers for t in one[6:] if t is not None)
    return launched.counts, codes, beside, launched.grid[0]
