"""Map the repository's folders into the one package ``specattn`` and build its CPU kernels.

Never imports torch: an isolated build must work where torch is not installed yet.
"""

import shutil
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {
    "specattn": "python/specattn",
    "specattn.reference": "reference",
    "specattn.triton_kernels": "triton_kernels",
}

RECORDS = ("ablations", "evaluation")  # what was measured of the embedded target
WARNINGS = ["-Wall", "-Wextra", "-Wno-uninitialized"]


def subpackages(package: str, folder: str) -> list[str]:
    """Return ``package`` and every package below its folder."""
    return [package, *(f"{package}.{name}" for name in find_packages(folder))]


class BuildWithTarget(build_py):
    """Add the embedded target with its drafters, so that the demo needs no checkout and no network.

    The sources of the CUDA kernels come too, which are compiled when they are first needed. An
    editable install has no need of either: there the checkout's own are found.
    """

    def run(self):
        """Copy what `specattn.embedded` and `specattn.backends.cuda` look for."""
        super().run()
        if self.editable_mode:
            return
        sources = Path(self.build_lib, "specattn/backends/cuda/sources")
        shutil.copytree("csrc/cuda", sources, dirs_exist_ok=True)
        source, target = Path("examples/tiny"), Path(self.build_lib, "specattn/embedded/tiny")
        configs = {config.parent for config in source.rglob("config.json")}
        for path in (file for folder in configs for file in folder.iterdir()):
            if path.suffix in (".json", ".safetensors", ".md") and path.stem not in RECORDS:
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


# Optional: without a compiler the package installs and the reference serves the CPU.
cpu = Pybind11Extension(
    "specattn._cpu",
    sorted(glob("csrc/cpu/*.cpp")),
    depends=sorted(glob("csrc/cpu/*.h")),
    cxx_std=17,
    # Sums are fused where the kernels say so: the same bits from every compiler.
    extra_compile_args=["-O3", "-ffp-contract=off", "-pthread", *WARNINGS],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(
    package_dir={"": "python", **FOLDERS},
    py_modules=["specattn_command"],  # outside the package: see there
    packages=[name for package, folder in FOLDERS.items() for name in subpackages(package, folder)],
    package_data={"specattn": ["py.typed", "*.pyi"], "specattn.cli": ["*.css", "*.html"]},
    ext_modules=[cpu],
    cmdclass={"build_py": BuildWithTarget},
)
