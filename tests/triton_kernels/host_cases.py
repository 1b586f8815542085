"""What the host does for calls of the primitives, recorded by `stub_driver`; run in its process."""

import inspect
import itertools
import random
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import count
from unittest import mock

import torch
import triton
from specattn.triton_kernels import _configs, _trial
from specattn.triton_kernels._ahead import compiling
from specattn.triton_kernels.children import best_children
from specattn.triton_kernels.draw import draw_and_walk
from specattn.triton_kernels.move_path import move_path
from tools.ptx import stub_driver
from tools.ptx.stub_driver import OnGPU, Recorded, on_gpu

import specattn
from specattn.backends import select

HEADS, GROUP, D = 8, 5, 128


@contextmanager
def stubbed():
    """Record launches; nothing runs that could differ from what another kernel gives."""
    with stub_driver.stubbed() as stub, mock.patch.object(_trial, "passes", return_value=True):
        yield stub


def tensor(*shape, dtype=torch.bfloat16, device=0, skip=0, pad=0):
    """Return memory [*shape] on a GPU; ``skip`` elements in, rows ``pad`` elements apart."""
    size = list(shape)
    size[-1] += pad
    whole = torch.empty(torch.Size(size).numel() + 512, dtype=dtype)
    first = -whole.data_ptr() % 256 // whole.element_size() + skip
    rows = whole[first : first + torch.Size(size).numel()].view(size)
    return on_gpu(rows[..., : shape[-1]], device)


def ints(*shape, device=0, dtype=torch.int32):
    """Return memory of an integer type."""
    return tensor(*shape, dtype=dtype, device=device)


def state(B, T, device=0, dtype=torch.bfloat16):
    """Return `out` and `lse`."""
    heads = HEADS * GROUP
    lse = tensor(B, T, heads, dtype=torch.float32, device=device)
    return {"out": tensor(B, T, heads, D, dtype=dtype, device=device), "lse": lse}


def hybrid(B=1, T=4, N=4096, *, tree=True, mask=True, pages=0, device=0, **options):
    """Return the arguments of a hybrid pass."""
    make = {key: options.pop(key) for key in ("skip", "pad", "dtype") if key in options}
    stored, scales_of = options.pop("stored", None), options.pop("scales", None)
    at, plain = {"device": device} | make, {"device": device}
    dtype = {"dtype": make.get("dtype", torch.bfloat16)}
    cache = (B * N // pages, pages) if pages else (B, N)
    keys = {"k_tree": None, "v_tree": None}
    if tree:
        keys = {name: tensor(B, T, HEADS, D, **plain, **dtype) for name in keys}
    cached = {"dtype": stored} if stored else dtype
    scales = {}
    if scales_of:
        shape = (*cache, HEADS) if scales_of == "tokens" else (HEADS,)
        names = ("k_scale", "v_scale")
        scales = {name: tensor(*shape, dtype=torch.float32, **plain) for name in names}
    return {
        "q": tensor(B, T, HEADS * GROUP, D, **at),
        "k_cache": tensor(*cache, HEADS, D, **plain, **cached),
        "v_cache": tensor(*cache, HEADS, D, **plain, **cached),
        **scales,
        "cache_seqlens": ints(B, **plain),
        **keys,
        "tree_mask": ints(T, 1, dtype=torch.int64, **plain) if tree and mask else None,
        "block_table": ints(B, N // pages, **plain) if pages else None,
        **state(B, T, device, **dtype),
        **options,
    }


def gather(B=1, T=4, N=4096, K=512, *, tree=True, mask=True, per_row=False, device=0, **cached):
    """Return the arguments of a gathering pass."""
    given = hybrid(B, T, N, tree=tree, mask=mask, device=device, **cached)
    names = {"k_tree": "k_new", "v_tree": "v_new"}
    given.pop("cache_seqlens")
    lists = T if per_row else HEADS
    chosen = {
        "indices": ints(B, lists, K, device=device),
        "index_lengths": ints(B, lists, device=device),
        "per_row": per_row,
    }
    return {names.get(name, name): value for name, value in given.items()} | chosen


def linear(rows=4, outputs=4096, depth=1024, *, in_place=False, device=0):
    """Return the arguments of a layer with a residual, which may be where its result goes."""
    x, weight = tensor(rows, depth, device=device), tensor(outputs, depth, device=device)
    residual, out = (tensor(rows, outputs, device=device) for _ in range(2))
    return {"x": x, "weight": weight, "residual": residual, "out": residual if in_place else out}


def latents(*, shared):
    """Return a hybrid pass over latents: values are views of keys, or lie as such do elsewhere."""
    call = hybrid() | {"q": tensor(1, 4, 40, 576), "out": tensor(1, 4, 40, 512)}
    for part, tokens in (("cache", 4096), ("tree", 4)):
        keys, others = (tensor(1, tokens, 1, 576) for _ in range(2))
        call |= {f"k_{part}": keys, f"v_{part}": (keys if shared else others)[..., :512]}
    return call


def on_device(device):
    """Yield (primitive, arguments), every one of them, with tensors on one GPU."""
    plain = {"device": device}
    whole = hybrid(2, 4, **plain)
    yield specattn.hybrid_tree_attention, whole
    collected = tensor(2, HEADS, 4096, dtype=torch.float32, **plain)
    yield specattn.verify_attention, whole | {"collected": collected}
    yield specattn.sparse_gather_attention, gather(2, **plain)
    names = ("q", "k_cache", "cache_seqlens")
    yield specattn.importance_scores, {name: whole[name] for name in names}
    first, second = state(2, 4, **plain), state(2, 4, **plain)
    states = {"out_a": first["out"], "lse_a": first["lse"]}
    states |= {"out_b": second["out"], "lse_b": second["lse"]}
    yield specattn.merge_state, states | state(2, 4, **plain)
    stack = {
        "outs": tensor(5, 2, 4, HEADS * GROUP, D, **plain),
        "lses": tensor(5, 2, 4, HEADS * GROUP, dtype=torch.float32, **plain),
    }
    yield specattn.merge_states, stack | state(2, 4, **plain)
    new = {name: tensor(2, 4, HEADS, D, **plain) for name in ("k", "v")}
    caches = {name: whole[name] for name in ("k_cache", "v_cache")}
    yield specattn.write_kv, new | caches | {"slots": ints(2, 4, dtype=torch.int64, **plain)}
    yield specattn.linear_few_rows, linear(**plain)
    yield from _layers_with_a_state(plain)


def _layers_with_a_state(plain):
    """Yield the primitives of one, of two requests of four rows, with all that they write."""
    single, long = {"dtype": torch.float32, **plain}, {"dtype": torch.int64, **plain}
    q, gate = tensor(2, 4, HEADS, D, **plain), tensor(2, 4, HEADS, **single)
    state, stash = tensor(2, HEADS, D, D, **single), tensor(2, 4, HEADS, 2 * D + 1, **single)
    tree = {"q": q, "k": q, "v": q, "g": gate, "beta": gate, "state": state, "stash": stash}
    tree |= {"parents": ints(2, 4, **long), "out": tensor(2, 4, HEADS, D, **plain)}
    path = {"nodes": ints(2, 3, **long), "counts": ints(2, **long)}
    yield specattn.gated_delta_tree, tree
    yield specattn.gated_delta_commit, {"state": state, "stash": stash, **path}
    x, kept = (tensor(2, size, 512, **plain) for size in (4, 3))
    conv = {"x": x, "weight": tensor(512, 4, **plain), "bias": None, "conv_state": kept}
    yield specattn.causal_conv_tree, conv | {"out": tensor(2, 4, 512, **plain)}
    yield specattn.causal_conv_commit, {"conv_state": kept, "x": x, **path}


def places(device):
    """Return the (device, stream) of every launch, twice each, and the current device after."""
    with stubbed() as stub:
        for function, arguments in on_device(device):
            for _ in range(2):
                function(**arguments)
        return {(x.device, x.stream) for x in stub.launches}, len(stub.launches), stub.device


# No size or stride of these calls is as great, and no address as small: torch's libraries alone
# take more of a heap that follows the program, as it does where that is not position-independent.
_HEAP = 2**24


def spelled(launches, arguments):
    """Return launches with names for addresses: of arguments theirs, of workspaces by number."""
    names = {x.data_ptr(): name for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    numbers = count()

    def spell(value):
        if type(value) is int and value >= _HEAP:
            if value not in names:
                names[value] = f"workspace {next(numbers)}"
            return names[value]
        return value

    return [
        Recorded(x.kernel, x.grid, x.device, x.stream, tuple(map(spell, x.arguments)))
        for x in launches
    ]


def _calls():
    """Yield calls that differ in one thing each, so that a plan of one is wrong for another."""
    yield from (hybrid(), hybrid(T=5), hybrid(B=2), hybrid(N=8192), hybrid(device=1))
    yield from (hybrid(tree=False), hybrid(mask=False), hybrid(pages=16), hybrid(pages=32))
    yield from (hybrid(pad=16), hybrid(skip=8), hybrid(skip=4), hybrid(dtype=torch.float16))
    yield from (hybrid(T=32), hybrid(T=33), hybrid(T=32, N=8192), hybrid(T=32, pages=64))
    yield from (hybrid(T=32, pages=16), hybrid(T=32, skip=4))
    yield from (hybrid(softcap=2.0), hybrid(softmax_scale=0.5), hybrid(softmax_scale=0.25))
    yield from (hybrid(mask=False, window=98), hybrid(mask=False, window=99))
    yield hybrid() | {"sinks": tensor(HEADS * GROUP, dtype=torch.float32)}


def calls_with_latents():
    """Return calls of equal forms, of which one has values that are views of its keys."""
    return [latents(shared=True), latents(shared=False)]


def calls_of_layers():
    """Return layers, of which some write what they add to."""
    return [linear(), linear(in_place=True), linear(5, in_place=True), linear(64)]


def planned_and_plain(calls=_calls, primitive=specattn.hybrid_tree_attention):
    """Make all calls thrice in some order, and each of them as it is written too.

    Return (the calls whose launches differ, how often a call was planned or could not be).
    """
    different, as_written = set(), 0
    order = list(enumerate(calls())) * 3
    random.Random(0).shuffle(order)
    with stubbed() as stub:
        kernel, _ = select.chosen(primitive.__name__, torch.device("cuda"), torch.bfloat16)
        kernel = inspect.getclosurevars(kernel).nonlocals["prepared"]  # behind what declines calls
        function = mock.Mock(wraps=kernel.function)
        for number, call in order:
            both = []
            for way in (kernel.__class__.__call__, unplanned):
                stub.launches.clear()
                with (
                    mock.patch.object(kernel, "function", function),
                    mock.patch.object(kernel.__class__, "__call__", way),
                ):
                    primitive(**call)
                both.append(spelled(stub.launches, call))
            if both[0] != both[1]:
                different.add(number)
        as_written = function.call_count - len(order)
    return different, as_written, len(order)


def unplanned(kernel, *args, form):
    """Run a prepared kernel as it is written."""
    kernel.function(*args)


def operators_within_a_window(function, serving=stubbed):
    """Return the operators of torch's that compute something, and how many kernels are launched.

    A call with a window and a packed tree mask, once to plan it and once more; ``serving`` is the
    driver that records launches.
    """
    given, computing = hybrid(2, 8, window=64, pages=16), []
    if function is specattn.verify_attention:
        given["collected"] = tensor(2, HEADS, 4096, dtype=torch.float32)
    dispatch = OnGPU.__torch_function__.__func__

    def watch(cls, operator, types, args=(), kwargs=None):
        result = dispatch(cls, operator, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            known = {x.untyped_storage().data_ptr() for x in args if type(x) is OnGPU}
            if type(result) is OnGPU and result.untyped_storage().data_ptr() not in known:
                computing.append(operator.__name__)
        return result

    with serving() as stub, mock.patch.object(OnGPU, "__torch_function__", classmethod(watch)):
        for _ in range(2):
            stub.launches.clear()
            function(**given)
    return [name for name in computing if "empty" not in name], len(stub.launches)


FUNCTIONS = {
    "hybrid": specattn.hybrid_tree_attention,
    "verify": specattn.verify_attention,
    "gather": specattn.sparse_gather_attention,
    "gather per row": specattn.sparse_gather_attention,
    "tree": specattn.tree_attention,
}


def _all_sizes(name, **cached):
    """Call a primitive for T up to 64 and B up to 8, with trees and with chains."""
    given = gather if name.startswith("gather") else hybrid
    if name == "gather per row":
        cached["per_row"] = True
    for B, T, mask in itertools.product(range(1, 9), range(1, 65), (True, False)):
        arguments = given(B, T, mask=mask, **cached)
        if name == "tree":
            names = {"q": "q", "k_tree": "k_new", "v_tree": "v_new", "tree_mask": "tree_mask"}
            arguments = {names[key]: arguments[key] for key in names}
        if name == "verify":
            arguments["collect_rows"] = (-1,)
        FUNCTIONS[name](**arguments)


def variants(name, **cached):
    """Return how many variants of which kernels a primitive compiles over all sizes.

    ``cached`` says what 8 bits a cache is ``stored`` in, and its ``scales``.
    """
    with stubbed() as stub:
        _all_sizes(name, **cached)
        return Counter(kernel for kernel, *_ in stub.variants)


def variants_of_layers():
    """Return how many variants of which kernels serve all rows of some layers of one width."""
    with stubbed() as stub:
        for rows, depth in itertools.product(range(1, 65), (2048, 4096, 14336)):
            specattn.linear_few_rows(**linear(rows, depth=depth))
        return Counter(kernel for kernel, *_ in stub.variants)


def unproved(name):
    """Return which kernels a primitive launches where Gluon's has not passed."""
    passed = mock.patch.object(_configs, "_hopper_has_passed", return_value=False)
    with stubbed() as stub, passed:
        _all_sizes(name)
        return {launch.kernel for launch in stub.launches}


def variants_after_warmup(**cached):
    """Return what is compiled before and after `specattn.warmup` over all sizes."""
    with stubbed() as stub:
        model = {"q_heads": HEADS * GROUP, "kv_heads": HEADS, "head_dim": D, "capacity": 4096}
        if cached:
            model |= {"cache_dtype": cached["stored"], "cache_scales": cached["scales"]}
        specattn.warmup(**model, max_rows=64, max_batch=8, selection=0.125, collect_rows=(-1,))
        before = len(stub.variants)
        for name in ("hybrid", "verify", "gather"):
            _all_sizes(name, **cached)
        return before, stub.variants[before:]


def ahead():
    """Return what is launched and compiled where kernels are compiled ahead, and what behind it."""
    calls = (
        lambda: [FUNCTIONS["hybrid"](**hybrid(T=rows)) for rows in (1, 3, 12, 40)],
        lambda: [specattn.linear_few_rows(**linear(rows)) for rows in range(1, 65)],
    )
    with stubbed() as stub:
        threads = set()
        compile = stub.compile

        def noting(*given, **options):
            threads.add(threading.get_ident())
            return compile(*given, **options)

        with mock.patch.object(triton.compiler, "compile", noting):
            with compiling():
                for call in calls:
                    call()
            launched, before = len(stub.launches), len(stub.variants)
            distinct = len(set(stub.variants))
            for call in calls:
                call()
        same_thread = threading.get_ident() in threads
        return launched, before, distinct, stub.variants[before:], len(stub.launches), same_thread


def _round(B=1, T=8, depth=4, *, seed=None, warm=False):
    """Return the arguments of a draw and walk, and of a move behind it."""
    long, single = {"dtype": torch.int64}, {"dtype": torch.float32}
    report = ints(B, 4 + depth, **long)
    tree = ints(B, T, **long), ints(1, T, **long), ints(1, T)
    warmth = tensor(B, **single) if warm else None
    nodes = ints(B, depth, **long)
    drawn = tensor(B, T, 32000), *tree, warmth, ints(2, B, **long), seed, nodes, report
    return drawn, (tensor(2, 2, B, 64, HEADS, D), nodes, report[:, 2], ints(B))


def rounds():
    """Return how often rounds of every kind, thrice each, ran as they are written, and how many."""
    kinds = [
        {"T": T, "seed": seed, "warm": warm}
        for T, seed, warm in ((8, None, False), (8, 7, False), (9, 2**40, True), (8, -5, True))
    ]
    with stubbed():
        functions = []
        for prepared in (draw_and_walk, move_path):
            prepared.plans.clear()
            function = mock.patch.object(prepared, "function", mock.Mock(wraps=prepared.function))
            functions.append(function.start())
        for kind in kinds * 3:
            drawn, moved = _round(**kind)
            draw_and_walk(*drawn)
            move_path(*moved)
        mock.patch.stopall()
        for prepared in (draw_and_walk, move_path):
            prepared.plans.clear()
    return [function.call_count for function in functions], len(kinds)


def variants_of_levels():
    """Return how many variants of which kernels find the children of trees of all usual sizes."""
    sizes = itertools.product((1, 2, 3), (1, 2, 3, 5, 8, 10, 16), (1, 4, 8, 10, 16), (0, 40))
    with stubbed() as stub:
        for B, nodes, width, before in sizes:
            words = -(-(before + nodes * (width + 1)) // 64)
            logits, masks = tensor(B, nodes, 32000), ints(B, nodes, words, dtype=torch.int64)
            best_children(logits, tensor(B, nodes, dtype=torch.float32), masks, before, width)
        return Counter(kernel for kernel, *_ in stub.variants)


def variants_of_writes():
    """Return how many variants of which kernels write chunks of prompts and the rows of passes."""
    with stubbed() as stub:
        for B, T in itertools.product((1, 2, 3), (1, 2, 7, 16, 33, 100, 2048)):
            new, cache = tensor(B, T, HEADS, D), tensor(B, 4096, HEADS, D)
            specattn.write_kv(new, new, cache, cache, ints(B, T, dtype=torch.int64))
        return Counter(kernel for kernel, *_ in stub.variants)


def starts_early(cuda):
    """Return whether launches may start early by a driver of that CUDA, and offline."""
    driver = mock.patch.object(_configs, "_cuda_of_driver", return_value=cuda)
    with driver, _configs.forced(arch="sm_90"):
        return tuple(_configs.starts_early(torch.device(kind)) for kind in ("cuda", "meta"))
