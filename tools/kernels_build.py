"""Assemble builds that Hugging Face's `kernels` loads: ``python tools/kernels_build.py FOLDER``.

``FOLDER/build/<variant>`` holds the primitives, `Tree` and `acceptance`, which need torch alone,
and ``metadata.json``. Variants, as kernels 0.17 names them: ``torch-cpu`` (the reference; any
processor), ``torch-cuda`` (by Triton, which comes with all) and, where ``_cpu`` is built, one with
the C++ kernels, which are not linked against torch and serve every version from 2.10 on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/specattn"
VERSION = 1  # of the interface: a number in `get_kernel(..., version=1)`
MODULES = ("acceptance", "attention_plans", "call_forms", "files", "gpu_record", "tree", "warming")
MODULES += ("_public", "_version", "__init__")
FOLDERS = {
    "ops": PACKAGE / "ops",
    "backends": PACKAGE / "backends",
    "reference": ROOT / "reference",
    "triton_kernels": ROOT / "triton_kernels",
}
README = """---
license: apache-2.0
library_name: kernels
---
# specattn

Attention primitives for speculative decoding over long contexts: trees of drafted tokens behind
paged, ragged and 8-bit caches, with their log-sum-exp, scores and selections.

```python
import torch
from kernels import get_local_kernel
from pathlib import Path

specattn = get_local_kernel(Path("."))  # this folder
tree = specattn.Tree([-1, 0, 0])  # a root and two drafts for the token behind it
q, k_cache, v_cache = torch.randn(2, 3, 8, 64), *torch.randn(2, 2, 128, 2, 64)
k_tree, v_tree = torch.randn(2, 2, 3, 2, 64)
lengths = torch.tensor([100, 7], dtype=torch.int32)
out, lse = specattn.hybrid_tree_attention(
    q, k_cache, v_cache, lengths, k_tree, v_tree, tree.mask
)
print(out.shape, lse.shape, specattn.backends())
```
"""


def assemble(folder: Path) -> list[Path]:
    """Write all builds that can be made here, and their README, into a new folder."""
    builds = [
        _build(folder / "build/torch-cpu", "cpu"),
        _build(folder / "build/torch-cuda", "cuda"),
    ]
    if library := next(PACKAGE.glob("_cpu.abi3.so"), None):
        system = f"{platform.machine()}-{platform.system().lower()}"
        variant = folder / f"build/torch-stable-abi210-cpu-{system}"
        builds.append(_build(variant, "cpu", library))
    (folder / "README.md").write_text(README)
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    return builds


def _build(variant: Path, backend: str, library: Path | None = None) -> Path:
    for name, source in FOLDERS.items():
        left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(source, variant / name, ignore=left_out)
    files = [PACKAGE / f"{name}.py" for name in MODULES]
    for path in (*files, *([library] if library else [])):
        shutil.copyfile(path, variant / path.name)
    metadata = _metadata(variant, backend)
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def _metadata(variant: Path, backend: str) -> dict:
    """Return a build's metadata; its identity, and so its operators' namespace, is its digest's."""
    digests = {
        path.relative_to(variant).as_posix(): hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    identity = hashlib.sha256(b"".join([variant.name.encode(), *digests.values()])).hexdigest()
    return {
        "id": f"specattn_{backend}_{identity[:12]}",
        "name": "specattn",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(x).decode() for name, x in digests.items()},
        },
    }


if __name__ == "__main__":
    for build in assemble(Path(sys.argv[1])):
        size = sum(path.stat().st_size for path in build.rglob("*") if path.is_file())
        print(f"{build}: {size / 1e6:.1f} MB")
