"""Finds an index that Triton 3.6's LLVM miscompiles, in a kernel's PTX.

The column of a thread in a fragment of `mma`, ``(tid & 3) << 1``, is packed with ``tid << 31`` into
64 bits. The lower half should be cut to 32 bits; instead a product carries ``tid >> 1`` into the
upper one, and the column becomes ``(tid >> 1) | (tid & 3) << 1``::

    mul.wide.u32 %rd36, %r2, 2147483648;
    or.b64 %rd39, %rd36, %rd38;
    mov.b64 {_, %r8}, %rd39;

Masks then hide and show the wrong keys. Every kernel with it that was executed in an emulator was
wrong; no kernel by Triton 3.9 has it.
"""

import re

_PRODUCT = re.compile(r"mul\.wide\.[us]32\s+(%rd\d+), %r\d+, (\d+);")
_UNION = re.compile(r"or\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+);")
_UPPER = re.compile(r"mov\.b64\s+\{(?:_|%r\d+), (%r\d+)\}, (%rd\d+);")
_LEAST = 1 << 16  # a factor that carries what a block has of threads beyond 32 bits
_known: dict[str, list[str]] = {}  # kernel's hash -> registers


def carried(ptx: str) -> list[str]:
    """Return the registers that hold such an index."""
    products = {
        register
        for register, factor in _PRODUCT.findall(ptx)
        if int(factor) >= _LEAST and int(factor).bit_count() == 1
    }
    unions = {whole for whole, a, b in _UNION.findall(ptx) if a in products or b in products}
    return [register for register, whole in _UPPER.findall(ptx) if whole in unions]


def why_not(compiled) -> str | None:
    """Return why a compiled kernel must not run, or None; each is searched once."""
    ptx = getattr(compiled, "asm", {}).get("ptx")
    if ptx is None:  # a GPU of another make, or a test
        return None
    if compiled.hash not in _known:
        _known[compiled.hash] = carried(ptx)
    if not _known[compiled.hash]:
        return None
    return f"a shape that this Triton miscompiles: an index of {compiled.metadata.name} is wrong"
