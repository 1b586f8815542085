"""Passes as kernel calls: the same as through the model's modules, or refused."""

import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch

import specattn
from specattn.decoding import LongSpec, generate
from specattn.decoding.engine.target import Target
from specattn.decoding.passes import replay
from specattn.decoding.passes.attention import CaptureSpec, Selection
from specattn.decoding.passes.runner import MOST_ROWS
from specattn.tree import Tree
from tests.decoding.models import CONFIGS, is_recorded, prompts, tiny_model

pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

PARENTS = [-1, 0, 0, 1, 1, 2, 5]
LENGTHS = [0, 5, 19]


def two_targets(model, lengths=LENGTHS, capacity=48):
    """Return a target that runs passes as kernel calls and one that does not, both prefilled."""
    targets = [Target(model, len(lengths), capacity, how) for how in ("on", "off")]
    assert [is_recorded(target) for target in targets] == [True, False]
    with torch.no_grad():
        for target in targets:
            target.prefill(prompts(lengths), chunk_size=8)
    return targets


def assert_alike(model, found, expected):
    """Within the rounding of a few layers, as a share of the largest value."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[model.dtype]
    scale = expected.float().abs().max().item()
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=0, atol=tolerance * max(scale, 1.0)
    )


@pytest.mark.parametrize("tree", [Tree(PARENTS), Tree.chain(6), Tree.chain(0)], ids=repr)
@pytest.mark.parametrize("family", CONFIGS)
def test_verification_is_the_models_own(family, tree):
    """Twice with other tokens and lengths: what is recorded first is replayed."""
    model = tiny_model(family, peak=1.0)
    targets = two_targets(model)
    for seed in (3, 4):
        tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
        with torch.no_grad():
            found, expected = (target.verify(tree, tokens) for target in targets)
        assert_alike(model, found.logits, expected.logits)
        assert_alike(model, found.features, expected.features)
        assert_alike(
            model, targets[0].cache.storage[..., :20, :, :][:, :, 2], expected_keys(targets[1])
        )
        for target in targets:
            target.cache.seqlens = target.cache.seqlens + min(tree.size, 2)


@pytest.mark.parametrize("family", CONFIGS)
def test_passes_of_many_rows_are_the_models_own(family):
    """Ragged ones of a prefill, and a tree of more rows than are recorded."""
    model, tree = tiny_model(family, peak=1.0), Tree.chain(MOST_ROWS // 2)
    targets, features = [Target(model, 3, 100, how) for how in ("on", "off")], ([], [])
    with torch.no_grad():
        for target, shown in zip(targets, features, strict=True):
            show = lambda start, parts, shown=shown: shown.append(torch.cat(list(parts)))  # noqa: E731
            target.prefill(prompts(LENGTHS), chunk_size=8, on_features=show)
        assert_alike(model, *map(torch.cat, features))
        tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=3))
        found, expected = (target.verify(tree, tokens) for target in targets)
    assert_alike(model, found.logits, expected.logits)
    assert_alike(model, *(expected_keys(target) for target in targets))


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_passes_up_to_a_limit_are_replayed(monkeypatch, dtype, slow):
    """The logits, features and keys of the modules; one row more is not recorded."""
    seen = "specattn.blocks.kernels.widens"
    monkeypatch.setattr(seen, lambda kind: slow and kind != torch.float32)
    model = tiny_model("qwen3", peak=1.0).to(dtype)
    targets = two_targets(model, [19], capacity=300)
    recorded = []
    run, limit = targets[0].runner._replay, targets[0].runner.most_rows
    assert limit == (256 if slow and dtype == torch.bfloat16 else 128)
    targets[0].runner._replay = lambda *given: (recorded.append(given[2].numel()), run(*given))[1]
    for rows in (limit, limit + 1):
        tree = Tree([-1, *(n // 3 for n in range(rows - 1))])
        tokens = torch.stack(prompts([rows], seed=3))
        with torch.no_grad():
            found, expected = (target.verify(tree, tokens) for target in targets)
        assert_alike(model, found.logits, expected.logits)
        assert_alike(model, found.features, expected.features)
        assert_alike(model, *(target.cache.storage[..., : 19 + rows, :, :] for target in targets))
    assert recorded == [limit]


def expected_keys(target):
    """Return what the longest request has cached."""
    return target.cache.storage[..., :20, :, :][:, :, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_sixteen_bits(family, dtype):
    model = tiny_model(family, peak=1.0).to(dtype)
    tokens = torch.stack(prompts([7] * len(LENGTHS), seed=3))
    with torch.no_grad():
        found, expected = (t.verify(Tree(PARENTS), tokens) for t in two_targets(model))
    assert found.logits.dtype == dtype
    assert_alike(model, found.features, expected.features)


@pytest.mark.parametrize(
    "capture",
    [
        CaptureSpec((0, -1)),
        CaptureSpec((0, 2, 3), "weight"),
        CaptureSpec((0, 1), per_row=True),
        CaptureSpec((0, -1), per_head=True),
        CaptureSpec((0, 1), per_row=True, per_head=True),
        CaptureSpec(queries=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_what_is_captured_is_the_same(family, capture):
    model = tiny_model(family, peak=1.0)
    targets = two_targets(model)
    for seed in (3, 4):
        tokens = torch.stack(prompts([7] * len(LENGTHS), seed=seed))
        with torch.no_grad():
            found, expected = (t.verify(Tree(PARENTS), tokens, capture=capture) for t in targets)
        for one, other in ((found.scores, expected.scores), (found.queries, expected.queries)):
            assert (one is None) == (other is None)
            if one is not None:
                # Ranks may come from logits in bfloat16, of which rounding may turn the last bit.
                rough = 1e-2 if capture.needs_python else 1e-4
                torch.testing.assert_close(one, other, rtol=rough, atol=1e-4 + rough / 10)


class Latest:
    """A KV selector that is asked in each layer: the last tokens of every request."""

    def __init__(self, target, count):
        self.target, self.count, self.asked = target, count, 0

    def select(self, layer, q):
        self.asked += 1
        return latest(self.target, self.count)


def latest(target, count):
    lengths = target.cache.seqlens.clamp(max=count)
    column = torch.arange(count, dtype=torch.int32)
    return (target.cache.seqlens - lengths)[:, None] + column, lengths


@pytest.mark.parametrize("asked", [True, False], ids=["asked in each layer", "chosen before"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_a_sparse_draft_is_the_models_own(family, asked):
    model = tiny_model(family, peak=1.0)
    targets = two_targets(model)
    for offset in (0, 1, torch.tensor([2, 1, 2], dtype=torch.int32)):
        tokens = torch.stack(prompts([1] * len(LENGTHS), seed=3))
        results = []
        for target in targets:
            selector = Latest(target, 4)
            if not asked:
                indices, lengths = latest(target, 4)
                shape = (len(target.full_layers), *indices.shape)
                selector = Selection(indices.expand(shape), lengths)
            with torch.no_grad():
                results.append(target.draft(tokens, offset, selector))
            assert not asked or selector.asked == len(target.full_layers)
        assert_alike(model, results[0].logits, results[1].logits)


def test_results_outlive_the_next_pass():
    model = tiny_model("qwen3", peak=1.0)
    target, _ = two_targets(model)
    first, second = (torch.stack(prompts([3] * len(LENGTHS), seed=n)) for n in (3, 4))
    with torch.no_grad():
        kept = target.verify(Tree.chain(2), first)
        logits, features = kept.logits.clone(), kept.features.clone()
        target.verify(Tree.chain(2), second)
    assert kept.logits.equal(logits)
    assert kept.features.equal(features)


def test_a_row_is_the_same_in_every_draft():
    """Up to rounding: attention sums in another order where more rows share a tile."""
    model = tiny_model("qwen3", peak=1.0)
    target, _ = two_targets(model)
    tokens = torch.stack(prompts([9] * len(LENGTHS), seed=3))
    with torch.no_grad():
        whole = target.verify(Tree.chain(8), tokens).logits
        short = target.verify(Tree.chain(2), tokens[:, :3]).logits
    torch.testing.assert_close(short, whole[:, :3], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "widths"),
    [("qwen3", (2, 2, 2)), ("qwen3", (4, 16, 16, 16)), ("qwen3", (1,))]
    # Scaled embeddings, ropes by kind of layer, a last layer without one.
    + [(family, (2, 2)) for family in ("gemma2", "gemma3", "granite", "smollm3")],
)
def test_longspec_drafts_the_same_trees(family, widths):
    from tests.decoding.methods.test_longspec import random_drafter

    model = tiny_model(family)
    drafter = random_drafter(model, window=9, dtype=torch.float32)
    texts, drafts = prompts([3, 40, 21]), {}
    for how in ("on", "off"):
        method, drafts[how] = LongSpec(drafter, widths=widths), []
        start = LongSpec.start

        def started(self, context, start=start, seen=drafts[how]):
            run = start(self, context)
            propose = run.propose

            def watched(root):
                draft = propose(root)
                seen.append((draft.tree.parents.clone(), draft.tokens.clone()))
                seen.append((draft.tree.packed_mask, Tree(draft.tree.parents).packed_mask))
                seen.append((draft.tree.depths, Tree(draft.tree.parents).depths))
                return draft

            run.propose = watched
            return run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LongSpec, "start", started)
            generate(model, texts, method, max_new_tokens=30, compile=how)
    assert len(drafts["on"]) == len(drafts["off"]) > 9
    for found, expected in zip(drafts["on"], drafts["off"], strict=True):
        assert all(a.expand_as(b).equal(b) for a, b in zip(found, expected, strict=True))
    for mask, computed in drafts["on"][1::3] + drafts["on"][2::3]:
        assert mask.expand_as(computed).equal(computed)


def test_a_model_that_is_not_recognised_says_so_once():
    model = tiny_model("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM decodes through .* forward hooks"):
        assert not is_recorded(Target(model, 1, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_recorded(Target(model, 1, 8))
        assert not is_recorded(Target(model, 1, 8, "off"))
    with pytest.raises(ValueError, match="compile='on': .* forward hooks"):
        Target(model, 1, 8, "on")


def test_a_model_that_computes_something_else_is_refused():
    """A layer of a class that scales what it adds has the parts of any other."""
    model = tiny_model("llama")
    layer = model.model.layers[1]
    own = type(layer)

    class Scaled(own):
        def forward(self, hidden, *options, **named):
            return super().forward(hidden, *options, **named) * 1.5

    layer.__class__ = Scaled
    with pytest.raises(ValueError, match="compile='on': computed from its parts, features differ"):
        Target(model, 1, 8, "on")


@pytest.mark.parametrize(("layers", "refused"), [(8, True), (32, False)])
def test_roundings_of_many_layers_may_add_up(monkeypatch, layers, refused):
    """An 8B model in bfloat16 differed by 5.6e-2 on an H100, and was left to its modules."""
    monkeypatch.setattr(replay, "_error", lambda target, runner: 5.6e-2)
    model = tiny_model("llama", num_hidden_layers=layers).bfloat16()
    with pytest.raises(ValueError, match="differ by") if refused else nullcontext():
        Target(model, 1, 8, "on")


@pytest.mark.parametrize(
    ("how", "message"), [("maybe", "compile must be one of"), ("on", "served by the reference")]
)
def test_what_cannot_be_compiled(how, message):
    with pytest.raises(ValueError, match=message):
        Target(tiny_model("llama").double(), 1, 8, how)


def test_a_forced_backend_is_obeyed():
    with specattn.use_backend("reference"):
        assert not is_recorded(Target(tiny_model("llama"), 1, 8))


@pytest.mark.parametrize("method", ["plain", "vegas:switch=false", "prompt_lookup", "quest"])
def test_texts_do_not_depend_on_it(method):
    model, texts = tiny_model("qwen3"), prompts([3, 40, 21])
    outputs = [
        generate(model, texts, method, max_new_tokens=24, compile=how).new_tokens
        for how in ("on", "off")
    ]
    assert outputs[0] == outputs[1]


def test_weights_may_change_between_generations():
    model, (text,) = tiny_model("llama"), prompts([9])
    before = generate(model, text, "plain", max_new_tokens=8).new_tokens
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.05 * torch.randn(parameter.shape)
    after = generate(model, text, "plain", max_new_tokens=8).new_tokens
    assert after == generate(model, text, "plain", max_new_tokens=8, compile="off").new_tokens
    assert after != before


class Failing:
    """A selector whose first choice is an error."""

    def select(self, layer, q):
        raise ZeroDivisionError


@torch.no_grad()
def test_a_pass_that_fails_leaves_nothing_of_its_plan():
    """A runner outlives the run; its plan may hold a drafter, and so the model."""
    target = Target(tiny_model("llama"), 1, 48, "on")
    target.prefill(prompts([9]), chunk_size=16)
    selector, token = Failing(), torch.stack(prompts([1]))
    kept = weakref.ref(selector)
    with pytest.raises(ZeroDivisionError):
        target.draft(token, 0, selector)
    del selector
    assert kept() is None
    assert target.draft(token, 0).logits.isfinite().all()
