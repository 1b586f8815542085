"""What a wheel holds, and what importing it asks for."""

import filecmp
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from specattn.cli import errors

ROOT = Path(__file__).parents[1]


def python(code, *, missing=(), path=ROOT, **environment):
    """Run code in a fresh interpreter where the modules `missing` cannot be imported."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    if path != ROOT:  # the checkout's editable install must not lend what the wheel lacks
        blocked += "sys.meta_path = [x for x in sys.meta_path if 'editable' not in str(x)]\n"
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{blocked}{code}"],
        cwd=path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of the checkout: setuptools would leave its build folder in it."""
    folder = tmp_path_factory.mktemp("checkout") / "source"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--wheel-dir", folder, source],
        env=os.environ | {"CC": "false", "CXX": "false"},  # a machine without a compiler
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_the_root_folders_become_subpackages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert top == {"specattn", "specattn_command.py"}
    for folder, package in {
        "python/specattn": "specattn",
        "reference": "specattn/reference",
        "triton_kernels": "specattn/triton_kernels",
    }.items():
        expected = {
            f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
            for kind in ("*.py", "*.css", "*.html")
            for path in (ROOT / folder).rglob(kind)
        }
        assert expected <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "specattn/py.typed" in names, "users' type checkers should read our annotations"


def test_the_wheel_imports_without_compiler_triton_and_transformers(wheel, tmp_path):
    """And carries the embedded target: weights, what loads them, and their licence."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        names = {name for name in archive.namelist() if name.startswith("specattn/embedded/")}
    printed = python(
        "import specattn, torch\n"
        "q = torch.randn(1, 3, 2, 8)\n"
        "out, lse = specattn.tree_attention(q, q, q)\n"
        "print(specattn.__file__); print(tuple(out.shape))\n"
        "print(specattn.backends()['triton']); print(specattn.backends()['cpu'])\n"
        "from specattn.embedded import EMBEDDED_TARGET\nprint(EMBEDDED_TARGET)",
        missing=("triton", "transformers"),
        path=tmp_path,
        PYTHONPATH=str(tmp_path),
        TRITON_INTERPRET="0",
    ).splitlines()
    assert printed[0].startswith(str(tmp_path))
    assert printed[1] == "(1, 3, 2, 8)"
    assert "triton is not installed" in printed[2]
    assert "is not built" in printed[3]

    tiny = ROOT / "examples" / "tiny"
    expected = {
        f"specattn/embedded/tiny/{path.relative_to(tiny).as_posix()}"
        for kind in ("*.safetensors", "*config.json", "tokenizer.json", "README.md")
        for path in tiny.rglob(kind)
    }
    assert names == expected
    embedded = tmp_path / "specattn" / "embedded" / "tiny"
    for name in names:
        stored = embedded / Path(name).relative_to("specattn/embedded/tiny")
        assert filecmp.cmp(stored, tiny / stored.relative_to(embedded), shallow=False)
    assert printed[4] == str(embedded)


def test_extras_say_what_they_add():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {"hf", "cli", "train", "bench", "vllm", "cuda"} <= extras.keys()
    for package, extra in errors.EXTRAS.items():
        assert any(line.startswith(package) for line in extras[extra]), package


def test_the_package_loads_what_is_heavy_only_for_decoding_and_says_what_to_install():
    loaded, said = python(
        "import specattn\nprint({'triton', 'transformers', 'typer', 'rich'} & set(sys.modules))\n"
        "sys.modules['transformers'] = None\n"
        "try:\n    import specattn.decoding\nexcept ImportError as error:\n    print(error)"
    ).splitlines()
    assert loaded == "set()"
    assert "specattn[hf]" in said


def test_setup_does_not_import_torch():
    assert python(
        "import runpy\nsys.argv = ['setup.py', '--name']\nrunpy.run_path('setup.py')",
        missing=("torch",),
    ).endswith("specattn")
