"""The calls of the primitives that run in the emulator.

Each is the smallest problem that still has what it is about: several tiles, several splits, ragged
lengths, a request without cached tokens, GQA. `QUICK` is what `make test` runs whatever has
changed, `SELECTED` what `make test-gpu-code` runs on both architectures, `ALL` what `make fuzz`
does.
"""

import itertools

from tests.engine_layouts import LATENT_LAYOUTS, LAYOUTS

from .case import Case
from .types import DTYPES, EIGHT_BITS

# The Hopper kernel: TMA, in pieces and in pages, and row by row; 64 and 128 rows, some of them
# missing; trees across tiles; everything that masks.
SOME = {"rows": 16, "kv_heads": 1, "lengths": (200, 9, 0)}
HOPPER = [
    Case("hybrid", rows=16, lengths=(700,), kv_heads=1, split_size=1024),  # its ring comes round
    Case("scores", rows=32, lengths=(700,), kv_heads=1, split_size=1024, window=600),
    Case("logits", **SOME, paged=True, window=150, softcap=2.0, sinks=True, spare=70),
    Case("hybrid", "fp16", rows=10, lengths=(330, 64), group=5, paged=True, page_size=64),
    Case("hybrid", rows=17, group=8, lengths=(290, 30), kv_heads=1),
    Case("hybrid", **SOME, head_dim=128),
    Case("hybrid", **SOME, head_dim=128, paged=True, tree="in_cache", window=37),
    Case("hybrid", **SOME, tree="in_cache"),
    Case("hybrid", **SOME, tree="chain", window=9, sinks=True),
    Case("hybrid", **SOME, split_size=None, spare=2000, window=500),
    Case("hybrid", "fp16", rows=9, group=7, kv_heads=1, lengths=(150,), split_size=4096),
    Case("hybrid", rows=35, group=1, lengths=(90, 0), window=2, kv_heads=1),
    Case("hybrid", rows=70, group=1, lengths=(130, 0), window=40, kv_heads=1),
    Case("hybrid", rows=40, group=5, lengths=(70, 0), kv_heads=1),  # two tiles of rows
    Case("hybrid", rows=33, group=3, lengths=(300,), paged=True, page_size=128, kv_heads=1),
    Case("hybrid", rows=32, lengths=(300, 5), head_dim=128, kv_heads=1, softcap=3.0),
    Case("logits", **SOME, head_dim=128, tree="chain"),
    Case("logits", "fp16", rows=32, lengths=(150, 0), paged=True, window=99, kv_heads=1),
    Case("logits", rows=21, group=3, lengths=(300, 20), softcap=2.0, tree="in_cache"),
    Case("logits", rows=40, lengths=(100, 3), kv_heads=1, paged=True, page_size=32),
    Case("scores", **SOME | {"rows": 20}, paged=True, window=150),
    Case("scores", rows=32, head_dim=128, lengths=(300, 5), kv_heads=1, window=20),
    Case("scores", "fp16", rows=25, group=3, lengths=(300, 20), per_head=False),
    Case("scores", rows=40, group=5, lengths=(70, 0), kv_heads=1),  # two tiles of rows
    Case("scores", **SOME, softcap=2.0),  # the mean of logits
    Case("ragged scores", rows=20, ragged=(20, 0, 3), lengths=(150, 40, 200), window=60),
    Case("ragged hybrid", rows=16, ragged=(16, 1, 0), lengths=(200, 130, 0), kv_heads=1),
    Case("ragged hybrid", rows=16, ragged=(16, 5, 2), lengths=(150, 40, 200), tree="in_cache"),
    Case(
        "ragged hybrid", rows=40, head_dim=128, ragged=(40, 1, 0, 33), lengths=(150, 40, 200, 0),
        window=90, paged=True, kv_heads=1, tree="chain",
    ),
    Case("hybrid", rows=150, group=1, kv_heads=1, tree="chain", lengths=(70,), window=40),
    Case("hybrid", rows=32, head_dim=128, lengths=(700, 130), kv_heads=1, split_size=1024),
    Case(
        "hybrid", rows=33, head_dim=128, group=3, lengths=(300, 0), paged=True, page_size=128,
        tree="in_cache", kv_heads=1, sinks=True,
    ),
    Case("ragged hybrid", rows=40, head_dim=128, ragged=(40, 33, 0), lengths=(150, 300, 9)),
    Case("hybrid", rows=1, lengths=(700,), kv_heads=1, head_dim=128, hopper=True),
    Case("hybrid", lengths=(300, 9, 0), paged=True, window=100, sinks=True, hopper=True),
    Case("hybrid", "fp16", rows=5, group=3, lengths=(90, 9), tree="in_cache", hopper=True),
    Case("ragged hybrid", ragged=(4, 0, 1), lengths=(150, 40, 200), tree="chain", hopper=True),
]  # fmt: skip

# Caches of 8 bits: every type by every way it is read, scales of tokens, heads and none.
EIGHT = [
    Case("hybrid", lengths=(200, 9), stored="e4m3", scales="heads", kv_heads=1),
    Case("scores", "fp16", rows=1, lengths=(90, 0), stored="e4m3", paged=True),
    Case("hybrid", rows=16, lengths=(150, 0), stored="int8", paged=True, kv_heads=1, softcap=2.0),
    Case("hybrid", "fp16", lengths=(150, 0), stored="e5m2", tree="in_cache", window=40),
    Case("gather", lengths=(200, 0), stored="int8", paged=True, head_dim=80),
    Case("logits", lengths=(150, 0), stored="e5m2", window=99, scales="heads"),
    Case("importance", lengths=(150, 0), stored="e4m3", per_head=False),
    Case("write", "bf16", stored="e4m3"),
    Case("write", "fp16", stored="int8", scales="heads", head_dim=80),
    # Tiles of 64 rows, which wgmma multiplies where the tree's keys have 16 bits, and of 128.
    Case("hybrid", rows=16, head_dim=128, lengths=(150, 9), stored="e4m3", kv_heads=1),
    Case("logits", rows=13, group=5, lengths=(200,), stored="int8", paged=True, window=90),
    Case("scores", "fp16", rows=16, lengths=(150, 0), stored="e5m2", tree="chain", kv_heads=1),
    Case("gather", rows=32, lengths=(150, 0), stored="e4m3", scales="heads", kv_heads=1),
]

# Latents: rows of one head in tiles of 16 and of 64, which come to be several.
LATENT = {"head_dim": 576, "v_dim": 512, "kv_heads": 1, "split_size": 64}
LATENTS = [
    Case("hybrid", **LATENT, group=16, lengths=(100, 0)),
    Case("hybrid", **LATENT, rows=2, group=8, lengths=(90, 5), paged=True, window=40, softcap=2.0),
    Case("hybrid", "fp16", **LATENT, rows=9, group=8, lengths=(70,), tree="in_cache", sinks=True),
    Case("hybrid", **LATENT, rows=70, group=1, lengths=(40,), tree="chain"),
    Case("scores", **LATENT, rows=3, group=8, lengths=(90, 0), window=70),
    Case("logits", **LATENT, group=16, lengths=(90, 0), paged=True),
    Case("gather", **LATENT, group=16, lengths=(90, 0), paged=True),
    Case("gather", **LATENT, rows=2, group=40, lengths=(90, 0), paged=True, per_row=True),
    Case("tree", **LATENT, rows=20, group=2),
    Case("hybrid", head_dim=80, v_dim=64, lengths=(90, 40, 0)),
    Case("importance", head_dim=576, v_dim=512, kv_heads=1, lengths=(90, 0)),
    Case("merge_states", head_dim=512, lengths=(1,), rows=3),
]

# Engines' memory: every order of axes, by each kernel; 8 bits with one scale; latents.
PAGES = {"lengths": (90, 9), "paged": True}
ONE_SCALE = {**PAGES, "stored": "e4m3", "scales": "number"}
ENGINES = [
    *(Case("hybrid", **PAGES, layout=order) for order in LAYOUTS),
    *(
        Case("hybrid", rows=16, **PAGES, kv_heads=1, page_size=64, layout=order)
        for order in ("SPHNC", "PSNHC", "PSHLNC", "P|SNHC", "LPNHSC", "LHPNSC")
    ),
    Case("hybrid", **PAGES, page_size=1),
    Case("hybrid", **ONE_SCALE, layout="PSNHC"),
    Case("gather", "fp16", **ONE_SCALE, layout="LPNHSC"),
    Case("scores", **PAGES, layout="PSHNC"),
    Case("importance", **PAGES, layout="PHLNSC"),
    Case(
        "ragged hybrid", rows=33, ragged=(1, 33), **PAGES, tree="in_cache", kv_heads=1,
        layout="SPHNC",
    ),
    *(Case("hybrid", **LATENT, group=16, **PAGES, layout=order) for order in LATENT_LAYOUTS),
    Case("hybrid", **LATENT, group=16, **ONE_SCALE, layout="PNHC"),
    *(Case("write", head_dim=80, layout=order) for order in LAYOUTS),
]  # fmt: skip

# Heads of which Triton 3.6 miscompiles larger tiles than `_configs` lets it have.
SMALL = [
    Case(op, head_dim=D, rows=rows, group=group, kv_heads=1, lengths=(90,), hopper=False)
    for op in ("hybrid", "gather", "scores")
    for D in (8, 24, 40)
    for rows, group in ((5, 5), (16, 4))
]
SMALL += [
    Case(op, head_dim=D, rows=16, kv_heads=1, lengths=(90,), stored=stored)
    for op, D, stored in (
        *(("hybrid", 16, "e5m2"), ("gather", 16, "int8"), ("scores", 32, "int8")),
        *(("hybrid", 64, "int8"), ("scores", 64, "e5m2")),
    )
]
SMALL += [
    Case("logits", head_dim=16, rows=7, kv_heads=1, lengths=(90,), stored="int8", tree="in_cache")
]

# What always runs: every primitive, each kernel of attention once.
QUICK = [
    Case("hybrid", sinks=True),
    *HOPPER[:2],  # whose rings of buffers come round, for one group of rows and for two
    Case("gather", "fp16", rows=1, head_dim=80, paged=True),
    Case("hybrid", rows=17, group=8, lengths=(90,), kv_heads=1, split_size=64, hopper=False),
    Case("scores", lengths=(300, 9, 0), split_size=None, spare=500),
    Case("ragged logits", rows=9, lengths=(70, 9), ragged=(9, 3), window=3, block_m=16),
    Case("importance", head_dim=80, paged=True),
    Case("select"),
    Case("merge_states", rows=3),
    Case("write", "fp32", head_dim=80, layout="SPHNC", cache_dtype="bf16"),
    Case("gumbel"),
    *EIGHT[:2],
    LATENTS[0],
    ENGINES[3],
]

# 16-bit and float32, mma.sync and wgmma (64 rows), padded D, every feature.
SELECTED = [
    *QUICK,
    *EIGHT[2:],
    *LATENTS[1:],
    *SMALL,
    *(case for case in ENGINES if case not in QUICK),
    Case("hybrid", lengths=(700, 90, 0), split_size=None, spare=2000, sinks=True, window=500),
    Case("hybrid", lengths=(200, 0), split_size=4096, sinks=True),  # one launch
    Case("hybrid", rows=16, head_dim=128, paged=True, softcap=2.0),
    *HOPPER[2:5],
    Case("hybrid", lengths=(40, 9), kv_heads=1, paged=True, far="pages"),
    Case("hybrid", lengths=(300,), kv_heads=1, far="rows"),
    Case("scores", rows=16, lengths=(40,), kv_heads=1, far="rows"),  # by the Hopper kernel too
    Case("ragged hybrid", lengths=(90, 70, 0), ragged=(1, 33, 0), tree="chain", kv_heads=1),
    Case("hybrid", rows=70, group=1, lengths=(90, 0), window=50, kv_heads=1, tree="chain"),
    Case("scores", rows=16, window=100),
    Case("hybrid", rows=35, group=1, lengths=(90, 0), window=2, kv_heads=1),  # cuts the tree
    Case("logits", "fp32", paged=True, window=100),
    Case("scores", "fp32", head_dim=200, lengths=(70, 0), paged=True, window=40),  # in two parts
    Case("importance", lengths=(700, 80, 0), multiprocessors=1),  # many tiles of keys to a program
    Case(
        "ragged hybrid", lengths=(200, 9, 0), ragged=(3, 0, 1), paged=True, tree="chain", window=99
    ),
    Case("ragged scores", lengths=(200, 9, 0), ragged=(1, 6, 0), block_m=16),
    Case("ragged logits", "fp16", lengths=(200, 9, 0), ragged=(1, 6, 0), block_m=16, window=99),
    Case("ragged gather", "fp16", lengths=(200, 9, 0), ragged=(2, 3, 0), head_dim=80, paged=True),
    Case("ragged gather", lengths=(200, 9, 0), ragged=(2, 3, 0), group=5, per_row=True),
    Case("gather", rows=2, group=64, lengths=(200, 0), kv_heads=1, sinks=True, per_row=True),
]

ATTENTION = [
    {},
    {"paged": True},
    {"window": 100},
    {"paged": True, "window": 37, "softcap": 2.0, "sinks": True},
    {"tree": "chain"},
    {"tree": "in_cache", "paged": True},
]
SIZES = [(dtype, rows, D) for dtype in DTYPES for rows in (1, 4, 16, 64) for D in (64, 80, 128)]


def _all():
    """Every size with prefix and tree; the other operations and the options in turn."""
    for number, (dtype, rows, D) in enumerate(SIZES):
        size = {"dtype": dtype, "rows": rows, "head_dim": D}
        if rows == 64:  # four tiles of rows
            size |= {"lengths": (200, 0), "kv_heads": 1}
        yield Case("hybrid", **size, **ATTENTION[number % len(ATTENTION)])
        options = ATTENTION[number // 2 % 3] | {"softcap": 2.0 * (number % 8 > 5)}
        yield Case("scores" if number % 2 else "logits", **size, **options)
        if number % 2:
            yield Case("gather", **size, paged=number % 4 == 3, sinks=number % 3 == 1)
        if rows == 4:
            yield Case("tree", **size)
            yield Case("merge_states", **size)
            yield Case("merge_state", **size)
            yield Case("importance", **size, paged=number % 2 == 1, per_head=number % 4 < 2)
    yield Case("select", lengths=(2500, 1030, 0))
    yield Case("select", lengths=(17000, 40), kv_heads=1)  # more than registers hold
    yield Case("ragged hybrid", rows=16, head_dim=128, kv_heads=1, ragged=(16, 1, 0))  # wgmma
    for op in ("scores", "logits", "gather"):  # 128 rows
        yield Case(
            op, rows=40, lengths=(150, 70), kv_heads=1, window=None if op == "gather" else 99
        )
    for dtype in DTYPES:  # prompts
        size = {"dtype": dtype, "rows": 150, "group": 1, "kv_heads": 1, "tree": "chain"}
        yield Case("hybrid", **size, lengths=(70,))
        yield Case("logits", **size, lengths=(70,), paged=True, window=90, softcap=2.0)
        yield Case("ragged hybrid", **size, lengths=(70, 9, 0), ragged=(67, 1, 0), paged=True)
    for dtype, D in (("bf16", 64), ("bf16", 128), ("fp16", 80), ("fp32", 64), ("fp32", 80)):
        size = {"dtype": dtype, "head_dim": D, "kv_heads": 1, "lengths": (300, 130, 60, 0)}
        yield Case("ragged hybrid", **size, ragged=(1, 20, 0, 5))
        yield Case("ragged hybrid", **size, ragged=(2, 1, 3, 3), tree="in_cache", paged=True)
        yield Case("ragged scores", **size, ragged=(1, 9, 0, 5), window=100, block_m=16)
        yield Case("ragged logits", **size, ragged=(1, 9, 0, 5), paged=True, block_m=16)
        yield Case("ragged gather", **size, ragged=(1, 4, 0, 5), softcap=2.0)
        yield Case("ragged gather", **size, ragged=(1, 4, 0, 5), paged=True, per_row=True)
    for rows in (4, 16):
        size = {"rows": rows, "head_dim": 256, "kv_heads": 1, "lengths": (200, 40, 0)}
        yield Case("hybrid", **size, paged=True, window=60, softcap=2.0)
        yield Case("hybrid", **size, paged=True, window=60, tree="in_cache")
        yield Case("gather", **size, paged=True)
        yield Case("logits", **size, paged=True, window=60)
    for dtype, to in itertools.product(DTYPES, DTYPES):
        yield Case("write", dtype, cache_dtype=to)
        yield Case("write", dtype, rows=6, head_dim=80, layout="PSNHC", cache_dtype=to)
    for stored, scales in itertools.product(EIGHT_BITS, ("tokens", "heads", "none")):
        size = {"lengths": (200, 70), "kv_heads": 1, "stored": stored, "scales": scales}
        yield Case("hybrid", **size)
        yield Case("hybrid", "fp16", rows=16, head_dim=128, **size, paged=True, tree="in_cache")
        yield Case("scores", "fp32", **size, window=60)
        yield Case("logits", rows=32, **size, paged=True, window=60, softcap=2.0)
        yield Case("gather", "fp16", rows=8, head_dim=80, **size)
        yield Case("gather", rows=2, group=20, **size, per_row=True)
        yield Case("importance", **size, paged=True)
        yield Case("write", "fp32", stored=stored, scales=scales)
    yield Case("hybrid", rows=20, group=7, kv_heads=1, lengths=(200,))
    yield Case("scores", rows=3, group=7, per_head=False)
    yield Case("gather", rows=16, head_dim=128, tree="none")


ALL = SELECTED + [case for case in [*HOPPER, *_all()] if case not in SELECTED]
