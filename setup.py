"""Map the repository's folders into the one package ``specattn`` and build its CPU kernels.

Never imports torch: an isolated build must work where torch is not installed yet.
"""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

FOLDERS = {
    "specattn": "python/specattn",
    "specattn.reference": "reference",
    "specattn.triton_kernels": "triton_kernels",
}

WARNINGS = ["-Wall", "-Wextra", "-Wno-uninitialized"]


def subpackages(package: str, folder: str) -> list[str]:
    """Return ``package`` and every package below its folder."""
    return [package, *(f"{package}.{name}" for name in find_packages(folder))]


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
    package_data={"specattn": ["py.typed", "*.pyi"]},
    ext_modules=[cpu],
)
