"""What runs on any processor holds no instruction that only some have."""

import re
import shutil
import subprocess

import pytest

from specattn import _cpu

if shutil.which("objdump") is None:
    pytest.skip("needs objdump", allow_module_level=True)

# Kernels name their Isa, clones of the compiler their target; both are called behind a check.
CHOSEN = re.compile(r"Avx2|Avx512|Amx|\.avx|\.arch_")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
BEYOND_SSE2 = re.compile(r"^\s*[0-9a-f]+:\s+(v[a-z0-9]+|tile\w+|\w+\s.*%(?:[yz]mm|k[0-7]))\b")


def functions(library):
    """Yield (symbol, its instructions) of every function."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--section=.text", library]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, body = None, []
    for line in listing.splitlines():
        if found := FUNCTION.match(line):
            if name:
                yield name, body
            name, body = found[1], []
        elif name:
            body.append(line)
    yield name, body


def test_what_names_no_isa_runs_anywhere():
    """Of what several units define the linker keeps one copy, perhaps that with wider vectors."""
    found = dict(functions(_cpu.__file__))
    assert any("Avx512" in name for name in found) or not {"avx512"} & set(_cpu.isas())
    wide = {
        name: next(line.strip() for line in body if BEYOND_SSE2.match(line))
        for name, body in found.items()
        if not CHOSEN.search(name) and any(BEYOND_SSE2.match(line) for line in body)
    }
    assert not wide
