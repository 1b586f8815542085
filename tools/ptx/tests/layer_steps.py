"""What stands between a layer's products, in the emulator: results, and a row's bits."""

import torch
from specattn.triton_kernels.rms_norm import add_norm, gate, rms_norm
from specattn.triton_kernels.rotate_heads import rotate_heads
from tests.layer_steps import Heads, check_heads, check_rows, make_heads, rows_of

from specattn.blocks import TORCH, Norm

from ..launch import emulated
from ..machine import Options

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-5
HEADS = {
    "heads of 128": {"heads": (8, 2), "head_dim": 128, "half": 64, "dtype": BF16},
    "strided, of 80, in part": {
        "heads": (5, 3), "head_dim": 80, "half": 16, "dtype": FP16, "strided": True,
        "depths": "own", "slot": 7,
    },
    "float32, of 96": {"heads": (3, 1), "head_dim": 96, "half": 48, "depths": "shared"},
    "no queries": {"heads": (0, 4), "head_dim": 64, "half": 32, "dtype": BF16, "strided": True},
    "queries alone": {"heads": (4, 0), "head_dim": 64, "half": 32, "dtype": BF16, "stores": False},
    "nothing normed, nothing stored": {
        "heads": (2, 2), "head_dim": 40, "half": 13, "dtype": FP16, "normed": (False, False),
        "stores": False,
    },
    "keys normed, int8": {
        "heads": (4, 2), "head_dim": 128, "half": 64, "dtype": BF16, "normed": (False, True),
        "stored": INT8,
    },
    "queries normed, e4m3, in part": {
        "heads": (2, 2), "head_dim": 72, "half": 12, "dtype": FP16, "normed": (True, False),
        "stored": E4M3, "strided": True,
    },
    "e5m2": {"heads": (1, 1), "head_dim": 256, "half": 128, "dtype": FP32, "stored": E5M2},
}  # fmt: skip
ROWS = {
    "a width of 4096": ((2, 4096), BF16),
    "a narrow one": ((2, 3, 40), FP16),
    "an odd one": ((1, 5, 1001), FP32),
    "half a tile": ((3, 5120), FP16),
}
# Together; one warp after the other, and blocks shuffled.
ORDERS = (Options(), Options(warps=1, blocks=1, count=False))


def check_rotated(name, arch, orders=ORDERS, **options):
    """Turn heads in several orders, which agree in every bit; right, or AssertionError."""
    call, found = make_heads(**HEADS[name]), []
    for order in orders:
        done = call.to("cpu")
        with emulated(arch, order) as launches:
            returned = rotate_heads(*done.arguments, **options)
        assert len(launches) == 1
        check_heads(call, done, returned)
        found.append(done)
    for other in found[1:]:
        assert torch.equal(other.heads, found[0].heads)


def check_steps(name, arch, orders=ORDERS, **options):
    """Norm rows, add them and gate them in several orders; right, or AssertionError."""
    shape, dtype = ROWS[name]
    strided = len(shape) > 2

    def rows():
        return rows_of(shape, dtype, strided=strided)

    found, (x, more, weight) = [], rows()
    for order in orders:
        kept, parts = rows()[0], rows()[0]
        with emulated(arch, order):
            made = [rms_norm(x, weight, EPS, **options), gate(x, more, "gelu", **options)]
            made.append(add_norm(kept, more, 0.5, weight, EPS, **options))
            made.append(rms_norm(parts, weight, EPS, out=parts, **options))
            made.append(gate(x, more, "sigmoid", **options))
        found.append(made)

    def normed(x, weight):
        return TORCH.norm(x, Norm(weight, EPS))

    normal, gelu, added, in_place, sigmoid = found[0]
    check_rows(normal, normed, x, weight)
    check_rows(added, lambda x, y, w: TORCH.add(x, normed(y, w), 0.5), x, more, weight)
    check_rows(gelu, lambda x, y: TORCH.gate(x, y, "gelu"), x, more)
    check_rows(sigmoid, lambda x, y: TORCH.gate(x, y, "sigmoid"), x, more)
    assert torch.equal(in_place, normal)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True))


def check_bits(arch):
    """Rows have the bits that they have alone, or AssertionError."""
    call = make_heads(3, 4, (4, 2), 64, 32, BF16, depths="own", stores=False)
    x, more, weight = rows_of((12, 200), BF16)
    with emulated(arch, Options(count=False)):
        whole = call.to("cpu")
        rotate_heads(*whole.arguments)
        sums = add_norm(x.clone(), more, 0.5, weight, EPS)
        for b, t in ((0, 0), (2, 3)):
            place = call.place._replace(
                prefix=call.place.prefix[b : b + 1].clone(),
                depths=call.place.depths[b : b + 1, t : t + 1].clone(),
            )
            alone = Heads(call.heads[b : b + 1, t : t + 1].clone(), 4, call.norms, place, None)
            rotate_heads(*alone.arguments)
            assert torch.equal(alone.heads[0, 0], whole.heads[b, t])
            n = 4 * b + t
            rows = x[n, None].clone(), more[n, None].clone()
            assert torch.equal(add_norm(*rows, 0.5, weight, EPS)[0], sums[n])


def counted(arch="sm_90"):
    """Return the counts of a launch for 8 rows of llama-3.1-8b, and the bytes of its heads."""
    call = make_heads(1, 8, (32, 8), 128, 64, BF16)
    with emulated(arch) as launches:
        rotate_heads(*call.arguments)
    return launches[0].counts, call.heads.nbytes
