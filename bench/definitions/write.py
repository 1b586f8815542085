"""Write definitions, solutions and workloads in flashinfer-bench's layout.

    python bench/definitions/write.py build/flashinfer-bench

Workloads are calls that decoding with the embedded target made: trees of suffix drafts, and Vegas'
verifications and drafts; their caches are cut into pages, in another order. FlashInfer's custom
mask is a rival of one definition, which needs CUDA. ``check.py`` runs what runs without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from references import FLASHINFER, OURS, SPARSE_GATHER, TREE_VERIFY, VERIFY_SCORES
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import specattn
from specattn import kv_cache
from specattn.decoding import Method, Suffix, Vegas, generate
from specattn.embedded import EMBEDDED_TARGET

PAGE_SIZE, PROMPT, TOKENS = 16, 700, 48
WANTED = 4  # workloads of a definition
AUTHOR = "specattn"
VEGAS = Vegas(6, per_head=True, min_tokens=64)
Tensors = dict[str, torch.Tensor]


@contextmanager
def calls_of(op: str) -> Iterator[list[Tensors]]:
    """Note the tensors of a cache's calls of a primitive, each call of one layer."""
    public: Callable = getattr(kv_cache, op)
    names = public.__code__.co_varnames[: public.__code__.co_argcount]
    noted: list[Tensors] = []

    def note(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        noted.append({k: x.clone() for k, x in given.items() if isinstance(x, torch.Tensor)})
        return public(*args, **options)

    setattr(kv_cache, op, note)
    try:
        yield noted
    finally:
        setattr(kv_cache, op, public)


def decoded(op: str, method: Method) -> list[Tensors]:
    """Decode with a method, by the model's own modules; return its calls of a primitive."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    text = Path(specattn.__file__).with_name("tree.py").read_text()
    prompt = tokenizer(text)["input_ids"][:PROMPT]
    with calls_of(op) as noted:
        generate(model, [prompt], method, max_new_tokens=TOKENS, temperature=0, compile="off")
    # Others prove that the model computes the same by our attention, on a few tokens.
    return [call for call in noted if call["k_cache"].shape[1] >= PROMPT]


def paged(call: Tensors) -> Tensors:
    """Return a call's caches [1, N, Hk, D] as pages in another order, and their table."""
    k, v = call["k_cache"], call["v_cache"]
    pages = -(-k.shape[1] // PAGE_SIZE)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    found = {"block_table": order[None].int()}
    for name, cache in (("k_cache", k), ("v_cache", v)):
        padded = cache.new_zeros(pages * PAGE_SIZE, *cache.shape[2:])
        padded[: cache.shape[1]] = cache[0]
        found[name] = torch.empty_like(padded.view(pages, PAGE_SIZE, *cache.shape[2:]))
        found[name][order] = padded.view_as(found[name])
    return found


def mask_of(call: Tensors, rows: int) -> torch.Tensor:
    """Return a tree's packed mask [rows, words]; a chain's where the call has none."""
    mask = call.get("tree_mask")
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        mask = specattn.reference.tree_mask.pack_tree_mask(mask)
    return mask.reshape(-1, mask.shape[-1])


def tree_verify_paged() -> Iterator[Tensors]:
    """Verifications of drafted trees, more than one row each."""
    for call in decoded("hybrid_tree_attention", Suffix()):
        rows = call["q"].shape[1]
        if 1 < rows < 64:
            yield {
                "q": call["q"][0],
                **paged(call),
                "qo_indptr": torch.tensor([0, rows], dtype=torch.int32),
                "cache_seqlens": call["cache_seqlens"],
                "tree_mask": mask_of(call, rows),
            }


def verify_scores() -> Iterator[Tensors]:
    """Verifications of Vegas, which score the prefix for the next drafts."""
    for call in decoded("verify_attention", VEGAS):
        rows = call["q"].shape[1]
        yield {
            "q": call["q"],
            **paged(call),
            "cache_seqlens": call["cache_seqlens"],
            "tree_mask": mask_of(call, rows)[None],
        }


def sparse_gather_paged() -> Iterator[Tensors]:
    """Draft steps of Vegas, over what was selected of the prefix."""
    for call in decoded("sparse_gather_attention", VEGAS):
        given = {name: call[name] for name in ("q", "k_new", "v_new")}
        lists = {name: call[name] for name in ("indices", "index_lengths")}
        if int(lists["index_lengths"].min()) >= 0:  # -1: a layer that reads everything
            yield {**given, **paged(call), **lists}


# Shapes of inputs in their order, and of outputs. What is not an axis's name below is one of these.
CACHE = {"k_cache": "pages page_size num_kv_heads head_dim"}
CACHE["v_cache"] = CACHE["k_cache"]
ROWS = "batch num_rows num_qo_heads head_dim"
DEFINITIONS: dict[str, tuple[Callable[[], Iterator[Tensors]], str, dict, dict]] = {
    "tree_verify_paged": (
        tree_verify_paged,
        TREE_VERIFY,
        {"q": "total_q num_qo_heads head_dim", **CACHE, "qo_indptr": "len_indptr"}
        | {
            "block_table": "batch max_pages",
            "cache_seqlens": "batch",
            "tree_mask": "total_q words",
        },
        {"output": "total_q num_qo_heads head_dim", "lse": "total_q num_qo_heads"},
    ),
    "verify_scores": (
        verify_scores,
        VERIFY_SCORES,
        {"q": ROWS, **CACHE, "block_table": "batch max_pages", "cache_seqlens": "batch"}
        | {"tree_mask": "batch num_rows words"},
        {"output": ROWS, "lse": "batch num_rows num_qo_heads"}
        | {"scores": "batch num_kv_heads max_pages page_size"},
    ),
    "sparse_gather_paged": (
        sparse_gather_paged,
        SPARSE_GATHER,
        {"q": ROWS, **CACHE, "block_table": "batch max_pages"}
        | {"indices": "batch num_kv_heads selected", "index_lengths": "batch num_kv_heads"}
        | {"k_new": "batch num_rows num_kv_heads head_dim"}
        | {"v_new": "batch num_rows num_kv_heads head_dim"},
        {"output": ROWS, "lse": "batch num_rows num_qo_heads"},
    ),
}
DESCRIPTIONS = {
    "tree_verify_paged": "Rows of drafted trees attend to a paged prefix, which every row sees, "
    "and to their tree, which lies behind it in the cache: bit j of word w of tree_mask is node "
    "64 w + j. lse is to base 2.",
    "verify_scores": "Verification that also scores the prefix for a sparse draft: the mean of the "
    "scaled logits of the first and the last row over each KV head's queries; 0 beyond it.",
    "sparse_gather_paged": "Rows attend to the selected tokens of a paged prefix, a list per KV "
    "head, and causally to each other. lse is to base 2.",
}
CONSTANT = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")


def tensor_specs(shapes: dict[str, str], dtypes: dict[str, str]) -> dict:
    """Return the tensors of a definition, bfloat16 where nothing else is said."""
    return {
        name: {"shape": shape.split(), "dtype": dtypes.get(name, "bfloat16")}
        for name, shape in shapes.items()
    }


def axes_of(shapes: dict[str, str], tensors: Tensors) -> dict[str, int]:
    """Return the sizes of all axes."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        for axis, size in zip(shape.split(), tensors[name].shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"{name}: expected {axis}={sizes[axis]}, got {size}")
    return sizes


def write_definition(root: Path, op: str) -> int:
    """Write a definition with its solutions and workloads; return how many of these."""
    workloads, reference, inputs, outputs = DEFINITIONS[op]
    found = list(workloads())
    picked = found[:: max(1, len(found) // WANTED)][:WANTED]
    sizes = axes_of(inputs, picked[0])
    name = "{}_h{}_kv{}_d{}_ps{}".format(op, *(sizes[axis] for axis in CONSTANT))
    dtypes = {k: str(x.dtype).removeprefix("torch.") for k, x in picked[0].items()}
    definition = {
        "name": name,
        "op_type": op,
        "description": DESCRIPTIONS[op],
        "tags": ["stage:decode", "speculative", f"model:{EMBEDDED_TARGET.name}"],
        "axes": {
            axis: {"type": "const", "value": size} if axis in CONSTANT else {"type": "var"}
            for axis, size in sizes.items()
        },
        "inputs": tensor_specs(inputs, dtypes) | {"sm_scale": {"shape": None, "dtype": "float32"}},
        "outputs": tensor_specs(outputs, {"lse": "float32", "scores": "float32"}),
        "reference": reference,
    }
    save(root / f"definitions/{op}/{name}.json", definition)
    write_solution(root, definition, "specattn", OURS[op], ["cpu", "cuda"])
    if op == "tree_verify_paged":
        write_solution(root, definition, "flashinfer_custom_mask", FLASHINFER, ["cuda"])
    lines = []
    for number, tensors in enumerate(picked):
        blob = f"blob/workloads/{op}/{name}/{number}.safetensors"
        (root / blob).parent.mkdir(parents=True, exist_ok=True)
        save_file({k: x.contiguous() for k, x in tensors.items()}, root / blob)
        given: dict[str, dict] = {
            k: {"type": "safetensors", "path": blob, "tensor_key": k} for k in inputs
        }
        given["sm_scale"] = {"type": "scalar", "value": sizes["head_dim"] ** -0.5}
        axes = axes_of(inputs, tensors)
        variable = {axis: size for axis, size in axes.items() if axis not in CONSTANT}
        workload = {"axes": variable, "inputs": given, "uuid": f"{name}-{number}"}
        lines.append(json.dumps({"definition": name, "workload": workload}))
    path = root / f"workloads/{op}/{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return len(lines)


def write_solution(root: Path, definition: dict, by: str, source: str, hardware: list[str]) -> None:
    """Write a solution that returns its outputs, in Python."""
    solution = {
        "name": f"{by}_{definition['name']}",
        "definition": definition["name"],
        "author": AUTHOR,
        "spec": {
            "language": "python",
            "target_hardware": hardware,
            "entry_point": "main.py::run",
            "dependencies": [by.split("_")[0]],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source}],
    }
    folder = root / f"solutions/{definition['op_type']}/{definition['name']}"
    save(folder / f"{solution['name']}.json", solution)


def save(path: Path, content: dict) -> None:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    for op in DEFINITIONS:
        print(f"{op}: {write_definition(Path(sys.argv[1]), op)} workloads")
