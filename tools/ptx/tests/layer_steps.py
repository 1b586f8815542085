"""What stands between a layer's products, in the emulator: results, and a row's bits."""

import torch
from specattn.triton_kernels.children import best_children
from specattn.triton_kernels.rms_norm import add_norm, gate, rms_norm
from specattn.triton_kernels.rotate_heads import rotate_heads
from tests.beams import check_best, make_level
from tests.layer_steps import Heads, check_heads, check_rows, make_heads, rows_of

import specattn
from specattn.blocks import TORCH, Norm

from ..launch import emulated
from ..machine import Options
from .linear_codes import Codes

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
    "heads that do not turn": {"heads": (6, 2), "head_dim": 64, "half": 1, "dtype": BF16},
    "small ones": {"heads": (2, 1), "head_dim": 16, "dtype": FP16, "stored": INT8},
    "e5m2": {"heads": (1, 1), "head_dim": 256, "half": 128, "dtype": FP32, "stored": E5M2},
}  # fmt: skip
ROWS = {
    "a width of 4096": ((2, 4096), BF16),
    "a narrow one": ((2, 3, 40), FP16),
    "one of few lanes": ((2, 9), BF16),
    "an odd one": ((1, 5, 1001), FP32),
    "half a tile": ((3, 5120), FP16),
}
# Together; one warp after the other, and blocks shuffled.
ORDERS = (Options(), Options(warps=1, blocks=1, count=False))


def check_rotated(sizes, arch, orders=ORDERS, **options):
    """Turn heads in several orders, which agree in every bit; right, or AssertionError."""
    call, found = make_heads(**sizes), []
    for order in orders:
        done = call.to("cpu")
        with emulated(arch, order) as launches:
            returned = rotate_heads(*done.arguments, **options)
        assert len(launches) == 1
        check_heads(call, done, returned)
        found.append(done)
    for other in found[1:]:
        assert torch.equal(other.heads, found[0].heads)


def check_steps(shape, dtype, arch, orders=ORDERS, **options):
    """Norm rows, add them and gate them in several orders; right, or AssertionError."""
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


def early(arch):
    """Return, of each kernel that may start early, how often it waits, and prefetches before.

    Nothing is called a constant: before it waits, a kernel must not read even its weights.
    """
    found = {}
    with emulated(arch, Options(count=False), split_size=16) as launches:
        call = make_heads(heads=(2, 1), head_dim=16, dtype=BF16)
        done = call.to("cpu")
        check_heads(call, done, rotate_heads(*done.arguments))
        x, more, weight = rows_of((2, 40), BF16)
        rms_norm(x, weight, EPS)
        add_norm(x.clone(), more, 0.5, weight, EPS)
        gate(x, more, "silu")
        level = make_level(1, 2, 40, BF16)
        check_best(*level, 5, best_children(*level, 5, 3))
        up, down = torch.randn(2, 24, 40).to(BF16)
        specattn.linear_few_rows(x, up, up=down, activation="silu")
        codes = Codes(2, 24, 128, 2, 4, gated=True, activation="silu").arguments
        torch.ops.specattn.linear_few_rows(*codes, x.new_empty(2, 24))
        q, k, v = torch.randn(2, 16, 2, 16).to(BF16), *torch.randn(2, 2, 48, 1, 16).to(BF16)
        specattn.hybrid_tree_attention(
            q[:, :3], k, v, torch.tensor([45, 40], dtype=torch.int32), None, None
        )
    for launched in launches:
        before, *behind = launched.ptx.split("griddepcontrol.wait")
        found[launched.name] = len(behind), before.count("prefetch.global.L2") if behind else 0
    return found
