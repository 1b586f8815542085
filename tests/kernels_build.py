"""Load builds with Hugging Face's `kernels`, in an environment that has nothing else but torch.

``python tests/kernels_build.py FOLDER TORCH KERNELS WORK``. Not collected by pytest: it installs
torch, which takes a minute (`make kernels`).
"""

import re
import sys
from pathlib import Path

if __package__ is None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.package import environment, run

LOAD = """
import importlib.util
from pathlib import Path
import torch
from kernels import get_loaded_kernels, get_local_kernel
from kernels._rust import Digest

assert importlib.util.find_spec("specattn") is None, "it would hide what is missing"
builds = sorted((Path.cwd() / "build").iterdir())
chosen = get_local_kernel(Path.cwd(), backend="cpu")
loaded = {path.name: get_local_kernel(path) for path in builds}
for one in get_loaded_kernels():
    path = Path(one.module.__file__).parent
    one.metadata.digest.validate(Digest.hash_variant(one.metadata.digest.algorithm, path))
best = max(loaded, key=len)
assert chosen is loaded[best], (chosen, best)
assert chosen.backends()["cpu"] == "available", chosen.backends()

q, k, v = torch.randn(3, 1, 5, 2, 64)
results = {name: module.tree_attention(q, k, v)[0] for name, module in loaded.items()}
for name, result in results.items():
    torch.testing.assert_close(result, results[best])
for name, module in loaded.items():
    assert ("available" if "abi" in name else "is not built") in module.backends()["cpu"], name
    state = module.tree_attention(q, k, v)
    module.merge_state(*state, *state)
    compiled = torch.compile(module.tree_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), state)
spaces = {module.__name__ for module in loaded.values()}
assert len(spaces) == len(loaded) and all(hasattr(torch.ops, x) for x in spaces), spaces
print(*loaded)
"""


def main(folder, torch, kernels, work):
    """Install torch and `kernels` into a fresh environment; load all builds, run the README."""
    folder, work = Path(folder).resolve(), Path(work).resolve()
    python, pip = environment(work / "kernels-venv")
    run(*pip, "install", "--quiet", torch, folder=folder)  # in a step of its own: see the Makefile
    run(*pip, "install", "--quiet", kernels, folder=folder)
    said, _ = run(python, "-W", "ignore", "-c", LOAD, folder=folder)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    printed, _ = run(python, "-W", "ignore", "-c", code, folder=folder)
    assert "torch.Size([2, 3, 8, 64]) torch.Size([2, 3, 8])" in printed, printed
    print(
        f"loaded in one process by {kernels}, digests right: {said.strip()}; the README's code ran"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
