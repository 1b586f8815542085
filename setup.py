"""Map the repository's folders into the one package ``specattn``.

Never imports torch: an isolated build must work where torch is not installed yet.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "specattn": "python/specattn",
    "specattn.reference": "reference",
    "specattn.triton_kernels": "triton_kernels",
}


def subpackages(package: str, folder: str) -> list[str]:
    """Return ``package`` and every package below its folder."""
    return [package, *(f"{package}.{name}" for name in find_packages(folder))]


setup(
    package_dir=FOLDERS,
    packages=[name for package, folder in FOLDERS.items() for name in subpackages(package, folder)],
)
