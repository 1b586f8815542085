"""The engines that can be peers: where each is installed, and how its process is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.machine import REPOSITORY

WORKERS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Engine:
    """What is known of an engine before it runs."""

    target: str  # of the Makefile; its virtual environment is named after it
    worker: Path
    environment: Callable[[Path, Path, int], dict[str, str]]  # of venv, cache folder, threads
    dtypes: tuple[str, ...]
    options: Mapping[str, str]  # by name, what it means: positive integers, unless `choices` has it
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        """The virtual environment in which its worker runs."""
        return REPOSITORY / f".venv-{self.target}"

    @property
    def python(self) -> Path:
        """The program that runs its worker."""
        return self.venv / "bin" / "python"

    def why_not(self) -> str | None:
        """Return why it cannot be started here, None where it can."""
        if self.python.is_file():
            return None
        return f"{self.venv} is not there; run `make {self.target}`"

    def parse(self, text: str) -> dict[str, Any]:
        """Read ``option=value,...``; raises ValueError for what is no option of it."""
        given: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name in self.choices and value in self.choices[name]:
                given[name] = value
            elif name in self.options.keys() - self.choices and value.isdecimal() and int(value):
                given[name] = int(value)
            else:
                raise ValueError(f"expected {self._known() or 'no option'}, got '{part}'")
        return given

    def _known(self) -> str:
        """Say which options there are."""
        return ", ".join(
            f"{name}={'|'.join(self.choices.get(name, 'N'))} ({means})"
            for name, means in self.options.items()
        )


def _offline(venv: Path, cache: Path, threads: int) -> dict[str, str]:
    """Return what every worker is started with: its threads, and nothing from a network."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _vllm(venv: Path, cache: Path, threads: int) -> dict[str, str]:
    """Return vLLM's environment: one process, its OpenMP as vLLM sets it for its own workers."""
    chosen = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    openmp = venv / "lib" / "libiomp5.so"
    intel = {
        "LD_PRELOAD": str(openmp),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{chosen}]",
        "KMP_BLOCKTIME": "5",  # milliseconds that an idle thread spins
        "KMP_TPAUSE": "0",
    }
    return {
        **_offline(venv, cache, threads),
        **(intel if openmp.is_file() else {}),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": chosen,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        # vLLM 0.32 cannot load on a CPU what it saves whole; torch's own cache serves every length.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CONFIG_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }


ENGINES = {
    "vllm": Engine(
        "vllm",
        WORKERS / "vllm_worker.py",
        _vllm,
        ("float32", "bfloat16", "float16"),
        {"ngram": "tokens drafted by n-gram lookup"},
    ),
    "llama.cpp": Engine(
        "llama-cpp",
        WORKERS / "llama_cpp_worker.py",
        _offline,
        ("float32", "bfloat16"),
        {
            "weights": "their type, else the model's",
            "ngram": "tokens drafted by the binding's prompt lookup",
        },
        {"weights": ("q8_0", "q4_0")},
    ),
}
