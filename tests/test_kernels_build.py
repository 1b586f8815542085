"""A folder that `kernels` loads holds all it imports, under any name, and says what it holds."""

import ast
import base64
import hashlib
import json
import subprocess
import sys

import pytest
from tools.kernels_build import assemble

# As `kernels` imports a build: by its path, under the name of its metadata.
LOAD = """
import importlib.util, json, sys
from pathlib import Path
sys.modules["triton"] = None
sys.meta_path = [x for x in sys.meta_path if "editable" not in str(x)]
import torch

modules = []
for variant in map(Path, sys.argv[1:]):
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    modules.append(importlib.util.module_from_spec(spec))
    sys.modules[name] = modules[-1]
    spec.loader.exec_module(modules[-1])
    assert hasattr(getattr(torch.ops, name), "tree_attention")
assert "specattn" not in sys.modules
q, k, v = torch.randn(3, 1, 5, 2, 64)
for module in modules:
    q_, k_, v_ = q.clone(), k.clone(), v.clone()
    module.merge_state(*module.tree_attention(q_, k_, v_), *module.tree_attention(q_, k_, v_))
    compiled = torch.compile(module.tree_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), modules[0].tree_attention(q, k, v))
print(*(module.backends()["cpu"] for module in modules), sep="; ")
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return assemble(tmp_path_factory.mktemp("kernels") / "specattn")


def test_nothing_is_imported_by_the_name_of_the_package(builds):
    for path in (path for build in builds for path in build.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert not [name for name in names if name.split(".")[0] == "specattn"], path


def test_metadata_names_every_file_with_its_digest(builds):
    ids = set()
    for build in builds:
        metadata = json.loads((build / "metadata.json").read_text())
        ids.add(metadata["id"])
        assert metadata["id"].isidentifier()
        assert metadata["backend"]["type"] in build.name
        files = {x for x in build.rglob("*") if x.is_file() and x.name != "metadata.json"}
        assert metadata["digest"]["files"] == {
            x.relative_to(build).as_posix(): base64.b64encode(
                hashlib.sha256(x.read_bytes()).digest()
            ).decode()
            for x in files
        }
    assert len(ids) == len(builds)


def test_builds_run_beside_each_other(builds):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, *map(str, builds)],
        capture_output=True,
        text=True,
        cwd=builds[0],
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().split("; ")
    expected = ["available" if "abi" in build.name else "is not built" for build in builds]
    assert all(x in y for x, y in zip(expected, said, strict=True)), said
