"""Ragged queries in the emulator: the cases whose requests differ in rows."""

from dataclasses import replace

import torch
from tests.engine_layouts import in_engine
from tests.ragged import lists_of, make_ragged

import specattn
from specattn import reference

NAMES = {
    "ragged hybrid": "hybrid_tree_attention",
    "ragged scores": "verify_attention",
    "ragged logits": "verify_attention",
    "ragged gather": "sparse_gather_attention",
}


def _arguments(case, batch):
    """Return the primitive's arguments for a batch in any dtype."""
    gather, in_cache = case.op == "ragged gather", case.tree == "in_cache"
    mask = None if case.tree == "chain" else "packed"
    arguments = batch.arguments(paged=case.paged, in_cache=in_cache, mask=mask, new=gather)
    arguments["softcap"] = case.softcap
    if gather:
        return arguments | lists_of(batch, "row" if case.per_row else "head", size=40)
    arguments["window"] = case.window
    if case.op != "ragged hybrid":
        arguments["collect"] = case.op.removeprefix("ragged ")
    return arguments


def _batch(case, dtype):
    batch = make_ragged(
        case.ragged,
        case.lengths,
        parents="chain" if case.tree == "chain" else None,
        q_heads=case.kv_heads * case.group,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=16,
        dtype=dtype,
        tree_in_cache=case.tree == "in_cache",
    )
    if case.layout == type(case).layout:
        return batch
    return replace(batch, whole=in_engine(batch.whole, case.layout))


def call_of(case, dtype):
    """Return what calls the primitive."""
    arguments = _arguments(case, _batch(case, dtype))
    return lambda: getattr(specattn, NAMES[case.op])(**arguments)


def expect(case, dtype):
    """Return (float64 result, what PyTorch makes in the dtype, tolerance) for every result."""
    batch, primitive = _batch(case, dtype), getattr(reference, NAMES[case.op])
    exact, rough, single = (
        primitive(**_arguments(case, batch.to(t))) for t in (torch.float64, dtype, torch.float32)
    )
    expected = [(exact[0], rough[0], 1e-6), (exact[1], single[1], 2e-6)]
    if case.op == "ragged logits":  # rounded once
        expected.append((exact[2], exact[2].bfloat16(), 1e-6))
    elif case.op == "ragged scores":
        expected.append((exact[2], single[2], 2e-6))
    return expected
