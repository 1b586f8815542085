"""Gumbel noise by a counter-based generator, added to logits: no random state, no host."""

import triton
import triton.language as tl

from ._launch import launch

COUNTERS = 256  # of a group of tokens, each of which makes four words


@triton.jit
def _ln(x):
    """Return ln of positive normal numbers, exact also near 1, where `tl.log` is not.

    To about one unit in the last place (Cephes' polynomial).
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # of x over the root of a half
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    z = f * f
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    n = exponent.to(tl.float32)
    return f + (p * f * z + n * -2.12194440e-4 - 0.5 * z) + n * 0.693359375


@triton.jit
def _noise(word):
    """Return -ln(-ln(u)) of the uniform number u = (upper 31 bits + 1/2) / 2^31."""
    x = (word >> 1).to(tl.int32, bitcast=True)
    u = (x.to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    rest = ((0x7FFFFFFF - x).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)  # 1 - u, as exact as u
    above = x >= 0x40000000  # a half: there u is 1 - rest and what that rounds off
    y = tl.where(above, 1.0 - rest, u)
    rounded_off = tl.where(above, ((1.0 - y) - rest) / y, 0.0)
    return -_ln(-(_ln(y) + rounded_off))


# fmt: off
@triton.jit(do_not_specialize=["seed", "vocabulary"])
def gumbel_kernel(
    logits, seed, requests, positions, out, vocabulary, logits_stride, out_stride,
    COUNTERS: tl.constexpr,
):
    # fmt: on
    """Add the noise of a group of tokens of one row."""
    row = tl.program_id(1).to(tl.int64)
    counter = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
    position = tl.load(positions + row).to(tl.int32)
    request = tl.load(requests + row).to(tl.int32)
    words = tl.philox(seed, counter, counter * 0 + position, counter * 0 + request, counter * 0)
    token = tl.program_id(0) * (4 * COUNTERS) + tl.arange(0, COUNTERS)
    for w in tl.static_range(4):
        inside = token < vocabulary
        logit = tl.load(logits + row * logits_stride + token, mask=inside, other=0.0)
        noisy = logit.to(tl.float32) + _noise(words[w])
        tl.store(out + row * out_stride + token, noisy, mask=inside)
        token += COUNTERS


def add_gumbel_noise(logits, seed, requests, positions, out):
    """Write ``logits`` [n, V] plus noise into ``out``, float32 [n, V]."""
    n, vocabulary = logits.shape
    grid = (triton.cdiv(vocabulary, 4 * COUNTERS), n)
    launch(
        gumbel_kernel, grid,
        logits, seed, requests, positions, out, vocabulary, logits.stride(0), out.stride(0),
        COUNTERS=COUNTERS, num_warps=4,
    )  # fmt: skip
