"""Linear layers of a few rows, and the error that any implementation of them may have."""

import torch

from specattn import reference
from tests.cases import assert_accurate
from tests.cpu.tensors import normal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = [None, "silu", "gelu", "gelu_tanh"]
LUCK = 3e-6  # what torch may hit in sums of a few numbers of size one


def layer(rows, outputs, depth, dtype, seed=0):
    """Return x, weight, bias, up and residual; products are of size one."""
    shapes = (rows, depth), (outputs, depth), (outputs,), (outputs, depth), (rows, outputs)
    x, weight, bias, up, residual = normal(seed, *shapes, dtype=dtype)
    scale = max(depth, 1) ** -0.5
    return x, weight * scale, bias, up * scale, residual


def check(arguments, actual):
    """Hold a result against float64, and against what torch makes in the same dtype."""
    # With AMX torch itself multiplies what stands between strided rows.
    dense = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in arguments]

    def widened(a):  # codes stay, also those that are floats of 8 bits
        return a.double() if isinstance(a, torch.Tensor) and a.dtype in DTYPES else a

    wide = list(map(widened, dense))
    exact, rough = reference.linear_few_rows(*wide), reference.linear_few_rows(*dense)
    assert_accurate(actual, exact, rough, atol=LUCK)
