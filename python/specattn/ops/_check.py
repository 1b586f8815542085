"""Checks of types, shapes, devices and strides, written once for all primitives.

An argument name means the same thing in every primitive, so one table says what each must be.
Everything here is known without reading device memory, so `torch.compile` can trace it, and what
was right once is right again: calls whose tensors have the same forms are looked up, the last ones
without making a key of those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..reference._codes import BLOCK, TILE, packed_bytes
from ..reference._eight_bits import EIGHT_BITS
from ..reference.tree_mask import WORD_BITS
from ._recent import Recent

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIKE_FIRST = "like first"  # the dtype of the first argument of the call, `q` mostly
ACCUMULATED = "accumulated"  # float32, or float64 where the first argument is float64
COLLECTED_LOGITS = "logits"  # bfloat16, or float64 where the first argument is float64
CACHED = "cached"  # as the first argument, or of 8 bits
CONVERTED = "converted"  # of float32, bfloat16, float16 or 8 bits, or float64 as the first argument

WIDEST_KEY, WIDEST_VALUE = 576, 512  # head_dim: of latents, and of their part that is the value
_VALUES = ("v_cache", "v_new", "outs", "out_a")  # which say Dv first


class Spec(NamedTuple):
    """What a tensor must be: one of some shapes, in symbols, and of one of some dtypes."""

    shapes: tuple[tuple[str, ...], ...]
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False
    strided: bool = False  # in the last dimension, too


def _spec(
    shapes: str,
    dtypes: tuple[torch.dtype, ...] | torch.dtype | str,
    optional: bool = False,
    strided: bool = False,
) -> Spec:
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    return Spec(
        tuple(tuple(shape.split()) for shape in shapes.split("|")), dtypes, optional, strided
    )


_TREE_KEYS = _spec("B S Hk D", LIKE_FIRST)
_TREE_VALUES = _spec("B S Hk Dv", LIKE_FIRST)
_SCALE = _spec("| Hk | B N Hk", torch.float32, optional=True, strided=True)
_PAGE_SCALE = _spec("| Hk | pages page_size Hk", torch.float32, optional=True, strided=True)
_STATE_OUT = _spec("B T Hq Dv", FLOATING)
_STATE_LSE = _spec("B T Hq", ACCUMULATED)

SPECS = {
    "q": _spec("B T Hq D", FLOATING),
    "cu_seqlens_q": _spec("B+1", torch.int32),
    "k_new": _TREE_KEYS,
    "v_new": _TREE_VALUES,
    "k_tree": _TREE_KEYS,
    "v_tree": _TREE_VALUES,
    "k_cache": _spec("B N Hk D", CACHED),
    "v_cache": _spec("B N Hk Dv", CACHED),
    "k_scale": _SCALE,
    "v_scale": _SCALE,
    "cache_seqlens": _spec("B", torch.int32),
    "block_table": _spec("B max_pages", torch.int32, optional=True),
    "indices": _spec("B K | B Hk K", torch.int32),
    "index_lengths": _spec("B", torch.int32),
    "index_lengths_per_head": _spec("B Hk", torch.int32),
    "tree_mask": _spec("T S | 1 T S | B T S", torch.bool, optional=True),
    "packed_tree_mask": _spec("T W | 1 T W | B T W", torch.int64, optional=True),
    "sinks": _spec("Hq", FLOATING, optional=True),
    "scores": _spec("B N | B Hk N", (torch.float32, torch.float64)),
    "outs": _spec("n B T Hq Dv", FLOATING),
    "lses": _spec("n B T Hq", ACCUMULATED),
    "out_a": _STATE_OUT,
    "out_b": _spec("B T Hq Dv", LIKE_FIRST),
    "lse_a": _STATE_LSE,
    "lse_b": _STATE_LSE,
    "x": _spec("M K | B T K", FLOATING),
    "weight": _spec("N K", LIKE_FIRST),
    "up": _spec("N K", LIKE_FIRST, optional=True),
    "bias": _spec("N", LIKE_FIRST, optional=True),
    "scale": _spec("N groups", FLOATING, optional=True, strided=True),
    "up_scale": _spec("N groups", FLOATING, optional=True, strided=True),
    "logits": _spec("n V", FLOATING),
    "requests": _spec("n", torch.int64),
    "positions": _spec("n", torch.int64),
    "out": _spec("B T Hq Dv", LIKE_FIRST, optional=True),
    "lse": _spec("B T Hq", ACCUMULATED, optional=True),
}


def _codes(row: str, dtype: torch.dtype, *zeros: torch.dtype) -> dict[str, Spec]:
    """Return what weights are beside a `scale`; zero points are of their dtype, or of another."""
    zero = _spec("N groups", zeros or dtype, optional=True, strided=True)
    weight, up = (_spec(f"N {row}", dtype, optional=optional) for optional in (False, True))
    return {"weight": weight, "up": up, "zero": zero, "up_zero": zero}


_CODES = {
    torch.int8: _codes("K", torch.int8),
    torch.uint8: _codes("packed", torch.uint8),
    torch.float8_e4m3fn: _codes("K", torch.float8_e4m3fn),
    torch.int32: _codes("words", torch.int32, torch.int8, torch.uint8),  # in tiles
}
_OTHER_CODES = _CODES[torch.int8] | {"weight": _spec("N K", tuple(_CODES))}
ROW_LISTS = {  # by whether rows are ragged
    "indices": (_spec("B T K", torch.int32), _spec("tokens K", torch.int32)),
    "index_lengths": (_spec("B T", torch.int32), _spec("tokens", torch.int32)),
}
GUMBEL_OUT = _spec("n V", ACCUMULATED, optional=True)
LINEAR_OUT = {  # by the dimensions of `x`
    2: _spec("M N", LIKE_FIRST, optional=True),
    3: _spec("B T N", LIKE_FIRST, optional=True),
}
COLLECTED = {  # by what is collected
    "scores": _spec("B Hk N", ACCUMULATED),
    "scores of all heads": _spec("B N", ACCUMULATED),
    "logits": _spec("B R Hq N", COLLECTED_LOGITS),
}
_SCALES = {"k_scale": _PAGE_SCALE, "v_scale": _PAGE_SCALE}
_PAGED = {
    "k_cache": _spec("pages page_size Hk D", CACHED),
    "v_cache": _spec("pages page_size Hk Dv", CACHED),
    **_SCALES,
}
_WRITTEN = {  # what is written at `slots`, by the dimensions of `k`
    dimensions: {
        "k": _spec("tokens Hk head_dim | B T Hk head_dim", FLOATING),
        "v": _spec(f"{tokens} Hk v_head_dim", LIKE_FIRST),
        "k_cache": _spec("pages page_size Hk head_dim", CONVERTED),
        "v_cache": _spec("pages page_size Hk v_head_dim", CONVERTED),
        "slots": _spec(tokens, (torch.int64, torch.int32)),
        **_SCALES,
    }
    for dimensions, tokens in ((3, "tokens"), (4, "B T"))
}
_RAGGED_KEYS = _spec("tokens Hk D", LIKE_FIRST)
_RAGGED_VALUES = _spec("tokens Hk Dv", LIKE_FIRST)
_RAGGED = {  # with `cu_seqlens_q`: the rows of all requests, one after the other
    "q": _spec("tokens Hq D", FLOATING),
    "k_new": _RAGGED_KEYS,
    "v_new": _RAGGED_VALUES,
    "k_tree": _RAGGED_KEYS,
    "v_tree": _RAGGED_VALUES,
    "tree_mask": _spec("tokens max_seqlen_q", torch.bool, optional=True),
    "packed_tree_mask": _spec("tokens W", torch.int64, optional=True),
    "out": _spec("tokens Hq Dv", LIKE_FIRST, optional=True),
    "lse": _spec("tokens Hq", ACCUMULATED, optional=True),
}


def _of_states(rows: str) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return what layers with a state take beside `state`, and beside `conv_state`.

    `rows` are the dimensions of rows.
    """
    path = {
        "parents": _spec("T | 1 T | B T" if rows == "B T" else rows, torch.int64, optional=True),
        "nodes": _spec("B P", torch.int64, optional=True),
        "counts": _spec("B", torch.int64),
    }
    gated_delta = {
        "q": _spec(f"{rows} Hk Dk", FLOATING),
        "k": _spec(f"{rows} Hk Dk", LIKE_FIRST),
        "v": _spec(f"{rows} Hv Dv", LIKE_FIRST),
        "g": _spec(f"{rows} Hv | {rows} Hv Dk", ACCUMULATED),
        "beta": _spec(f"{rows} Hv", ACCUMULATED),
        "state": _spec("B Hv Dk Dv", ACCUMULATED),
        "stash": _spec(f"{rows} Hv Ds", ACCUMULATED),
        "out": _spec(f"{rows} Hv Dv", LIKE_FIRST, optional=True),
    }
    causal_conv = {
        "x": _spec(f"{rows} C", FLOATING),
        "weight": _spec("C K", LIKE_FIRST),
        "bias": _spec("C", LIKE_FIRST, optional=True),
        "conv_state": _spec("B K-1 C", LIKE_FIRST),
        "out": _spec(f"{rows} C", LIKE_FIRST, optional=True),
    }
    return gated_delta | path, causal_conv | path


_STATES = {False: _of_states("B T"), True: _of_states("tokens")}  # by whether rows are ragged


class AgreedSizes(dict[str, int]):
    """Sizes, not to be changed; `form` stands for the forms of the tensors that have them."""

    def __init__(self, sizes: dict[str, int]):
        super().__init__(sizes)
        self.form = object()


NEGATED = "a view that is negated when it is read: use resolve_neg()"

_known: dict[tuple, AgreedSizes] = {}  # sizes by the forms of tensors that were found right
_MOST_KNOWN = 1024
_recent = Recent()


class Sense(NamedTuple):
    """What decides about shapes beside the tensors themselves."""

    max_seqlen_q: int | None  # with ragged rows
    per_row: bool  # lists of indices


def check_tensors(
    *, max_seqlen_q: int | None = None, per_row: bool = False, **tensors
) -> dict[str, int]:
    """Check every tensor by its name and return the sizes that their shapes agree on.

    With a `block_table`, caches are pages and N is what a request's pages hold. Without keys of its
    own, a tree has as many as there are rows. With `cu_seqlens_q`, rows are ragged, and T and S are
    `max_seqlen_q`. With `per_row`, every row has indices of its own. The first tensor sets the
    device and, where the table says so, the dtype of the others.

    Raises
    ------
    TypeError
        Something is no tensor, or has another dtype than asked for.
    ValueError
        A shape, a device or a stride is not as asked for, or a gradient would be.
    """
    names, given, sense = tuple(tensors), tuple(tensors.values()), Sense(max_seqlen_q, per_row)
    if torch.compiler.is_compiling():
        return _agreed_sizes(names, _forms(given), sense)
    key = names, sense, torch.is_grad_enabled()
    try:
        if sizes := _recent.recall(key, given):
            return sizes
        forms = _forms(given)
        sizes = _known.get((names, forms, sense))
    except TypeError:  # sizes of a symbolic trace have no hash
        return _agreed_sizes(names, _forms(given), sense)
    if sizes is None:
        sizes = AgreedSizes(_agreed_sizes(names, forms, sense))
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[names, forms, sense] = sizes
    _recent.remember(key, given, sizes)
    return sizes


def check_tensor(
    name: str, x, spec: Spec, q: torch.Tensor, sizes: dict[str, int], *, first_name: str = "q"
) -> None:
    """Check one tensor more against the first, `q`, and the known `sizes`; raises alike."""
    if x is None and spec.optional:
        return
    plain = _form(x, torch.is_grad_enabled())
    form = Form._make(plain) if isinstance(plain, tuple) else plain
    first = Form(q.shape, q.dtype, q.device, q.stride(), wants_gradient=False)
    _check_form(name, form, spec, first_name, first, dict(sizes))


class Form(NamedTuple):
    """All that the checks know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    wants_gradient: bool


def _form(x, graph: bool) -> tuple | type | torch.layout | str:
    """Return the fields of a `Form`, or what an object is that no kernel can read.

    `graph` says whether operations are recorded for gradients.
    """
    if not isinstance(x, torch.Tensor):
        return type(x)
    if x.layout is not torch.strided:
        return x.layout
    if not torch.compiler.is_compiling() and x.is_neg():  # its memory has the opposite sign
        return NEGATED
    return x.shape, x.dtype, x.device, x.stride(), graph and x.requires_grad


def _forms(given: tuple) -> tuple:
    graph = torch.is_grad_enabled()
    return tuple([_form(x, graph) for x in given])


def _agreed_sizes(names: tuple[str, ...], plain_forms: tuple, sense: Sense) -> dict[str, int]:
    forms = {
        name: Form(*form) if isinstance(form, tuple) else form
        for name, form in zip(names, plain_forms, strict=True)
    }
    most = sense.max_seqlen_q
    sizes = {} if most is None else {"T": most, "max_seqlen_q": most}
    for name, form in forms.items():
        if name == "tree_mask":
            keys = sizes.setdefault("S", sizes["T"])
            sizes["W"] = -(-keys // WORD_BITS)
        spec = _spec_of(name, forms, sense.per_row)
        if form is type(None) and spec.optional:
            continue
        _check_form(name, form, spec, names[0], forms[names[0]], sizes)
        if name == "x" and "scale" in forms:
            sizes["packed"] = packed_bytes(sizes["K"])
        if name == "cu_seqlens_q":
            sizes["B"] = sizes["B+1"] - 1
        if name == "conv_state":
            sizes["K"] = sizes["K-1"] + 1
    _check_cache(forms)
    if "groups" in sizes:
        _check_groups(sizes, forms)
    if "max_pages" in sizes:
        sizes["N"] = sizes["max_pages"] * sizes["page_size"]
    _check_sizes(sizes, forms)
    return sizes


def _spec_of(name: str, forms: dict[str, Any], per_row: bool) -> Spec:
    """Return the row of the table for an argument; a few depend on other arguments."""
    form = forms[name]
    if "slots" in forms:
        k = forms["k"]
        return _WRITTEN[4 if isinstance(k, Form) and len(k.shape) == 4 else 3][name]
    if name in _PAGED and forms.get("block_table", type(None)) is not type(None):
        return _PAGED[name]
    if name == "tree_mask" and isinstance(form, Form) and form.dtype == torch.int64:
        name = "packed_tree_mask"
    if per_row and name in ROW_LISTS:
        return ROW_LISTS[name]["cu_seqlens_q" in forms]
    if name == "index_lengths" and len(forms["indices"].shape) == 3:
        name = "index_lengths_per_head"
    if "scale" in forms and name in _CODES[torch.int8]:
        given = weight.dtype if isinstance(weight := forms["weight"], Form) else torch.int8
        return _CODES.get(given, _OTHER_CODES)[name]
    ragged = "cu_seqlens_q" in forms
    for state, specs in zip(("state", "conv_state"), _STATES[ragged], strict=True):
        if state in forms and name in specs:
            return specs[name]
    if ragged and name in _RAGGED:
        return _RAGGED[name]
    return SPECS[name]


def _check_form(
    name: str, form: Any, spec: Spec, first_name: str, first: Form, sizes: dict[str, int]
) -> None:
    """Check a `Form`, or what is none, against its row of the table; add symbols to `sizes`."""
    if not isinstance(form, Form):
        raise TypeError(f"{name}: expected a tensor, got {getattr(form, '__name__', form)}")
    dtypes = allowed_dtypes(spec.dtypes, first.dtype)
    if form.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        like = "" if isinstance(spec.dtypes, tuple) else f" as {first_name} is {first.dtype}"
        raise TypeError(f"{name}: expected {wanted}{like}, got {form.dtype}")
    shape = _matching(spec.shapes, form.shape, sizes)
    if shape is None:
        wanted = " or ".join(_in_words(shape, sizes) for shape in spec.shapes)
        raise ValueError(f"{name}: expected shape {wanted}, got {list(form.shape)}")
    sizes.update({symbol: n for symbol, n in zip(shape, form.shape) if symbol != "1"})  # noqa: B905
    if 0 in form.shape:
        raise ValueError(f"{name}: expected no empty dimension, got shape {list(form.shape)}")
    if form.device != first.device:
        raise ValueError(
            f"{name}: expected device {first.device} as {first_name}, got {form.device}"
        )
    if not spec.strided and form.shape[-1] > 1:
        _check_last_stride(name, form.strides)
    if form.wants_gradient:
        raise ValueError(
            f"{name}: expected no gradient to be asked for, got requires_grad=True; "
            "call it under torch.no_grad()"
        )


def _check_last_stride(name: str, strides: tuple[int, ...]) -> None:
    if strides[-1] != 1:
        wanted = ", ".join(["any"] * (len(strides) - 1) + ["1"])
        raise ValueError(
            f"{name}: expected a contiguous last dimension, strides [{wanted}], "
            f"got strides {list(strides)}"
        )


def _check_groups(sizes: dict[str, int], forms: dict[str, Any]) -> None:
    """Check that groups of codes are of a size that kernels know, and scales of one type.

    On a CPU what a row's groups have must lie side by side.
    """
    depth, groups = sizes["K"], sizes["groups"]
    size = depth // groups
    if forms["weight"].dtype == torch.float8_e4m3fn:
        if groups not in (1, -(-depth // BLOCK)):
            raise ValueError(
                f"scale: expected one group, or {-(-depth // BLOCK)} of {BLOCK} floats each for "
                f"K={depth}, got {groups} groups"
            )
        for name in ("zero", "up_zero"):
            if isinstance(forms[name], Form):
                raise ValueError(f"{name}: expected None beside floats of 8 bits, got a tensor")
    elif groups > 1 and (depth % groups or (size not in (32, 64) and size % BLOCK)):
        raise ValueError(
            f"scale: expected one group, or groups of 32, 64 or a multiple of {BLOCK} codes that "
            f"divide K={depth}, got {groups} groups"
        )
    if forms["weight"].dtype == torch.int32:
        _check_tiles(sizes, forms)
    for name in ("scale", "zero", "up_scale", "up_zero"):
        form = forms[name]
        if not isinstance(form, Form) or form.device.type != "cpu" or groups == 1:
            continue
        _check_last_stride(name, form.strides)
    if isinstance(form := forms["up_scale"], Form) and form.dtype != forms["scale"].dtype:
        raise TypeError(f"up_scale: expected {forms['scale'].dtype} as scale, got {form.dtype}")


def _check_tiles(sizes: dict[str, int], forms: dict[str, Any]) -> None:
    """Check that codes are whole tiles, with zero points of their kind, and all without gaps."""
    rows, depth, words = (sizes[symbol] for symbol in ("N", "K", "words"))
    if rows % TILE or depth % 8 or words not in (depth // 4, depth // 8):
        raise ValueError(
            f"weight: expected tiles of {TILE} rows, [N, K / 4] or [N, K / 8] of K={depth}, got "
            f"[{rows}, {words}]"
        )
    kind = torch.int8 if words == depth // 4 else torch.uint8
    for name in ("zero", "up_zero"):
        if isinstance(form := forms[name], Form) and form.dtype != kind:
            raise TypeError(f"{name}: expected {kind} as codes in tiles are, got {form.dtype}")
    for name in ("weight", "up", "scale", "zero", "up_scale", "up_zero"):
        form = forms[name]
        if isinstance(form, Form) and form.strides[0] != form.shape[1]:
            raise ValueError(f"{name}: expected no gaps in tiles, got strides {form.strides}")


def _check_cache(forms: dict[str, Any]) -> None:
    """Check that K and V are of one type, and that only a cache of 8 bits has scales."""
    if "k_cache" not in forms:
        return
    k = forms["k_cache"].dtype
    if "v_cache" in forms and (v := forms["v_cache"].dtype) != k:
        raise TypeError(f"v_cache: expected {k} as k_cache, got {v}")
    for name in ("k_scale", "v_scale"):
        if isinstance(form := forms.get(name), Form) and k not in EIGHT_BITS:
            raise ValueError(f"{name}: expected None for a cache of {k}, got {list(form.shape)}")


def check_option(name: str, value, holds: bool, expected: str) -> None:
    """Raise ValueError unless `holds`, saying what was expected of argument `name`."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse and scores: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allowed_dtypes(dtypes: tuple[torch.dtype, ...] | str, first: torch.dtype) -> tuple:
    """Return the dtypes that a row of the table allows beside a first argument of `first`."""
    if dtypes == LIKE_FIRST:
        return (first,)
    if dtypes == ACCUMULATED:
        return (accumulation_dtype(first),)
    if dtypes == COLLECTED_LOGITS:
        return (torch.float64 if first == torch.float64 else torch.bfloat16,)
    if dtypes == CACHED:
        return (first, *EIGHT_BITS)
    if dtypes == CONVERTED:
        return ((first,) if first == torch.float64 else FLOATING[:3]) + EIGHT_BITS
    return tuple(dtypes)


def _matching(shapes, actual, sizes: dict[str, int]) -> tuple[str, ...] | None:
    """Return the first of `shapes` that `actual` fits, given the sizes known so far."""
    for shape in shapes:
        if len(shape) == len(actual) and all(
            n == (1 if symbol == "1" else sizes.get(symbol, n))
            for symbol, n in zip(shape, actual)  # noqa: B905
        ):
            return shape
    return None


def _in_words(shape: tuple[str, ...], sizes: dict[str, int]) -> str:
    named = [f"{symbol}={sizes[symbol]}" if symbol in sizes else symbol for symbol in shape]
    return f"[{', '.join(named)}]"


def _check_sizes(sizes: dict[str, int], forms: dict[str, Any]) -> None:
    values = next((name for name in _VALUES if name in forms), "v")
    if "Hk" in sizes and "Hq" in sizes and sizes["Hq"] % sizes["Hk"]:
        raise ValueError(f"q: expected heads in multiples of Hk={sizes['Hk']}, got {sizes['Hq']}")
    if "S" in sizes and sizes["S"] < sizes["T"]:
        raise ValueError(f"q: expected rows up to the tree's S={sizes['S']}, got {sizes['T']}")
    for name, symbol, most in (("q", "D", WIDEST_KEY), (values, "Dv", WIDEST_VALUE)):
        n = sizes.get(symbol, most)
        if "Dk" not in sizes and not (n % 8 == 0 and 8 <= n <= most):
            raise ValueError(f"{name}: expected head_dim in multiples of 8 up to {most}, got {n}")
