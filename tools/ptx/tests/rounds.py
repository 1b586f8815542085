"""Draws, walks and moves of a round in the emulator: exactly what torch makes of them."""

import torch
from specattn.triton_kernels.draw import draw_behind
from specattn.triton_kernels.move_path import move_path
from tests.draws import drawn_round
from tests.moves import moved_by_indexing, moving

from specattn.decoding.text.draws import Draws, draw_and_walk, signed
from specattn.tree import Tree

from ..launch import emulated
from ..machine import Options

# Together; one warp after the other, and blocks shuffled. NaN among logits is a value here.
ORDERS = (Options(given=True), Options(warps=1, blocks=1, count=False, given=True))


def check_draws(arch, seeds, most=9, vocabulary=None, emulate=emulated, device="cpu"):
    """Draw and walk in two orders, with the very noise that `add_gumbel_noise` makes there."""
    for seed in seeds:
        case = drawn_round(seed, most, vocabulary).to(device)
        for order in ORDERS:
            with emulate(arch, order):
                accepted, report = draw_and_walk(*case.arguments)
                nodes, rows = case.expected()
            assert torch.equal(report.cpu(), rows), seed
            assert torch.equal(accepted.nodes.cpu(), nodes), seed


def check_chains(arch, seeds, emulate=emulated, device="cpu"):
    """Draw behind chains, by a seed in memory, in two orders: what draws of a round are there."""
    for seed in seeds:
        case = drawn_round(seed).to(device)
        nodes, logits = case.tree.size, case.logits.flatten(0, 1)[:, None]
        places, noise, warmth = case.draws  # of each node a chain of its own
        places = places.repeat_interleave(nodes, 1)
        warmth = None if warmth is None else warmth.repeat_interleave(nodes)
        kept = None if noise is None else torch.tensor([signed(noise)], device=device)
        for ahead, order in enumerate(ORDERS):
            with emulate(arch, order):
                drawn = draw_behind(logits, ahead, warmth, places, kept)
                depths = torch.tensor([ahead], device=device)
                expected = Draws(places, noise, warmth)(logits, depths)
            assert torch.equal(drawn.cpu(), expected.cpu().clamp(min=0)), seed


def check_moves(arch, seeds, emulate=emulated, device="cpu"):
    """Move paths in two orders; equality with what indexing copies, or AssertionError."""
    for seed in seeds:
        expected = moved_by_indexing(*moving(seed))
        for order in ORDERS:
            storage, *path = (x.to(device) for x in moving(seed))
            with emulate(arch, order):
                move_path(storage, *path)
            assert torch.equal(storage.cpu(), expected), seed


def counted(vocabulary=128256, rows=8):
    """Return (counts of the draws, bytes of logits) of a chain, of few of its blocks, scaled."""
    logits = torch.zeros(1, rows, vocabulary, dtype=torch.bfloat16)
    places, tokens = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, rows, dtype=torch.int64)
    with emulated("sm_90", Options(sample=True)) as launches:
        draw_and_walk(Tree.chain(rows - 1), tokens, logits, Draws(places, 3))
    return launches[0].counts, logits.nbytes
