"""Calls of every primitive and of every small kernel at random, of sizes that nobody chose."""

import random

import torch
from tests.engine_layouts import LAYOUTS

from . import checks, layer_steps, levels, linear, linear_codes, recurrent, rounds, selections
from .case import Case
from .types import DTYPES, EIGHT_BITS

TYPES = tuple(DTYPES.values())
ATTENTION = ("hybrid", "scores", "logits", "gather", "tree")
RAGGED = ("ragged hybrid", "ragged scores", "ragged logits", "ragged gather")


def drawn(op, seed):
    """Return a random case of an operation of `operations`; heads have any size."""
    choose = random.Random(f"{op} {seed}")
    kind = op.removeprefix("ragged ")
    ragged, attends = op in RAGGED, op in ATTENTION + RAGGED
    gathers, collects = kind == "gather", kind in ("scores", "logits")
    rows, group = choose.randint(1, choose.choice((4, 16, 30))), choose.choice((1, 2, 3, 4, 5, 8))
    lengths = tuple(
        choose.choice((0, choose.randint(1, 70), choose.randint(71, 300)))
        for _ in range(choose.randint(1, 3))
    )
    dtype = choose.choice(("bf16", "fp16", "bf16", "fp16", "fp32"))
    case = {
        "dtype": dtype,
        "rows": rows,
        "group": group,
        "kv_heads": choose.choice((1, 2)),
        "head_dim": 8 * choose.randint(1, choose.choice((8, 8, 16, 32))),
        "lengths": lengths,
        "spare": choose.choice((1, 3, 200)),
        "hopper": False if choose.random() < 0.7 else None,
    }
    if op == "write":
        case |= {"layout": choose.choice(LAYOUTS), "cache_dtype": choose.choice([*DTYPES])}
        case["rows"] = min(rows, 6)  # three requests of them have 20 slots
    if op in ("importance", "scores"):
        case["per_head"] = choose.random() < 0.7
    if attends or op == "importance":
        case |= {"paged": kind != "tree" and choose.random() < 0.5}
        case |= {"page_size": 16 if ragged else choose.choice((1, 16, 64))}
    if attends:
        case["split_size"] = choose.choice((64, 128, 256, None))
    if attends and not gathers:
        case["softcap"] = choose.choice((0.0, 0.0, 2.0))
    if kind == "hybrid" or collects:
        case["window"] = choose.choice((None, None, 1, 20, 100, 250))
        case["tree"] = choose.choice(("random", "chain", "in_cache"))
    if op in ("hybrid", "gather"):
        case["sinks"] = choose.random() < 0.4
    if gathers:
        case["per_row"] = choose.random() < 0.3
    if ragged:
        case["ragged"] = (rows, *(choose.randint(0, rows) for _ in lengths[1:]))
    holds = op in ("hybrid", "scores", "logits", "gather", "importance", "write")
    if holds and choose.random() < 0.3:
        case |= {"stored": choose.choice([*EIGHT_BITS])}
        case |= {"scales": choose.choice(("tokens", "heads", "none")), "layout": Case.layout}
    elif holds and op != "write" and dtype != "fp32" and choose.random() < 0.15:
        case |= {"head_dim": 576, "v_dim": 512, "kv_heads": 1, "rows": min(rows, 4)}
    return Case(op, **case)


def _layer(choose):
    return linear.Layer(
        choose.randint(1, 64), choose.choice((choose.randint(1, 150), 4096 + 32)),
        choose.randint(1, 300), choose.choice(TYPES),
        choose.choice((None, "silu", "gelu", "gelu_tanh")), *_coins(choose, 4),
    )  # fmt: skip


def _codes(choose):
    groups, bits = choose.randint(1, 4), choose.choice((4, 8))
    depth = choose.randint(1, 400) if groups == 1 else groups * choose.choice((32, 64, 128))
    return linear_codes.Codes(
        choose.randint(1, 64), choose.randint(1, 150), depth, groups, bits,
        choose.choice(TYPES), choose.choice(TYPES), *_coins(choose, 1),
        choose.choice((None, "silu", "gelu", "gelu_tanh")), *_coins(choose, 4),
    )  # fmt: skip


def _coins(choose, count):
    return [choose.random() < 0.5 for _ in range(count)]


def _heads(choose):
    head_dim = 8 * choose.randint(1, 16)
    stored = choose.choice((None, None, *EIGHT_BITS.values()))
    heads = choose.choice(((1, 1), (4, 2), (3, 3), (6, 1), (0, 5), (9, 2), (3, 0)))
    return {
        "batch": choose.randint(1, 3),
        "rows": choose.randint(1, 6),
        "heads": heads,
        "stores": heads[1] > 0,
        "head_dim": head_dim,
        "half": choose.randint(1, head_dim // 2),
        "dtype": choose.choice(TYPES),
        "normed": tuple(_coins(choose, 2)),
        "depths": choose.choice((None, "own", "shared")),
        "strided": choose.random() < 0.5,
        "stored": stored,
        "slot": choose.choice((None, 0, 7)),
    }


def _rows(choose):
    shape = (choose.randint(1, 3), choose.randint(1, 5), choose.randint(1, 1500))
    return shape[choose.randint(0, 1) :], choose.choice(TYPES)


def _level(choose):
    vocabulary, strided = choose.randint(40, 2600), choose.random() < 0.5
    if strided:  # so that `apart` begins at a multiple of 16 bytes
        vocabulary = vocabulary // 8 * 8 + 1
    return (
        choose.randint(1, 2), choose.randint(1, 5), vocabulary, choose.choice(TYPES),
        choose.randint(1, 16), choose.randint(0, 64), strided,
    )  # fmt: skip


def _requests(choose):
    return tuple(choose.choice((choose.randint(1, 24), 0)) for _ in range(2)) + (
        choose.randint(1, 33),
    )


def _options(choose, **more):
    trees = choose.choice(("tree", "chain", "forest"))
    return {"tree": trees, "dtype": choose.choice(TYPES), "strided": choose.random() < 0.5, **more}


def _gated(choose):
    k_heads = choose.choice((1, 2))
    options = _options(
        choose, decays=choose.choice(("some", "none", "strong")),
        betas=choose.choice(("some", "ends")),
    )  # fmt: skip
    dims = (8 * choose.randint(1, 12) for _ in range(2))
    return _requests(choose), k_heads, k_heads * choose.choice((1, 2)), *dims, options


def _convolution(choose):
    activation = choose.choice(("silu", None))
    options = _options(choose, activation=activation, bias=choose.random() < 0.5)
    return _requests(choose), choose.randint(1, 300), choose.randint(2, 8), options


def _check_case(op):
    return lambda seed, arch: (drawn(op, seed), checks.check, arch, checks.SCHEDULES)


def _check_of(name, draw, check, *, spread=False):
    def call(seed, arch):
        given = draw(random.Random(f"{name} {seed}"))
        return (given, (lambda x, arch: check(*x, arch)) if spread else check, arch)

    return call


OPERATIONS = (
    *ATTENTION, *RAGGED, "importance", "merge_state", "merge_states", "write", "gumbel",
)  # fmt: skip
# {name: a function of a seed and an architecture: (what is drawn, its check, the check's options)}
CALLS = {op: _check_case(op) for op in OPERATIONS} | {
    "linear": _check_of("linear", _layer, linear.check_layer),
    "codes": _check_of("codes", _codes, linear_codes.check_layer),
    "heads": _check_of("heads", _heads, layer_steps.check_rotated),
    "norms and gates": _check_of("norms", _rows, layer_steps.check_steps, spread=True),
    "children": _check_of("children", _level, levels.check_level),
    "gated delta": _check_of("gated delta", _gated, recurrent.check_gated),
    "convolution": _check_of("convolution", _convolution, recurrent.check_convolution),
    "select": lambda seed, arch: (seed, lambda x, arch: selections.check(arch, [x]), arch),
    "select in layers": lambda seed, arch: (
        seed,
        lambda x, arch: selections.check_layers(arch, [x]),
        arch,
    ),
    "draws": lambda seed, arch: (seed, lambda x, arch: rounds.check_draws(arch, [x]), arch),
    "moves": lambda seed, arch: (seed, lambda x, arch: rounds.check_moves(arch, [x]), arch),
}


def check(name, seed, arch):
    """Execute a random call in two orders; right, or what was raised says which call it was.

    Return why it was refused instead, if this Triton miscompiles it.
    """
    torch.manual_seed(seed)
    given, call, *options = CALLS[name](seed, arch)
    try:
        call(given, *options)
    except Exception as error:
        if "this Triton miscompiles" in str(error):
            return str(error)
        error.add_note(f"{name}: {given}, {arch}")
        raise
    return ""
