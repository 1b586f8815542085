"""What the emulator has executed whole: `python -m tools.ptx.executed KIND` records that it passed.

Of the tests marked ``gpu_code(KIND)`` none runs while the files that decide what GPU kernels do are
those on record for the compiler in use. Contents are compared, not commits: so it holds on any
branch, on the main branch itself and in a clone without history, and what nobody has recorded runs.
Comments and docstrings of Python do not count.
"""

import ast
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("executed.json")
EMULATOR = "tools/ptx/**/*.py"
FILES = {
    "triton": (
        "triton_kernels/*.py",
        "python/specattn/backends/triton.py",
        "python/specattn/warming.py",
        EMULATOR,
    ),
    "cuda": (
        "csrc/cuda/*",
        "python/specattn/backends/cuda/*.py",
        "requirements/cuda.txt",
        EMULATOR,
    ),
}


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def wanted(kind):
    """Return whether every case of a kind is to run: "triton" or "cuda"."""
    mode = os.environ.get("SPECATTN_GPU_CODE") or "changed"
    if mode not in ("changed", "quick", "whole"):
        raise ValueError(f"SPECATTN_GPU_CODE: expected changed, quick or whole, got {mode!r}")
    return mode == "whole" or mode == "changed" and _recorded().get(compiler(kind)) != digest(kind)


def compiler(kind):
    """Return what compiles the kernels of a kind here; FILES name NVRTC's version.

    Python's, by which `digest` reads files, comes with it.
    """
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if kind == "cuda":
        return f"NVRTC, {python}"
    import triton

    return f"Triton {triton.__version__}, {python}"


@functools.cache
def digest(kind, root=ROOT):
    """Return a digest of the files that decide what the kernels of a kind do."""
    paths = {path for pattern in FILES[kind] for path in root.glob(pattern) if path.is_file()}
    total = hashlib.sha256()
    for path in sorted(paths):
        name, content = path.relative_to(root).as_posix().encode(), _content(path)
        total.update(b"%s %d\n%s" % (name, len(content), content))
    return total.hexdigest()[:16]


def _content(path):
    """Return a file's bytes, or of a Python module its statements without their docstrings."""
    if path.suffix != ".py":
        return path.read_bytes()
    module = ast.parse(path.read_bytes())
    for node in ast.walk(module):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(module).encode()


def _recorded():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


if __name__ == "__main__":
    for _kind in sys.argv[1:]:
        _record = _recorded() | {compiler(_kind): digest(_kind)}
        RECORD.write_text(json.dumps(_record, indent=1, sort_keys=True) + "\n")
