"""Run solutions of a dataset on the CPU, by flashinfer-bench's own parts.

    pip install flashinfer-bench==0.1.2 && python bench/definitions/check.py build/flashinfer-bench

Its schema reads everything, its builders build reference and solution, its loader makes the inputs,
its statistics compare. Its benchmark itself times by CUDA events and lists CUDA devices only, so
there are no times here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from flashinfer_bench.bench.config import BenchmarkConfig
from flashinfer_bench.bench.evaluators.utils import normalize_result
from flashinfer_bench.bench.utils import compute_error_stats, gen_inputs, load_safetensors
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import TraceSet


def main(root: str) -> int:
    """Print the largest error of every workload; return how many solutions fail."""
    dataset, builders = TraceSet.from_path(root), BuilderRegistry.get_instance()
    config = BenchmarkConfig(atol=1e-2, rtol=1e-2)  # its defaults, for bfloat16
    failures = 0
    for name, definition in dataset.definitions.items():
        reference = builders.build_reference(definition)
        for solution in dataset.solutions[name]:
            if "cpu" not in solution.spec.target_hardware:
                print(f"{solution.name}: not run, it needs CUDA")
                continue
            runnable = builders.build(definition, solution)
            for trace in dataset.workloads[name]:
                workload = trace.workload
                tensors = load_safetensors(definition, workload, Path(root))
                inputs = gen_inputs(definition, workload, "cpu", tensors)
                with torch.no_grad():
                    results = [
                        normalize_result(definition, run(*inputs), "cpu")
                        for run in (reference, runnable)
                    ]
                errors = []
                for wanted, got in zip(*results, strict=True):
                    largest, _, exceeds, _ = compute_error_stats(got, wanted, config)
                    unlike = got.dtype != wanted.dtype or not bool(got.isfinite().all())
                    failures += exceeds or unlike
                    errors.append(f"{largest:.1e}")
                print(f"{workload.uuid} {workload.axes}: {', '.join(errors)}")
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1]) else 0)
