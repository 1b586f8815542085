"""The rates of a machine, from its data sheet or measured by ``bench/run_kernels.py``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .models import ModelShape

Shares = tuple[tuple[int, float], ...]
"""(rows, share of the ceiling that binds), ascending in rows."""

SCHEMA = 2  # of the files that bench/run_kernels.py writes

_ASSUMED: Mapping[str, Shares] = {
    "hybrid_tree_attention": ((1, 0.85), (512, 0.6)),
    "sparse_gather_attention": ((1, 0.7),),
    "select_topk": ((1, 0.1),),
    "linear": ((1, 0.85), (64, 0.8), (4096, 0.75)),
}


@dataclass(frozen=True)
class Machine:
    """Ceilings, and the share of them that code attains.

    Attributes
    ----------
    name : str
    bandwidth : float
        Bytes per second that a plain read or copy attains.
    matrix : float
        Operations per second that a large product of the model's type attains.
    memory : float or None
        Bytes; None where that is no limit worth stating.
    layer_seconds : float
        What the host spends on one layer when every operator is launched eagerly.
    overlaps : bool
        Whether the host runs ahead of the device, as with a GPU; else their times add up.
    shares : mapping of str to Shares
        By primitive, and "linear" for products with weights; attention counts the rows that share
        a KV head, T * Hq / Hk.
    source : str
        Where the figures come from.
    results : Path or None
        The file that calibrated it.
    cold_seconds : float
        What a call takes longer when its code and the host's data are cold too, as in the rows of
        a result file; in a decode loop they are warm.
    """

    name: str
    bandwidth: float
    matrix: float
    memory: float | None
    layer_seconds: float
    overlaps: bool
    shares: Mapping[str, Shares]
    source: str
    results: Path | None = None
    cold_seconds: float = 0.0

    def share(self, name: str, rows: float) -> float:
        """Return the share that a primitive attains, interpolated over the logarithm of rows."""
        table = self.shares[name]
        for (below, low), (above, high) in zip(table, table[1:], strict=False):
            if rows < above:
                if rows <= below:
                    return low
                weight = math.log(rows / below) / math.log(above / below)
                return low + weight * (high - low)
        return table[-1][1] if rows > table[0][0] else table[0][1]

    def seconds(self, name: str, rows: float, moved: float, operations: float) -> float:
        """Return the time of a task: its roofline over the share attained."""
        bound = max(moved / self.bandwidth, operations / self.matrix)
        return bound / self.share(name, rows)

    @classmethod
    def from_results(cls, path: Path, dtype: str = "bf16") -> Machine:
        """Read a file that ``bench/run_kernels.py --json`` wrote.

        Attention is calibrated on the contiguous rows of the file's first shape at its largest
        context, products with weights on a CPU on the largest layer of `linear_few_rows`; other
        rows are left for `checks`. Raises ValueError where the file is missing, is
        no such file, or has no row of this type.
        """
        run, rows = read_results(path)
        if run.get("schema") != SCHEMA:
            raise ValueError(f"--gpu: {path} is no file of run_kernels.py, or of another version")
        ceilings = run["ceilings"]
        rows = [row for row in rows if row["time"] and row["dtype"] == dtype]
        # A merge of two small states is next to no work: what it takes is the start.
        starts = [row["time"]["median"] for row in rows if row["op"] == "merge_state"]
        cold = min(starts, default=0.0)
        shares = dict(_ASSUMED)
        for op in _ASSUMED.keys() - {"linear"}:
            if found := {packed_rows(row): _share(row, cold) for row in calibrating(op, rows)}:
                shares[op] = tuple(sorted(found.items()))
        if "hybrid_tree_attention" not in {row["op"] for row in rows}:
            raise ValueError(f"--gpu: {path} has no row of hybrid_tree_attention in {dtype}")
        on_gpu = run["machine"]["device"] == "cuda"
        if own := None if on_gpu else calibrating("linear_few_rows", rows):
            # Of several layers the largest comes last, which is most of a model.
            shares["linear"] = tuple(
                sorted({row["rows"]: _share(row, cold) for row in own}.items())
            )
        elif linear := ceilings.get("linear", {}).get(dtype):
            shares["linear"] = tuple(
                (int(count), _linear_share(int(count), rate, ceilings, dtype))
                for count, rate in sorted(linear.items(), key=lambda item: int(item[0]))
            )
        return cls(
            name=run["machine"]["name"],
            bandwidth=ceilings["bandwidth"],
            matrix=ceilings["matrix"][dtype],
            memory=None,
            layer_seconds=EAGER_LAYER if on_gpu else CPU_LAYER,
            overlaps=on_gpu,
            shares=shares,
            source=f"measured: {path}, commit {run['commit']}",
            results=path,
            cold_seconds=cold,
        )

    def with_layer_seconds(self, seconds: float) -> Machine:
        """Return the same machine with another host."""
        return replace(self, layer_seconds=seconds)


def read_results(path: Path) -> tuple[dict, list[dict]]:
    """Return the run and the records of a JSON Lines file; ValueError where it is none."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        run, *rows = records
        if run["kind"] != "run":
            raise KeyError("kind")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no result file of this project's benchmarks") from None
    return run, rows


def packed_rows(row: Mapping) -> int:
    """Return how many rows of a result row share a KV head."""
    shape = ModelShape.named(row["shape"])
    return row["rows"] * shape.q_heads // shape.kv_heads


def calibrating(op: str, rows: list[dict]) -> list[dict]:
    """Return the rows that a machine's shares are read from: one shape at its largest context.

    Of two rows of one shape, such as selections for one and for all heads, the one that moves more
    bytes comes last.
    """
    found = [row for row in rows if row["op"] == op and not row.get("page_size")]
    found = [row for row in found if row["time"] and row["shape"] == found[0]["shape"]]
    context = max((row["context"] for row in found), default=0)
    found = [row for row in found if row["context"] == context]
    return sorted(found, key=lambda row: row["bytes_read"])


def _share(row: Mapping, cold: float) -> float:
    """Return the share of memory or matrix rate that a row attained once it had started."""
    bound = max(row["bounds"]["memory"], row["bounds"]["matrix"])
    return bound / max(row["time"]["median"] - cold, bound)


def _linear_share(rows: int, rate: float, ceilings: Mapping, dtype: str) -> float:
    """Return the share of the roofline that a product with weights read at `rate` attains."""
    size = 4 if dtype == "fp32" else 2
    bound = max(1 / ceilings["bandwidth"], 2 * rows / size / ceilings["matrix"][dtype])
    return min(1.0, bound * rate)


# Seconds of host work for a layer launched operator by operator. On a GPU: flash attention under
# transformers decodes 57 tokens/s with the 32 layers of an 8B model on an A100 (LongSpec, Table 1),
# which is the host's speed, not the memory's.
EAGER_LAYER = 0.55e-3
CPU_LAYER = 0.8e-3


def _gpu(name: str, bandwidth: float, matrix: float, memory: float, source: str) -> Machine:
    return Machine(name, bandwidth, matrix, memory, EAGER_LAYER, True, _ASSUMED, source)


_SHEET = "data sheet, of which a copy attains about 0.9 and a product 0.75; shares are assumed"
MACHINES = {
    machine.name: machine
    for machine in (
        _gpu("a100", 1.8e12, 235e12, 80e9, _SHEET),
        _gpu("h100", 3.0e12, 740e12, 80e9, _SHEET),
        _gpu("h200", 4.3e12, 780e12, 141e9, "copy and product measured; shares are assumed"),
        _gpu("b200", 7.2e12, 1680e12, 180e9, _SHEET),
        _gpu("l40s", 0.78e12, 270e12, 48e9, _SHEET),
        _gpu("rtx-4090", 0.91e12, 124e12, 24e9, _SHEET),
    )
}
"""Machines by name; `Machine.source` says where their rates come from."""
