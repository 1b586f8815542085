"""What a wheel holds, and what importing it asks for."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # Built from a copy: setuptools would leave its build folder in the checkout.
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "examples", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_out)
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
            for path in (ROOT / folder).rglob("*.py")
        }
        assert expected <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "specattn/py.typed" in names, "users' type checkers should read our annotations"


def test_the_wheel_imports_without_compiler_triton_and_transformers(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    printed = python(
        "import specattn, torch\n"
        "q = torch.randn(1, 3, 2, 8)\n"
        "out, lse = specattn.tree_attention(q, q, q)\n"
        "print(specattn.__file__); print(tuple(out.shape))\n"
        "print(specattn.backends()['triton']); print(specattn.backends()['cpu'])",
        missing=("triton", "transformers"),
        path=tmp_path,
        PYTHONPATH=str(tmp_path),
        TRITON_INTERPRET="0",
    ).splitlines()
    assert printed[0].startswith(str(tmp_path))
    assert printed[1] == "(1, 3, 2, 8)"
    assert "triton is not installed" in printed[2]
    assert "is not built" in printed[3]


def test_decoding_without_transformers_says_what_to_install():
    printed = python(
        "try:\n    import specattn.decoding\nexcept ImportError as error:\n    print(error)",
        missing=("transformers",),
    )
    assert "specattn[hf]" in printed


def test_importing_the_package_loads_neither_triton_nor_transformers():
    heavy = "{'triton', 'transformers', 'typer', 'rich'}"
    assert python(f"import specattn\nprint({heavy} & set(sys.modules))") == "set()"


def test_setup_does_not_import_torch():
    assert python(
        "import runpy\nsys.argv = ['setup.py', '--name']\nrunpy.run_path('setup.py')",
        missing=("torch",),
    ).endswith("specattn")
