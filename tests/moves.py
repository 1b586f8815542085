"""Accepted paths of a cache at random, and what indexing makes of its rows."""

import random

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def moving(seed):
    """Return storage [L, sides, B, N, H, W], nodes [B, depth], counts and lengths of a seed."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, size = choose.randint(1, 3), choose.randint(1, 40)
    heads, width = choose.choice(((1, 576), (2, 64), (3, 5), (8, 128)))
    lengths = [choose.randint(0, 9) for _ in range(batch)]
    sizes = (choose.randint(1, 2), choose.randint(1, 2), batch + 1, 12 + size, heads, width)
    storage = torch.randint(0, 200, sizes, generator=generator).to(choose.choice(DTYPES))
    storage = storage[:, :, :batch]  # one request has left
    paths = [
        sorted(choose.sample(range(1, size), choose.randint(0, size - 1))) for _ in range(batch)
    ]
    if size > 2:
        paths[0] = list(range(1, size // 2))  # in order already
    depth = max(map(len, paths)) + choose.randint(0, 2)
    nodes = torch.tensor([path + [-1] * (depth - len(path)) for path in paths]).view(batch, depth)
    report = torch.full((batch, 3), -7)
    report[:, 2] = torch.tensor([len(path) for path in paths])
    return storage, nodes, report[:, 2], torch.tensor(lengths, dtype=torch.int32)


def moved_by_indexing(storage, nodes, counts, seqlens):
    """Return a copy of `storage` with every request's path behind its root."""
    found = storage.clone()
    for b, (path, count, root) in enumerate(
        zip(nodes.tolist(), counts.tolist(), seqlens.tolist(), strict=True)
    ):
        source = torch.tensor(path[:count], dtype=torch.int64, device=storage.device) + root
        found[:, :, b, root + 1 : root + 1 + count] = storage[:, :, b, source]
    return found
