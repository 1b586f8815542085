"""The bits of every primitive, and the texts and drafts of every method, as they were recorded.

A change that is meant to move code must leave both as they are. One that is meant to change them
records them anew, and says why: ``python -m tests.test_fingerprint`` rewrites the file. With
``--new`` it only adds what methods are not in it yet, whose texts must be those of all.
"""

import copy
import hashlib
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import specattn

RECORD = Path(__file__).with_name("fingerprint.json")
TARGET = Path(__file__).parents[1] / "examples" / "tiny"
METHODS = (
    "plain",
    "vegas:gamma=3,min_tokens=16,switch=False",
    "vegas:gamma=3,min_tokens=16,rows=all,ranking=weight,switch=False",
    "vegas:gamma=3,min_tokens=16,rows=last,switch=False",
    "vegas:gamma=3,min_tokens=16,switch=False,weights=int8",
    "cast:gamma=3",
    "streaming:gamma=3,min_tokens=16",
    "quest:gamma=3,min_tokens=16",
    "specextend:gamma=3,min_tokens=16",
    "triforce:gamma=3,min_tokens=16",
    "longspec:widths=[2,3,2]",
    "longspec:gamma=3",
    "poss:total_tokens=12,depth=4",
    "dflash:total_tokens=12,width=3",
    "jetflow:total_tokens=64,window=512",
    "medusa:widths=[3,3,3]",
    "tokenswift:widths=[1,3,3,3],budget=64",
    "prompt_lookup:gamma=10",
    "token_recycling:nodes=20",
    "suffix:nodes=16",
)
# Other settings of a method, or another choice of keys for its drafts: looked at by greedy texts
# and drafts; what a seed or a batch makes of them is left to `make fuzz`.
VARIANTS = {
    "vegas:gamma=3,min_tokens=16,rows=all,ranking=weight,switch=False",
    "vegas:gamma=3,min_tokens=16,rows=last,switch=False",
    "vegas:gamma=3,min_tokens=16,switch=False,weights=int8",
    "cast:gamma=3",
    "quest:gamma=3,min_tokens=16",
    "specextend:gamma=3,min_tokens=16",
}
EACH = [pytest.param(m, marks=pytest.mark.slow if m in VARIANTS else ()) for m in METHODS]
# Their drafts' sizes follow a clock: here one that counts the rows of passes.
CLOCKED = (
    "auto",
    "auto:trained=poss",
    "suffix",
    "prompt_lookup",
    "token_recycling",
    "vegas",
    "longspec",
    "longspec:gamma=auto",
    "poss",
    "jetflow",
    "medusa",
    "tokenswift:budget=64",
)
BY_MODULES = (
    "plain",
    "vegas:gamma=3,min_tokens=16,switch=False",
    "longspec:widths=[2,3,2]",
    "longspec:gamma=3",
    "poss:total_tokens=12,depth=4",
    "dflash:total_tokens=12,width=3",
    "medusa:widths=[3,3,3]",
    "tokenswift:widths=[1,3,3,3],budget=64",
)
# Their drafts are drawn by themselves, so their texts are their own.
REJECTION = ("longspec:gamma=3,rejection=True", "triforce:gamma=3,min_tokens=16,rejection=True")
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
NEW_TOKENS = 48
PROMPT = '''
class Stack:
    """A last-in, first-out container."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        """Put an item on top."""
        self._items.append(item)

    def pop(self):
        """Take the item on top; raise IndexError if there is none."""
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()

    def peek(self):
        """Return the item on top without taking it."""
        if not self._items:
            raise IndexError("peek at an empty stack")
        return self._items[-1]


class Queue:
    """A first-in, first-out container."""

    def __init__(self, items=()):
'''


def integers(generator, *shape, low=0, high):
    return torch.randint(low, high, shape, generator=generator)


def values(generator, *shape, dtype):
    """Return numbers that no library's random floats decide: multiples of 2**-8 in [-3, 3)."""
    return (integers(generator, *shape, low=-768, high=768) / 256).to(dtype)


def results(dtype):
    """Run every primitive over a ragged batch with a tree, windows, pages and sinks."""
    generator = torch.Generator().manual_seed(11)
    batch, rows, q_heads, kv_heads, dim, capacity, page = 2, 7, 8, 2, 64, 1024, 16
    q = values(generator, batch, rows, q_heads, dim, dtype=dtype)
    k_cache, v_cache = values(generator, 2, batch, capacity, kv_heads, dim, dtype=dtype)
    k_tree, v_tree = values(generator, 2, batch, rows, kv_heads, dim, dtype=dtype)
    lengths = torch.tensor([1000, 77], dtype=torch.int32)
    tree = specattn.Tree([-1, 0, 0, 1, 1, 2, 5])
    sinks = values(generator, q_heads, dtype=dtype)
    order = torch.randperm(batch * capacity // page, generator=generator)
    k_pages, v_pages = (
        torch.empty_like(x).view(-1, page, kv_heads, dim) for x in (k_cache, v_cache)
    )
    k_pages[order] = k_cache.reshape(k_pages.shape)
    v_pages[order] = v_cache.reshape(v_pages.shape)
    table = order.view(batch, -1).to(torch.int32)
    hybrid = (q, k_cache, v_cache, lengths, k_tree, v_tree, tree.mask)
    pages = (q, k_pages, v_pages, lengths, k_tree, v_tree, tree.mask)

    found = {
        "tree": specattn.tree_attention(q, k_tree, v_tree, tree.mask),
        "hybrid": specattn.hybrid_tree_attention(*hybrid),
        "hybrid, paged": specattn.hybrid_tree_attention(*pages, block_table=table),
        "hybrid, one row": specattn.hybrid_tree_attention(
            q[:, :1], k_cache, v_cache, lengths, None, None
        ),
        "hybrid, window, softcap and sinks": specattn.hybrid_tree_attention(
            *hybrid, window=50, softcap=20.0, sinks=sinks
        ),
        "verify, scores": specattn.verify_attention(*hybrid),
        "importance": (specattn.importance_scores(q, k_cache, lengths),),
        "importance, all heads": (specattn.importance_scores(q, k_cache, lengths, per_head=False),),
        "verify, logits": specattn.verify_attention(*hybrid, collect="logits"),
    }
    scores = found["importance"][0].float()
    chosen = specattn.select_topk(scores, lengths, ratio=0.07, keep_first=2, keep_last=3)
    found["select"] = chosen
    found["gather"] = specattn.sparse_gather_attention(
        q, k_cache, v_cache, *chosen, k_tree, v_tree, tree.mask, sinks=sinks
    )
    (out_a, lse_a), (out_b, lse_b) = found["tree"], found["hybrid"]
    found["merge"] = specattn.merge_state(out_a, lse_a, out_b, lse_b)
    found["merge many"] = specattn.merge_states(
        torch.stack([out_a, out_b, out_a]), torch.stack([lse_a, lse_b, lse_b])
    )
    return found


def digest(tensors):
    """Return a hash of the bits; a zero's sign and a NaN's payload count too."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def bits(isa, dtype):
    """Return the digest of every primitive on one code path of the C++ kernels."""
    from specattn import _cpu

    before, threads = _cpu.isa(), torch.get_num_threads()
    _cpu.use_isa(isa)
    torch.set_num_threads(2)
    try:
        with specattn.use_backend("cpu"):
            return {name: digest(found) for name, found in results(dtype).items()}
    finally:
        _cpu.use_isa(before)
        torch.set_num_threads(threads)


def reference_sums():
    """Return sums over what the float64 reference gives, finite entries alone."""
    with specattn.use_backend("reference"):
        found = results(torch.float64)
    return {
        name: [float(tensor[tensor.isfinite()].double().sum()) for tensor in tensors]
        for name, tensors in found.items()
    }


def load_target():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specattn.decoding import prove

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prove(model)  # verifies a tree of its own
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return model, tokenizer(PROMPT)["input_ids"]


def untaught(model, ids):
    """Return another model of the same weights, which no other run has taught anything."""
    from specattn.decoding import prove

    weights = [*model.parameters(), *model.buffers()]
    other = copy.deepcopy(model, {id(one): one for one in weights})
    prove(other)
    return other, ids


@contextmanager
def watched_passes():
    """Yield a digest of all drafts that targets verify; clocks count the rows of their passes."""
    from specattn.decoding import Target
    from specattn.decoding.text.statistics import Clock

    found, now = hashlib.sha256(), 0.0
    verify, draft = Target.verify, Target.draft

    def verified(self, tree, tokens, **options):
        nonlocal now
        now += 1e-3 + 2e-5 * tree.size
        found.update(repr((tree.parent_lists, tokens.tolist())).encode())
        return verify(self, tree, tokens, **options)

    def drafted(self, tokens, *arguments, **options):
        nonlocal now
        now += 6e-4
        return draft(self, tokens, *arguments, **options)

    def moment(self):
        return now

    with (
        mock.patch.object(Target, "verify", verified),
        mock.patch.object(Target, "draft", drafted),
        mock.patch.object(Clock, "now", moment),
    ):
        yield found


def decoded(model, ids, method, **options):
    """Return the new tokens of two prompts of unequal lengths, rounds taken, a digest of drafts."""
    from specattn.decoding import generate

    prompts = [torch.tensor(ids), torch.tensor(ids[: len(ids) // 2])]
    options = {"temperature": 0, "repetition_penalty": 1.2, **options}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with watched_passes() as drafts:
            output = generate(
                model,
                prompts,
                method,
                max_new_tokens=NEW_TOKENS,
                **{"min_new_tokens": NEW_TOKENS, **options},
            )
    finally:
        torch.set_num_threads(threads)
    rounds = [request.rounds for request in output.statistics.requests]
    return output.new_tokens, rounds, drafts.hexdigest()[:16]


def ending_early(model, ids):
    """Return options with which one of the two texts ends before the other."""
    first, second = decoded(model, ids, "plain", min_new_tokens=0)[0]
    alone = next(token for token in second[6:-6] if token not in first)
    return {"eos_token_id": alone, "min_new_tokens": 0}


def isa():
    from specattn import _cpu

    return _cpu.isa()


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def target():
    return load_target()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_of_the_cpu_kernels(record, dtype):
    _cpu = pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")
    recorded = [isa for isa in _cpu.isas() if f"{isa}, {dtype}" in record["bits"]]
    assert recorded, "generic is recorded, and every machine has it"
    for isa in recorded:
        assert bits(isa, getattr(torch, dtype)) == record["bits"][f"{isa}, {dtype}"], isa


def test_values_of_the_reference(record):
    found = reference_sums()
    assert found.keys() == record["reference"].keys()
    for name, sums in found.items():
        assert sums == pytest.approx(record["reference"][name], rel=1e-9), name


@pytest.mark.parametrize("method", METHODS)
def test_texts_and_drafts_of_the_methods(record, target, method):
    tokens, rounds, drafts = decoded(*target, method)
    assert tokens == record["text"]
    # A drafter's own near-ties may fall otherwise on another machine, and cost or save a round.
    assert rounds == pytest.approx(record["rounds"][method], abs=1)
    # Attention and products round differently by instruction set: drafts are one set's own.
    assert drafts == record["drafts"].get(isa(), {}).get(method, drafts)


@pytest.mark.parametrize("method", CLOCKED)
def test_texts_of_methods_that_follow_a_clock(record, target, method):
    tokens, rounds, _ = decoded(*untaught(*target), method)
    assert tokens == record["text"]
    assert rounds == pytest.approx(record["rounds by clock"][method], abs=2)


@pytest.mark.parametrize("method", BY_MODULES)
def test_texts_by_modules(record, target, method):
    tokens, rounds, _ = decoded(*target, method, compile="off")
    assert tokens == record["text"]
    assert rounds == pytest.approx(record["rounds"][method], abs=1)


@pytest.mark.parametrize("method", EACH)
def test_texts_of_a_seed(record, target, method):
    tokens, rounds, _ = decoded(*target, method, **SAMPLED)
    assert tokens == record["sampled text"]
    assert rounds == pytest.approx(record["sampled rounds"][method], abs=2)


@pytest.mark.parametrize("method", REJECTION)
def test_texts_of_drafts_that_are_sampled(record, target, method):
    tokens, *_ = decoded(*target, method, **SAMPLED)
    assert tokens == record["rejection"].get(isa(), {}).get(method, tokens)


@pytest.mark.parametrize("method", EACH)
def test_texts_of_a_batch_of_which_one_ends_early(record, target, method):
    tokens, *_ = decoded(*target, method, **record["ending early"])
    assert tokens == record["text of which one ends"]
    assert len(tokens[1]) < len(tokens[0]) == NEW_TOKENS


def main():
    from specattn import _cpu

    old = {"bits": {}, "drafts": {}, "rejection": {}}
    if RECORD.exists():
        old |= json.loads(RECORD.read_text(encoding="utf-8"))
    model, ids = load_target()
    found = {method: decoded(model, ids, method) for method in METHODS}
    sampled = {method: decoded(model, ids, method, **SAMPLED) for method in METHODS}
    rejected = {method: decoded(model, ids, method, **SAMPLED)[0] for method in REJECTION}
    ending = ending_early(model, ids)
    clocked = {method: decoded(*untaught(model, ids), method)[1] for method in CLOCKED}
    # What belongs to code paths that this machine does not have stays as it is.
    record = {
        "bits": old["bits"]
        | {
            f"{isa}, {dtype}": bits(isa, getattr(torch, dtype))
            for isa in _cpu.isas()
            for dtype in ("float32", "bfloat16", "float16")
        },
        "reference": reference_sums(),
        "text": found["plain"][0],
        "rounds": {method: rounds for method, (_, rounds, _) in found.items()},
        "drafts": old["drafts"]
        | {isa(): {method: drafts for method, (*_, drafts) in found.items()}},
        "rounds by clock": clocked,
        "ending early": ending,
        "text of which one ends": decoded(model, ids, "plain", **ending)[0],
        "sampled text": sampled["plain"][0],
        "sampled rounds": {method: rounds for method, (_, rounds, _) in sampled.items()},
        "rejection": old["rejection"] | {isa(): rejected},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def add_methods():
    """Record the methods that are not in the file; all else stays as it is."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    model, ids = load_target()
    drafts = record["drafts"].setdefault(isa(), {})
    for method in set(METHODS) - set(record["rounds"]):
        text, record["rounds"][method], drafts[method] = decoded(model, ids, method)
        sampled, record["sampled rounds"][method], _ = decoded(model, ids, method, **SAMPLED)
        assert (text, sampled) == (record["text"], record["sampled text"]), method
    for method in set(CLOCKED) - set(record["rounds by clock"]):
        text, record["rounds by clock"][method], _ = decoded(*untaught(model, ids), method)
        assert text == record["text"], method
    for found in (record["rounds"], record["sampled rounds"], record["rounds by clock"], drafts):
        for method in sorted(found, key=(*METHODS, *CLOCKED).index):
            found[method] = found.pop(method)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    add_methods() if sys.argv[1:] == ["--new"] else main()
