"""What the emulator catches: break the compiled kernels in every place, one place at a time.

`python -m tools.ptx.tests.mutate [NAME ...]` removes each barrier, weakens each wait, removes each
fence and drops each zero-fill of the kernels of some cases, and prints a table. A mutant is
*caught* if it faults or its results are wrong. Otherwise it is *harmless*: its run has no two
accesses that are unordered without the removed instruction, since races are found by happens-before
and not by luck, and under two schedules it returns the same bits as the original.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace

from ..faults import Fault
from ..machine import Options
from .case import Case
from .checks import run

SCHEDULES = (Options(count=False), Options(count=False, copies="issue", warps=1, blocks=1))

# At least four tiles per split, so that a pipeline of three stages turns over.
PIPELINED = {"lengths": (400, 70), "kv_heads": 1, "split_size": 256}
# Eleven tiles, so that the Hopper kernel's ring of buffers comes round.
ROUND = {"lengths": (700, 70), "kv_heads": 1, "split_size": 1024}
TARGETS = {
    "hybrid": ("sm_80", Case("hybrid", **PIPELINED)),
    "hybrid paged window": ("sm_90", Case("hybrid", paged=True, window=300, **PIPELINED)),
    "hybrid wgmma": ("sm_90", Case("hybrid", rows=16, hopper=False, **PIPELINED)),
    "hopper": ("sm_90", Case("hybrid", rows=16, **ROUND)),
    "hopper rows": ("sm_90", Case("hybrid", rows=32, paged=True, **ROUND)),  # without TMA
    "hopper paged": ("sm_90", Case("logits", rows=16, paged=True, window=600, **ROUND)),
    "hopper 128 rows": ("sm_90", Case("hybrid", rows=32, **ROUND)),
    "hopper scores": ("sm_90", Case("scores", rows=32, window=600, **ROUND)),
    "hybrid 64 rows": ("sm_80", Case("hybrid", rows=16, **PIPELINED)),
    "hybrid D 80": ("sm_90", Case("hybrid", "fp16", head_dim=80, **PIPELINED)),
    "gather": ("sm_90", Case("gather", paged=True, **PIPELINED)),
    "scores": ("sm_80", Case("scores", window=300, **PIPELINED)),
    "logits wgmma": ("sm_90", Case("logits", rows=16, hopper=False, **PIPELINED)),
    "hybrid fp32": ("sm_80", Case("hybrid", "fp32", lengths=(70,), kv_heads=1, split_size=64)),
    "combine": ("sm_90", Case("merge_states", rows=1)),
    "select": ("sm_90", Case("select", lengths=(3900,), kv_heads=1)),
    "hybrid splits": ("sm_90", Case("hybrid", split_size=None, lengths=(300, 0), sinks=True)),
    "importance": ("sm_90", Case("importance", paged=True, lengths=(130, 0))),
}
# A last tile that is not whole is its team's first, second and third.
UNEVEN = PIPELINED | {"lengths": (403, 70, 9), "first_unused": True}
SELECTED = UNEVEN | {"lengths": (803, 70, 9)}  # six keys of ten, so that two splits are left
# One team of one warp; teams of two warps with a barrier of their own; tables; scores across warps.
CUDA_TARGETS = {
    "cuda hybrid": ("sm_80", Case("hybrid", **UNEVEN)),
    "cuda hybrid 64 rows": ("sm_90a", Case("hybrid", rows=16, **UNEVEN)),
    "cuda hybrid paged": ("sm_80", Case("hybrid", paged=True, **UNEVEN)),
    "cuda gather": ("sm_90a", Case("gather", "fp16", head_dim=80, paged=True, **SELECTED)),
    "cuda scores 64 rows": ("sm_80", Case("scores", rows=16, window=300, **PIPELINED)),
    "cuda window": ("sm_80", Case("hybrid", window=300, **PIPELINED)),
    "cuda merged": ("sm_80", Case("hybrid", lengths=(1300,), kv_heads=1, split_size=64)),
    "cuda merge_states": ("sm_80", Case("merge_states", rows=2)),
    "cuda merge_state": ("sm_80", Case("merge_state", rows=2)),
    "cuda select": ("sm_80", Case("select", lengths=(4500, 9), kv_heads=1)),
    "cuda select in shares": ("sm_80", Case("select", lengths=(300, 9, 0), kv_heads=1)),
}


@dataclass(frozen=True)
class Mutation:
    """Changes to instructions of one kernel: {index: instruction, or None to remove it}."""

    kind: str
    kernel: str
    changes: dict
    source: str = ""

    def apply(self, kernel):
        """Return the changed kernel; other kernels stay as they are."""
        if kernel.name != self.kernel:
            return kernel
        removed = {"guard": None, "name": "nop", "operands": ()}
        instructions = list(kernel.instructions)
        for index, changed in self.changes.items():
            instructions[index] = changed or replace(instructions[index], **removed)
        return replace(kernel, instructions=instructions)

    def __str__(self):
        return f"{self.kind} at {self.kernel}:{min(self.changes)} ({self.source})"


def mutations(kernel):
    """Yield all mutations of a kernel."""
    last_move = {}
    for i in kernel.instructions:
        changes = None
        if i.name.startswith(("bar.sync", "barrier.sync", "bar.warp.sync")):
            changes = "barrier removed", {i.index: None}
        elif i.name == "cp.async.wait_group":
            changes = "copy wait weakened", {i.index: _weakened(i)}
        elif i.name.startswith("wgmma.wait_group"):
            changes = "product wait weakened", {i.index: _weakened(i)}
        elif i.name.startswith("wgmma.fence"):
            changes = "register fence removed", {i.index: None}
        elif i.name.startswith("mbarrier.try_wait"):  # and the jump back to it
            changes = "mbarrier wait removed", {i.index: None, i.index + 1: None}
        elif i.name.startswith("mbarrier.arrive") and "expect_tx" not in i.name:
            changes = "arrival removed", {i.index: None}
        elif i.name.startswith("fence.proxy.async"):
            changes = "proxy fence removed", {i.index: None}
        elif i.name.startswith(("fence.", "membar")):
            changes = "fence removed", {i.index: None}
        elif ".acq_rel." in i.name:
            changes = (
                "order of an atomic dropped",
                {i.index: replace(i, name=i.name.replace("acq_rel", "relaxed"))},
            )
        elif i.name.startswith(("cp.async.ca", "cp.async.cg")) and len(i.operands) == 4:
            changes = "zero-fill of a copy dropped", {i.index: replace(i, operands=i.operands[:3])}
        elif i.name.startswith("ld.global") and i.guard:
            registers = i.operands[0].strip("{} ").replace(" ", "").split(",")
            moves = {last_move[r]: None for r in registers if r in last_move}
            changes = ("zero-fill of a load dropped", moves) if moves else None
        elif i.name.startswith(("mov.b", "mov.u")) and not i.guard:
            last_move[i.operands[0]] = i.index
        if changes:
            yield Mutation(changes[0], kernel.name, changes[1], i.source)


def _weakened(instruction):
    return replace(instruction, operands=(str(int(instruction.operands[0]) + 1),))


def reached(mutation, original):
    """Return whether the case executes what a mutation changes."""
    return any(
        launch.executed[at]
        for launch in original.launches
        if launch.name == mutation.kernel
        for at in mutation.changes
    )


def verdict(case, arch, mutation, original, emulate=None):
    """Return ("caught", by what) or ("harmless", "")."""
    for options in SCHEDULES:
        try:
            outcome = run(case, arch, options, mutation.apply, emulate)
        except Fault as fault:
            return "caught", fault.kind
        except AssertionError:
            return "caught", "result"
        if not outcome.same_bits(original):
            return "caught", "bits"
    return "harmless", ""


def sweep(name, chosen=lambda mutation: True):
    """Yield (mutation, verdict, by what) for all mutants of a target, or those chosen.

    What the case does not execute is "unreached".
    """
    arch, case, emulate = _target(name)
    original, kernels = _original(arch, case, emulate)
    for kernel in kernels:
        for mutation in mutations(kernel):
            if not chosen(mutation):
                continue
            if reached(mutation, original):
                yield (mutation, *verdict(case, arch, mutation, original, emulate))
            else:
                yield mutation, "unreached", ""


def _target(name):
    """Return (architecture, case, what serves it instead of the Triton kernels)."""
    if name in TARGETS:
        return (*TARGETS[name], None)
    from ..cuda_launch import emulated_cuda  # needs CuPy
    from .selections import emulated_shares

    return (*CUDA_TARGETS[name], emulated_shares if "shares" in name else emulated_cuda)


def _original(arch, case, emulate):
    original = run(case, arch, SCHEDULES[0], emulate=emulate)
    return original, {launch.name: launch.kernel for launch in original.launches}.values()


def first_caught(name, kinds, most=8):
    """Return {kind: by what its last mutant that is caught}; at most so many of each are tried."""
    arch, case, emulate = _target(name)
    original, kernels = _original(arch, case, emulate)
    caught, tried = {}, Counter()
    for mutation in reversed([m for kernel in kernels for m in mutations(kernel)]):
        kind = mutation.kind
        if kind in kinds and kind not in caught and tried[kind] < most:
            tried[kind] += 1
            result, how = verdict(case, arch, mutation, original, emulate)
            if result == "caught":
                caught[kind] = how
    return caught


def barriers(name):
    """Return how often removing a barrier of a target was caught, and how often harmless."""
    found = sweep(name, lambda mutation: mutation.kind == "barrier removed")
    return Counter(result for _, result, _ in found)


def without_guards():
    """Return what the emulator says of a kernel whose loads are all executed."""

    def change(kernel):
        instructions = [
            replace(i, guard=None) if i.name.startswith("ld.global") else i
            for i in kernel.instructions
        ]
        return replace(kernel, instructions=instructions)

    try:
        run(Case("hybrid", rows=2, group=3), "sm_90", change=change)
    except Fault as fault:
        return str(fault)
    return "no fault"


def table(names):
    """Sweep targets; print every mutant and return {(target, kind): Counter of verdicts}."""
    rows = {}
    for name in names:
        for mutation, result, how in sweep(name):
            rows.setdefault((name, mutation.kind), Counter())[f"{result} {how}".strip()] += 1
            print(f"{name}: {mutation}: {result} {how}", flush=True)
    return rows


def summary(rows):
    """Return the table as Markdown."""
    lines = [
        "| case | mutation | mutants | caught | harmless | unreached | caught by |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, kind), counts in rows.items():
        total, harmless, rest = sum(counts.values()), counts["harmless"], counts["unreached"]
        how = Counter({k.split()[1]: n for k, n in counts.items() if " " in k})
        by = ", ".join(f"{kind} {n}" for kind, n in how.most_common())
        caught = total - harmless - rest
        lines.append(f"| {name} | {kind} | {total} | {caught} | {harmless} | {rest} | {by} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(table(sys.argv[1:] or TARGETS)))
