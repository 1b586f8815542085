"""Trees that captured kernels draft on a GPU: those that torch's operators do, in few launches."""

import pytest
import torch

import specattn
from specattn.blocks import TORCH
from specattn.decoding import Eagle3, LongSpec, PosS, generate
from specattn.decoding.engine.target import Target
from tests.beams import make_level
from tests.decoding.models import prompts, tiny_model
from tests.drafters import eagle3_statement, poss_statement, statement

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from specattn.blocks.fused import Fused
from tests.decoding.captured import FEW, captured_runner
from tests.decoding.tape import Tape

DEPTH = 2


def eagle3(model):
    drafter = eagle3_statement.random_drafter(model, layers=(1,), dtype=torch.float32)
    return Eagle3(drafter, width=3, depth=DEPTH, total_tokens=7)


def poss(model):
    drafter = poss_statement.random_drafter(model, layers=2, dtype=torch.float32)
    return PosS(drafter, width=3, depth=DEPTH, total_tokens=7)


def longspec(model):
    return LongSpec(
        statement.random_drafter(model, window=9, dtype=torch.float32), widths=(2,) * DEPTH
    )


# Of the last level of EAGLE-2's trees nothing is expanded.
METHODS = {"eagle3": (eagle3, DEPTH - 1), "poss": (poss, DEPTH - 1), "longspec": (longspec, DEPTH)}
BY_TORCH = {"topk", "sort", "gather", "_log_softmax", "logsumexp"}


def launched(function, *args):
    """Return what operators return, and whether kernels computed it: how many of each."""
    with Tape() as tape:
        found = function(*args)
    return found, [tape.kernels.count(f"{kind}_kernel") for kind in ("part", "node", "choose")]


def assert_as_torch(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "width", "kernels"),
    [
        (torch.float32, 3, True),
        (torch.float32, 17, True),  # the whole vocabulary
        (torch.float32, 18, False),
        (torch.float64, 3, False),
    ],
    ids=str,
)
def test_a_level_is_three_launches_where_kernels_serve_it(dtype, width, kernels):
    level = make_level(2, 4, 17, torch.float32, words=2)
    logits, scores, masks = level[0].to(dtype), *level[1:]
    given = logits, scores.to(dtype), masks, 5, width
    found, counts = launched(Fused().best_children, *given)
    assert counts == [int(kernels)] * 3
    assert_as_torch(found, TORCH.best_children(*given))
    found, counts = launched(Fused().children, *given[:2], min(width, 17))
    assert counts == ([1, 1, 0] if dtype == torch.float32 else [0, 0, 0])
    candidates = TORCH.children(*given[:2], min(width, 17))
    assert_as_torch(found, candidates)
    found, counts = launched(Fused().expand_best, *candidates, masks, 5, 6)
    assert counts == [0, 0, int(candidates[1].dtype == torch.float32)]
    assert_as_torch(found, TORCH.expand_best(*candidates, masks, 5, 6))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [96, 6])
@pytest.mark.parametrize("name", METHODS)
def test_trees_are_those_of_torchs_operators(name, vocabulary, monkeypatch):
    """So is the text, plain decoding's; three launches find a level's children and choose."""
    make, choices = METHODS[name]
    model = tiny_model("llama", vocab_size=vocabulary, **FEW)
    method, texts, graphs, rounds = make(model), prompts([5, 9], vocabulary=vocabulary), [], []
    options = {"max_new_tokens": 4, "temperature": 0.0}
    plain = generate(model, texts, "plain", compile="off", **options).new_tokens
    verify = Target.verify

    def noting(target, tree, tokens, **how):
        rounds[-1].append((tree.parents.tolist(), tokens.tolist()))
        return verify(target, tree, tokens, **how)

    def captured(target, model):
        return captured_runner(target, graphs)

    monkeypatch.setattr(Target, "verify", noting)
    for compile in ("off", "auto"):
        rounds.append([])
        assert generate(model, texts, method, compile=compile, **options).new_tokens == plain
        monkeypatch.setattr(Target, "_runner", captured)
    expected, found = rounds
    assert found == expected
    assert max(len(tokens[0]) for _, tokens in found) > DEPTH + 1
    kept = [graph.tape.kernels for graph in graphs]
    deepest = max(kept, key=lambda kernels: kernels.count("part_kernel"))
    counts = [deepest.count(f"{kind}_kernel") for kind in ("part", "node", "choose")]
    assert counts == [DEPTH, DEPTH, choices]
    assert not BY_TORCH & set(deepest)
