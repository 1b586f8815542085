"""A folder that `kernels` loads holds all it imports, under any name, and says what it holds."""

import ast
import base64
import hashlib
import json
from pathlib import Path

import pytest
from tools.kernels_build import assemble


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


def test_what_is_imported_lies_beside(builds):
    """That the builds run, each beside the others, is shown by `make kernels`."""
    for build in builds:
        for path in build.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom) or node.level == 0:
                    continue
                folder = path.parents[node.level - 1]
                assert folder == build or build in folder.parents, path
                names = [node.module] if node.module else [one.name for one in node.names]
                for name in names:
                    found = folder.joinpath(*name.split("."))
                    beside = [found.with_suffix(".py"), found / "__init__.py"]
                    # What is not built is not imported: `backends` says so.
                    assert any(map(Path.exists, beside)) or name == "_cpu", (path, name)


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
