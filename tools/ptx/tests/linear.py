"""Linear layers of a few rows in the emulator: results, a row's bits, and what a launch moves."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from specattn.triton_kernels.linear_few_rows import linear_parts
from tests.cpu.tensors import apart
from tests.linear import check, layer

import specattn

from ..launch import emulated
from ..machine import Options

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Layer:
    """A layer of ``outputs`` x ``depth``; strided tensors have NaN between their rows."""

    rows: int
    outputs: int
    depth: int
    dtype: torch.dtype = BF16
    activation: str | None = None
    biased: bool = False
    gated: bool = False
    added: bool = False
    strided: bool = False

    @property
    def arguments(self):
        """What the operator takes, in its order."""
        x, weight, bias, up, residual = layer(self.rows, self.outputs, self.depth, self.dtype)
        if self.strided:
            x, weight, up, residual = (apart(t, 0, 8) for t in (x, weight, up, residual))
        bias, up, residual = (
            t if given else None
            for t, given in zip(
                (bias, up, residual), (self.biased, self.gated, self.added), strict=True
            )
        )
        return x, weight, bias, up, self.activation, residual


LAYERS = {
    "gate and up": Layer(8, 64, 384, activation="silu", gated=True),
    "residual": Layer(5, 4096 + 32, 256, added=True),
    "one row": Layer(1, 96, 512, biased=True),
    "32 rows": Layer(32, 48, 768, FP16, biased=True, added=True),
    "64 rows": Layer(64, 32, 320, activation="gelu_tanh", gated=True, added=True),
    "40 rows": Layer(40, 4096, 64, FP16, "silu"),
    "no multiples": Layer(17, 75, 333, BF16, "gelu", True, True, True),
    "no multiples, 33 rows, strided": Layer(33, 37, 200, FP16, "silu", True, True, True, True),
    "no multiples, strided": Layer(3, 50, 1001, BF16, None, True, False, True, True),
    "shallow": Layer(9, 40, 1, FP16, "gelu", True, True),
    "float32": Layer(7, 40, 300, FP32, "silu", True, True, True),
    "float32, 20 rows": Layer(20, 19, 37, FP32, "gelu_tanh", added=True, strided=True),
    "float32, 64 rows": Layer(64, 33, 131, FP32, "gelu", True, True, True, True),
}
# Together and copies late; one warp after the other, copies early, blocks shuffled.
ORDERS = (Options(), Options(copies="issue", warps=1, blocks=1, count=False))
CUT_OFF = (Options(count=False, cut=True),)  # as coarse as tensor cores may be


def _called(arguments):
    x, weight, bias, up, activation, residual = arguments
    options = {"up": up, "activation": activation, "residual": residual}
    return specattn.linear_few_rows(x, weight, bias, **options)


def check_layer(layer, arch, orders=ORDERS, emulate=emulated):
    """Run a `Layer` in several orders, which agree in every bit; right, or AssertionError.

    ``emulate`` is what serves it.
    """
    arguments, found = layer.arguments, []
    for order in orders:
        with emulate(arch, order):
            found.append(_called(arguments))
    assert all(torch.equal(x, found[0]) for x in found), "the order shows in the result"
    check(arguments, found[0])


# Of 64 rows: alone, in tiles of 16 and of 32 rows and in two, first and in the middle.
SOME = ((0, 1), (41, 42), (0, 5), (3, 19), (0, 17), (30, 62), (0, 33), (8, 64))


def check_bits(outputs, dtype, arch, emulate=emulated):
    """Rows have the bits that they have among 64, or AssertionError."""
    x, weight, bias, up, residual = layer(64, outputs, 208, dtype)
    for options in (Options(count=False), *CUT_OFF):
        with emulate(arch, options):
            whole = _called((x, weight, bias, up, "gelu", residual))
            for first, last in SOME:
                rows = slice(first, last)
                part = x[rows].clone(), weight, bias, up, "gelu", residual[rows].clone()
                some = _called(part)
                assert torch.equal(some, whole[rows]), f"rows {first} to {last} are others"


def check_parts(sizes, rows, biased, added, arch):
    """Weights side by side give in one launch the bits that each gives in its own."""
    depth, ends = 208, list(accumulate(sizes, initial=0))
    x, weight, bias, _, residual = layer(rows, ends[-1], depth, BF16)
    columns = [slice(*pair) for pair in pairwise(ends)]
    weights = [weight[part].clone() for part in columns]
    biases = [bias[part].clone() if biased else None for part in columns]
    residual = residual if added else None
    out = torch.full((rows, ends[-1]), torch.nan, dtype=BF16)
    with emulated(arch, Options(count=False)) as launches:
        parts = [(*part, None, None) for part in zip(weights, biases, strict=True)]
        linear_parts(x, parts, residual, out)
    assert len(launches) == 1
    with emulated(arch, Options(count=False)):
        for part, *one in zip(columns, weights, biases, strict=True):
            own = None if residual is None else residual[:, part].clone()
            alone = specattn.linear_few_rows(x, *one, residual=own)
            assert torch.equal(out[:, part], alone), f"outputs {part} are others"


def check_in_place(arch):
    """What is added may be where the result goes, and only there is written."""
    x, weight, _, _, residual = layer(3, 50, 64, BF16)
    room = torch.full((3, 72), torch.nan, dtype=BF16)
    room[:, 8:58] = residual
    with emulated(arch):
        specattn.linear_few_rows(x, weight, residual=room[:, 8:58], out=room[:, 8:58])
    check((x, weight, None, None, None, residual), room[:, 8:58])
    assert room[:, :8].isnan().all()
    assert room[:, 58:].isnan().all()


def check_no_numbers(arch):
    """In float32, whose infinities and NaN have no difference to what TF32 makes of them."""
    x, weight, *_ = layer(20, 40, 50, FP32)
    with emulated(arch, Options(count=False)):
        clean = specattn.linear_few_rows(x, weight)
    x[1, 3], x[2, 4], weight[7, 49], weight[8, 3] = torch.nan, torch.inf, torch.nan, torch.inf
    with emulated(arch, Options(count=False, given=True)):
        out = specattn.linear_few_rows(x, weight)
    exact = x.double() @ weight.double().T
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out[exact.isinf()].double(), exact[exact.isinf()])
    assert torch.equal(out[exact.isfinite()], clean[exact.isfinite()])


def counted(rows, outputs, depth, gated, arch="sm_90", dtype=BF16):
    """Return (counts, bytes of weights, programs) of a layer, of few of its blocks, scaled."""
    x = torch.zeros(rows, depth, dtype=dtype)
    weight = torch.zeros(outputs, depth, dtype=dtype)
    options = {"up": weight.clone(), "activation": "silu"} if gated else {}
    with emulated(arch, Options(sample=True)) as launches:
        specattn.linear_few_rows(x, weight, **options)
    (launched,) = launches
    return launched.counts, (1 + gated) * weight.nbytes, launched.grid[0]


# (outputs, depth, gated, how many) of a step of Llama 3.1 8B: q k v, o, gate and up, down, and
# eight eighths of the head.
STEP = [
    (6144, 4096, False, 32),
    (4096, 4096, False, 32),
    (14336, 4096, True, 32),
    (4096, 14336, False, 32),
    (16032, 4096, False, 8),
]


def of_a_step(rows):
    """Return the bytes over those needed that products move: of each of `STEP`, and of all."""
    moved, needed = [], []
    for outputs, depth, gated, times in STEP:
        counts, weights, _ = counted(rows, outputs, depth, gated)
        moved.append(times * (counts.bytes_read + counts.bytes_written))
        needed.append(times * (weights + 2 * rows * (depth + outputs)))
    return [a / b for a, b in zip(moved, needed, strict=True)], sum(moved) / sum(needed)


def matrix_instructions(arch):
    """Return the shapes of all products of matrices in 16 bits, by the rows of a call."""
    found = {}
    for rows in (1, 17, 64):
        with emulated(arch, Options(count=False)) as launches:
            _called(layer(rows, 32, 64, BF16)[:2] + (None, None, None, None))
        lines = launches[0].ptx.splitlines()
        found[rows] = {
            x.split()[0] for x in map(str.strip, lines) if x.startswith(("mma", "wgmma", "tcgen"))
        }
    return found
