"""Gumbel noise that belongs to a request, a position and a token, by a counter-based generator."""

import torch

GROUP = 1024  # tokens whose noise is one word each of 256 consecutive counters
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def philox(counter, key):
    """Return the four words of Philox4x32-10 (Salmon and others, SC 2011, table 2).

    ``counter`` are four, ``key`` two int64 tensors or numbers that hold 32 bits each.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Products wrap at 64 bits, of which the sign is one: shifts are masked.
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = ((product1 >> 32) & _WORD) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = ((product0 >> 32) & _WORD) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def add_gumbel_noise(logits, seed, requests, positions):
    """Return ``logits`` [n, V] + Gumbel noise, float32, or float64 where the logits are.

    Token v takes word ``v % 1024 // 256`` of the counter ``(v // 1024 * 256 + v % 256, position,
    request, 0)`` under the key `seed`; its upper 31 bits are a uniform number u in (0, 1), and
    ``-ln(-ln(u))`` its noise.
    """
    vocabulary = logits.shape[-1]
    groups = -(-vocabulary // GROUP)
    used = min(vocabulary, GROUP // 4)  # of a group's counters
    blocks = torch.arange(groups, device=logits.device)[:, None] * (GROUP // 4)
    blocks = (blocks + torch.arange(used, device=logits.device)).flatten()
    rows = [(x & _WORD)[:, None] for x in (positions, requests)]
    words = philox((blocks, *rows, torch.zeros_like(blocks)), (seed & _WORD, seed >> 32 & _WORD))
    words = torch.stack([word.expand(len(logits), -1) for word in words], 1)  # [n, 4, blocks]
    words = words.unflatten(2, (groups, used)).transpose(1, 2).flatten(1)[:, :vocabulary]
    # 1 - u is as exact as u: where it is small, so is the noise's own -ln(u).
    rest = ((_WORD - words >> 1).double() + 0.5) / 2**31
    noise = -(-torch.log1p(-rest)).log()
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.to(dtype) + noise.to(dtype)
