"""Checks of types, shapes, devices and strides, written once for all primitives.

What each argument must be is one table (`_specs`). Everything here is known without reading device
memory, so `torch.compile` can trace it, and what was right once is right again: calls whose tensors
have the same forms are looked up, the last ones without making a key of those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..reference._codes import BLOCK, TILE, packed_bytes
from ..reference._eight_bits import EIGHT_BITS
from ..reference.tree_mask import WORD_BITS
from ._recent import Recent
from ._specs import (
    CODES,
    OTHER_CODES,
    PAGED,
    RAGGED,
    ROW_LISTS,
    SPECS,
    STATES,
    WRITTEN,
    Spec,
    allowed_dtypes,
)

WIDEST_KEY, WIDEST_VALUE = 576, 512  # head_dim: of latents, and of their part that is the value
_VALUES = ("v_cache", "v_new", "outs", "out_a")  # which say Dv first


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
        return WRITTEN[4 if isinstance(k, Form) and len(k.shape) == 4 else 3][name]
    if name in PAGED and forms.get("block_table", type(None)) is not type(None):
        return PAGED[name]
    if name == "tree_mask" and isinstance(form, Form) and form.dtype == torch.int64:
        name = "packed_tree_mask"
    if per_row and name in ROW_LISTS:
        return ROW_LISTS[name]["cu_seqlens_q" in forms]
    if name == "index_lengths" and len(forms["indices"].shape) == 3:
        name = "index_lengths_per_head"
    if "scale" in forms and name in CODES[torch.int8]:
        given = weight.dtype if isinstance(weight := forms["weight"], Form) else torch.int8
        return CODES.get(given, OTHER_CODES)[name]
    ragged = "cu_seqlens_q" in forms
    for state, specs in zip(("state", "conv_state"), STATES[ragged], strict=True):
        if state in forms and name in specs:
            return specs[name]
    if ragged and name in RAGGED:
        return RAGGED[name]
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
