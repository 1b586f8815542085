"""What importing the package asks for; what a wheel holds, `make package` checks (package.py)."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from specattn.cli import errors

ROOT = Path(__file__).parents[1]


def python(code, *, missing=()):
    """Run code in a fresh interpreter where the modules `missing` cannot be imported."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{blocked}{code}"],
        cwd=ROOT,
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_extras_say_what_they_add():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {"hf", "cli", "train", "bench", "vllm", "cuda"} <= extras.keys()
    for package, extra in errors.EXTRAS.items():
        assert any(line.startswith(package) for line in extras[extra]), package


def test_a_folder_of_the_packages_name_beside_a_script_does_not_hide_it(tmp_path):
    """As this checkout is one for who works in the folder that it was cloned into."""
    (tmp_path / "specattn").mkdir()
    code = "from importlib.util import find_spec; print(find_spec('specattn').origin)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == ROOT / "python/specattn/__init__.py"


def test_the_package_loads_what_is_heavy_only_for_decoding_and_says_what_to_install():
    """Its operators are defined when it was imported."""
    loaded, said = python(
        "import specattn, torch\ntorch.ops.specattn.hybrid_tree_attention.default\n"
        "print({'triton', 'transformers', 'typer', 'rich'} & set(sys.modules))\n"
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
