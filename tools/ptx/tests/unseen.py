"""Calls of which some rows do not see what is NaN or infinite, for the emulator."""

import random

import torch
from tests.unseen import PARTS, Bad, make_unseen

from ..cuda_launch import emulated_cuda
from ..launch import emulated
from ..machine import Options

NAN, INF = torch.nan, torch.inf
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def node(index, part="v", value=NAN, channel=5, request=0, head=0):
    """Return a bad number of a node of the tree."""
    return Bad(request, True, index, head, part, channel, value)


def cached(index, part="v", value=NAN, channel=5, request=0, head=0):
    """Return a bad number of a cached token."""
    return Bad(request, False, index, head, part, channel, value)


SOME = {"lengths": (150, 9), "rows": 5, "head_dim": 64, "q_heads": 8, "kv_heads": 2, "dtype": BF16}
MANY = SOME | {"rows": 16, "kv_heads": 1, "q_heads": 4}  # 64 rows of a head
CALLS = {
    "a leaf's value": {"bads": [node(4, value=INF)], **SOME},
    "a leaf's key and value": {"bads": [node(4, "k", channel=None), node(4, channel=None)], **SOME},
    "of many rows": {"bads": [node(15), node(3, "k", INF, None)], **MANY, "tree": "chain"},
    "in the cache": {"bads": [node(3)], **SOME, "where": "cache", "paged": True, "page_size": 16},
    "before a window": {
        "bads": [cached(132), cached(133, "k"), node(2)], **SOME, "window": 20, "tree": "chain",
        "where": "cache",
    },
    "before a window of many rows": {
        "bads": [cached(140), node(9, value=-INF)], **MANY, "window": 20, "tree": "chain",
    },
    "of a large tree": {"bads": [node(70), node(3, "k")], **SOME, "tree_size": 80, "dtype": FP16},
    "of a listed prefix": {"bads": [node(4)], **SOME, "form": "gather by head", "paged": True,
                           "page_size": 16},
    "beside scores": {
        "bads": [cached(132), node(4)], **SOME, "form": "verify", "collect": "scores", "window": 20,
    },
    "beside scores of capped logits": {
        "bads": [cached(132, "k"), node(4)], **SOME, "form": "verify", "collect": "scores",
        "window": 20, "tree": "chain", "options": (("softcap", 5.0),),
    },
    "beside logits": {
        "bads": [cached(40, "k"), node(14)], **MANY, "form": "verify", "collect": "logits",
        "options": (("softcap", 5.0),),
    },
    "of a tree alone": {"bads": [node(4, value=-INF)], **SOME, "form": "tree", "dtype": FP16},
}  # fmt: skip
EIGHT = SOME | {"where": "cache", "stored": (torch.int8, "tokens")}
# What emulators are told of each kind of kernels.
OWN = {
    "cuda": {},
    "split": {"multiprocessors": 132, "hopper": False},
    "hopper": {"multiprocessors": 132, "hopper": True},
}
# What only Triton's kernels serve.
TRITON = {
    "in float32": {"bads": [node(4), cached(3, value=INF)], **SOME, "dtype": FP32, "window": 148},
    "a scale": {"bads": [node(4, "v_scale"), node(3, "k_scale")], **EIGHT},
    "a scale in float16": {"bads": [node(4, "v_scale", INF)], **EIGHT, "dtype": FP16, "window": 9},
    "of 8 bits": {"bads": [node(4)], **EIGHT, "stored": (E5M2, "heads")},
    "of rows' own lists": {"bads": [node(4)], **SOME, "form": "gather by row"},
    "latents": {
        "bads": [node(3)], "lengths": (70, 9), "rows": 4, "latents": True, "head_dim": 80,
        "v_dim": 64, "shared": True, "q_heads": 4, "kv_heads": 1, "dtype": BF16,
    },
    "of wide heads": {"bads": [node(4), cached(132)], **SOME, "head_dim": 256, "window": 20},
    "of wide latents": {
        "bads": [node(3)], "lengths": (70, 9), "rows": 4, "latents": True, "head_dim": 576,
        "v_dim": 512, "shared": True, "q_heads": 4, "kv_heads": 1, "dtype": BF16,
    },
    "before a window of latents": {
        "bads": [node(3), cached(52)], "lengths": (70, 9), "rows": 8, "latents": True,
        "head_dim": 576, "v_dim": 512, "shared": True, "q_heads": 4, "kv_heads": 1, "dtype": BF16,
        "window": 20, "form": "verify", "collect": "logits",
    },
    "of a prompt before a window": {
        "bads": [node(10), node(60), node(3, "k")], "rows": 130, "lengths": (40,), "tree": "chain",
        "mask": None, "head_dim": 64, "q_heads": 1, "kv_heads": 1, "dtype": BF16, "window": 70,
    },
    "of a prompt": {
        "bads": [node(60), node(3, "k")], "rows": 70, "lengths": (40,), "tree": "chain",
        "mask": None, "head_dim": 64, "q_heads": 1, "kv_heads": 1, "dtype": BF16,
    },
}  # fmt: skip

# What the Hopper kernel serves: by TMA and without, by 64 rows and by 128.
LONG = MANY | {"lengths": (300, 9)}
HOPPER = {
    "a leaf's value": {"bads": [node(15), cached(40, "k")], **LONG},
    "of a chain": {"bads": [node(15, value=INF)], **LONG, "tree": "chain", "mask": None},
    "in pages": {"bads": [node(3)], **LONG, "where": "cache", "paged": True, "page_size": 64},
    "in short pages": {"bads": [node(3)], **LONG, "paged": True, "page_size": 16, "window": 100},
    "before a window": {
        "bads": [cached(282), cached(283, "k"), node(2)], **LONG, "window": 20, "tree": "chain",
        "where": "cache",
    },
    "before a long window": {
        "bads": [cached(60), cached(210), node(9, value=-INF)], **LONG, "window": 250,
        "head_dim": 128, "dtype": FP16,
    },
    "of 128 rows": {"bads": [node(31)], **LONG, "rows": 32, "window": 100},
    "of 128 wide rows": {
        "bads": [node(31), cached(209)], **LONG, "rows": 32, "head_dim": 128, "window": 100,
    },
    "beside scores": {
        "bads": [cached(202), node(4)], **LONG, "rows": 32, "form": "verify", "collect": "scores",
        "window": 99,
    },
    "beside logits": {
        "bads": [cached(202), node(14)], **LONG, "form": "verify", "collect": "logits",
        "window": 101, "options": (("softcap", 5.0),),
    },
}  # fmt: skip


def check(call, kernels, arch):
    """Make a call twice, with ordinary numbers and with bad ones: who sees none says the same."""
    unseen = make_unseen(**call)
    serve = emulated_cuda if kernels == "cuda" else emulated
    with serve(arch, Options(count=False, given=True), split_size=64, **OWN[kernels]) as launches:
        unseen.check(whole_rows=True)
    return {launched.name for launched in launches}


def drawn(seed):
    """Return a random call that all kernels serve."""
    choose = random.Random(seed)
    form = choose.choice(("hybrid", "hybrid", "verify", "gather by head"))
    gathers = form.startswith("gather")
    group, tree = choose.choice((1, 3, 4, 8)), choose.choice(("own", "one", "chain"))
    rows = choose.randint(1, 64 // group)
    where = "apart" if gathers else choose.choice(("apart", "cache"))
    kv_heads = choose.choice((1, 2))
    return {
        "bads": [
            Bad(
                choose.randint(0, 1), choose.random() < 0.6, choose.randint(0, 200),
                choose.randint(0, 1), choose.choice(PARTS[:2]),
                choose.choice((None, choose.randint(0, 63))), choose.choice((NAN, INF, -INF)),
            )
            for _ in range(choose.randint(1, 3))
        ],
        "lengths": (choose.randint(1, 200), choose.choice((0, 9))),
        "rows": rows,
        "form": form,
        "tree": tree,
        "tree_size": rows + choose.choice((0, 0, 30)) if where == "apart" else rows,
        "mask": choose.choice(("packed", None) if tree == "chain" else ("packed",)),
        "where": where,
        "paged": choose.random() < 0.5,
        "window": None if gathers else choose.choice((None, 1, 20, 100)),
        "collect": choose.choice(("scores", "logits")) if form == "verify" else None,
        "options": choose.choice(((), (), (("softcap", 5.0),))),
        "kv_heads": kv_heads,
        "q_heads": group * kv_heads,
        "head_dim": choose.choice((64, 128)),
        "dtype": choose.choice((BF16, FP16)),
        "page_size": 16,
        "seed": seed,
    }  # fmt: skip


def check_drawn(seed, kernels, arch):
    """Check a random call."""
    return check(drawn(seed), kernels, arch)
