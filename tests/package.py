"""Install what was built as a stranger would: ``python tests/package.py DIST TORCH WORK``.

The wheel also goes into every other CPython from 3.11 on that is found as ``python3.x``. Not
collected by pytest: it installs torch, which takes a minute (`make package`).
"""

import filecmp
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# No compiler is found, nothing of the user's is seen, and nothing can be fetched while it runs.
ALONE = {"CC": "false", "CXX": "false", "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"}


# Without compiler, Triton and transformers the primitives still run.
BARE = """
import sys
sys.modules["triton"] = sys.modules["transformers"] = None
import specattn, torch
q = torch.randn(1, 3, 2, 8)
out, lse = specattn.tree_attention(q, q, q)
assert out.shape == q.shape
assert "triton is not installed" in specattn.backends()["triton"]
assert "is not built" in specattn.backends()["cpu"]
from pathlib import Path
from specattn.embedded import EMBEDDED_TARGET
assert Path(EMBEDDED_TARGET) == Path(specattn.__file__).parent / "embedded/tiny"
print(specattn.__file__)
"""


def run(*command, folder):
    """Run a command away from the checkout; return what it printed, and what it said of it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment | ALONE, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout, done.stderr


def environment(folder):
    """Return the interpreter of a fresh environment, and the command of its pip."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin/python"
    return python, (python, "-m", "pip", "--disable-pip-version-check")


def check_kernels(wheel, torch, work):
    """Run a C++ kernel of the one wheel under every other CPython that is here."""
    code = """
import torch, specattn
from specattn import _cpu
assert specattn.backends()["cpu"] == "available"
q = torch.randn(1, 3, 2, 64)
with specattn.use_backend("cpu"):
    out, lse = specattn.tree_attention(q, q, q)
with specattn.use_backend("reference"):
    torch.testing.assert_close((out, lse), specattn.tree_attention(q, q, q))
drafter = _cpu.SuffixDrafter()
drafter.extend([1, 2, 3, 1, 2], None)
assert drafter.draft(1, 1)[1] == [3] and drafter.match == 2
"""
    for minor in range(11, 16):
        name = f"python3.{minor}"
        found = shutil.which(name)
        usable = found and subprocess.run([found, "-c", "import venv"], capture_output=True)
        if minor == sys.version_info.minor or not usable or usable.returncode:
            continue
        run(found, "-m", "venv", "--clear", work / name, folder=work)
        python = work / name / "bin/python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        run(*pip, torch, folder=work)
        run(*pip, "--no-deps", wheel, folder=work)
        run(python, "-W", "ignore", "-c", code, folder=work)
        print(f"{wheel.name}: its kernels ran under {name}")


def check_wheel(wheel, folder):
    """See that folders of the checkout's root are subpackages, and the embedded target is whole."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        names = set(archive.namelist())
    top = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert top == {"specattn", "specattn_command.py"}, top
    for root, package in {
        "python/specattn": "specattn",
        "reference": "specattn/reference",
        "triton_kernels": "specattn/triton_kernels",
    }.items():
        expected = {
            f"{package}/{path.relative_to(ROOT / root).as_posix()}"
            for kind in ("*.py", "*.css", "*.html")
            for path in (ROOT / root).rglob(kind)
        }
        assert expected <= names, sorted(expected - names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "specattn/py.typed" in names, "users' type checkers should read our annotations"
    tiny = ROOT / "examples/tiny"
    expected = {
        f"specattn/embedded/tiny/{path.relative_to(tiny).as_posix()}": path
        for kind in ("*.safetensors", "*config.json", "tokenizer.json", "README.md")
        for path in tiny.rglob(kind)
    }
    assert {name for name in names if name.startswith("specattn/embedded/")} == expected.keys()
    for name, path in expected.items():
        assert filecmp.cmp(folder / name, path, shallow=False), name


def check_source(source):
    """See that a source distribution has what builds, tests and explains."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "docs", "examples", "python", "reference", "tests", "triton_kernels"):
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
        made = (".pyc", ".so")
        here = {x.as_posix() for x in files if x.suffix not in made and "egg-info" not in str(x)}
        assert here, folder
        assert here <= names, sorted(here - names)
    assert {"Makefile", "LICENSE", "setup.py", "pyproject.toml", "requirements/dev.txt"} <= names


def main(dist, torch, work):
    """Check the wheel with its command, then the source distribution without a compiler."""
    dist, work = Path(dist).resolve(), Path(work).resolve()
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_source(source)
    check_wheel(wheel, work / "content")
    python, pip = environment(work / "wheel")
    run(*pip, "install", "--quiet", torch, folder=work)  # in a step of its own: see the Makefile
    run(*pip, "install", "--quiet", f"{wheel}[cli]", folder=work)
    run(*pip, "check", folder=work)
    specattn = python.with_name("specattn")
    _, said = run(specattn, "demo", "--max-new-tokens", 24, folder=work)
    assert "Outputs identical, token for token: yes" in said, said
    (work / "text.py").write_text("def add(left, right):\n    return left + right\n" * 20)
    page = ("--prompt-file", "text.py", "--max-new-tokens", 12, "--html", "page.html")
    run(specattn, "compare", *page, folder=work)
    assert "<h2>auto</h2>" in (work / "page.html").read_text()
    print(f"{wheel.name}: installed, pip check clean, specattn demo and compare --html ran")
    check_kernels(wheel, torch, work)

    shared, _ = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=work
    )
    python, pip = environment(work / "source")
    own, _ = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=work
    )
    (Path(own.strip()) / "shared.pth").write_text(shared)  # torch is not installed twice
    run(*pip, "uninstall", "--quiet", "--yes", "setuptools", folder=work)  # torch wants a newer one
    run(*pip, "install", "--quiet", "--no-deps", "--ignore-installed", source, folder=work)
    run(*pip, "check", folder=work)
    said, _ = run(python, "-c", BARE, folder=work)
    assert said.startswith(own.strip()), said
    print(f"{source.name}: installed without a compiler, pip check clean")


if __name__ == "__main__":
    main(*sys.argv[1:])
