"""Map the repository's folders into the one package ``specattn`` and build its CPU kernels.

Never imports torch: an isolated build must work where torch is not installed yet.
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

FOLDERS = {
    "specattn": "python/specattn",
    "specattn.reference": "reference",
    "specattn.triton_kernels": "triton_kernels",
}

RECORDS = ("ablations", "evaluation")  # what was measured of the embedded target
# At -O3 the compiler takes five times as long over the sanitizers' checks as at -O1.
LEVEL = "-O1" if "-fsanitize" in os.environ.get("CFLAGS", "") else "-O3"
# Sums are fused where the kernels say so: the same bits from every compiler.
FLAGS = ["-std=c++17", LEVEL, "-g0", "-ffp-contract=off", "-pthread", "-fvisibility=hidden"]
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


class BuildSideBySide(build_ext):
    """Compile as many sources at once as there are processors."""

    def build_extensions(self):
        """Give the compiler one source a time, from several threads: by ccache, where it is."""
        places = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
        if cached := shutil.which("ccache", path=os.pathsep.join(places)):
            for kind in {"compiler_so", "compiler_so_cxx"} & vars(self.compiler).keys():
                setattr(self.compiler, kind, [cached, *getattr(self.compiler, kind)])
        compile_all = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        super().build_extensions()

    def build_extension(self, ext):
        """Compile, unless a checkout installed in a second environment has its kernels already."""
        built = Path("python/specattn", Path(self.get_ext_filename(ext.name)).name)
        parts = [*ext.sources, *ext.depends, "setup.py"]
        if self.editable_mode and built.exists() and not newer_group(parts, built):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(built, target)
        else:
            super().build_extension(ext)


# Those of older builds, for one CPython each, would be imported before the one that is built here.
for stale in Path("python/specattn").glob("_cpu.cpython-*.so"):
    stale.unlink()

# Optional: without a compiler the package installs and the reference serves the CPU. Of Python it
# knows what 3.10 and later share, so one wheel serves every CPython.
cpu = Extension(
    "specattn._cpu",
    # Of what several units define the linker keeps the first: no copy with wider vectors.
    sorted(glob("csrc/cpu/**/*.cpp", recursive=True), key=lambda path: ("/kernels_" in path, path)),
    depends=sorted(glob("csrc/cpu/**/*.h", recursive=True)),
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
    extra_compile_args=[*FLAGS, *WARNINGS],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(
    package_dir={"": "python", **FOLDERS},
    py_modules=["specattn_command"],  # outside the package: see there
    packages=[name for package, folder in FOLDERS.items() for name in subpackages(package, folder)],
    package_data={"specattn": ["py.typed", "*.pyi"], "specattn.pages": ["*.css", "*.html"]},
    ext_modules=[cpu],
    cmdclass={"build_ext": BuildSideBySide, "build_py": BuildWithTarget},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
