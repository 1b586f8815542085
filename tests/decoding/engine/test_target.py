"""The adapter: logits of trees, scores of the prefix, and the model left as it was."""

import copy

import pytest
import torch
from transformers import AttentionInterface

from specattn.blocks.kernels import Kernels
from specattn.decoding import Target, generate
from specattn.decoding.passes.attention import CaptureSpec, Selection
from specattn.tree import Tree
from tests.cases import assert_accurate
from tests.decoding.models import (
    CONFIGS,
    greedy_by_transformers,
    prompts,
    tiny_model,
)

PARENTS = [-1, 0, 0, 1, 1, 3, 2, 6, 5]


def path_to(node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = PARENTS[node]
    return path


@torch.no_grad()
def each_path(model, texts, tokens):
    """Return the logits after every node, by a plain forward pass over text and path: [B, T, V]."""
    rows = [
        [torch.cat([text, row[path_to(node)]]) for node in range(len(PARENTS))]
        for text, row in zip(texts, tokens, strict=True)
    ]
    return torch.stack(
        [torch.stack([model(ids[None]).logits[0, -1] for ids in row]) for row in rows]
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_a_tree_gets_the_logits_of_its_paths(family):
    model, texts = tiny_model(family, peak=1.0), prompts([0, 3, 19])
    head = copy.deepcopy(model.get_output_embeddings())
    # Of seed 4 one node of gpt_oss moves by 20 times torch's error where weights move by an ulp.
    tokens = torch.stack(prompts([len(PARENTS)] * 3, seed=5))
    target = Target(model, batch=3, capacity=40)
    with torch.no_grad():
        target.prefill(texts, chunk_size=8)
        result = target.verify(Tree(PARENTS), tokens)
    assert result.scores is None
    assert result.queries is None
    rounded = each_path(model, texts, tokens)
    if family in ("gpt_oss", "qwen3_moe"):
        model.set_experts_implementation("eager")  # the default has no float64
    exact = each_path(model.double(), texts, tokens)
    assert_accurate(result.logits, exact, rounded)
    torch.testing.assert_close(head(result.features), result.logits)


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("chunk_size", [8, 64])
@pytest.mark.parametrize("family", ["llama", "qwen3-sliding"])
def test_a_prefill_computes_the_rows_of_the_prompts_and_no_other(
    family, chunk_size, compile, monkeypatch
):
    model, texts = tiny_model(family), prompts([30, 0, 1, 19])
    target, rows, shown = Target(model, 4, 40, compile), {}, [[], [], [], []]

    def count(layer, given):
        rows[layer] = rows.get(layer, 0) + given[0].shape[:-1].numel()

    def counted(ops, x, *projections, inner=Kernels.linear, **options):
        count(projections[0].weight.data_ptr(), [x])
        return inner(ops, x, *projections, **options)

    def keep(start, features):
        assert start == sum(map(len, shown[0]))
        for own, new in zip(shown, features, strict=True):
            own.append(new)

    hooks = [
        module.register_forward_pre_hook(count)
        for module in model.base_model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    monkeypatch.setattr(Kernels, "linear", counted)
    base, base64 = model.base_model, copy.deepcopy(model).double().base_model
    with torch.no_grad():
        target.prefill(texts, chunk_size, on_features=keep)
        for hook in hooks:
            hook.remove()
        assert set(rows.values()) == {sum(map(len, texts))}
        assert target.cache.seqlens.tolist() == [len(text) for text in texts]
        for text, own in zip(texts, map(torch.cat, shown), strict=True):
            alone, exact = own, own.double()
            if len(text):
                alone, exact = (m(text[None]).last_hidden_state[0] for m in (base, base64))
            assert_accurate(own, exact, alone, atol=1e-6)


def queries_and_keys(model, ids):
    """Return what every layer's attention gets: q [1, Hq, L, D] and k [1, Hk, L, D]."""
    seen = []

    def recording(module, query, key, value, attention_mask, **options):
        seen.append((query, key, options["scaling"]))
        return sdpa(module, query, key, value, attention_mask, **options)

    sdpa = AttentionInterface()["sdpa"]
    AttentionInterface.register("recording", recording)
    before = model.config._attn_implementation
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model(ids)
    model.set_attn_implementation(before)
    return seen


@pytest.mark.parametrize("ranking", ["logit", "weight"])
@pytest.mark.parametrize("rows", [(0, -1), (2,), (0, 1, 2, 3)])
def test_scores_are_means_over_the_wanted_rows(rows, ranking):
    model, texts = tiny_model("llama"), prompts([6, 13])
    tokens = torch.stack(prompts([4, 4], seed=4))
    target = Target(model, batch=2, capacity=30)
    with torch.no_grad():
        target.prefill(texts, chunk_size=64)
        capture = CaptureSpec(rows, ranking, queries=True)
        result = target.verify(Tree.chain(3), tokens, capture=capture)
        each = target.verify(
            Tree.chain(3), tokens, capture=CaptureSpec(rows, ranking, per_row=True)
        ).scores
    # In float32 transformers' own queries err as much as ours, by the number of threads.
    exact = copy.deepcopy(model).double()
    scores, each = result.scores.double(), each.double()
    chosen = [row % 4 - 4 for row in rows]
    assert each.shape == (3, 2, len(rows), 30)
    assert scores.shape == (3, 2, 30)
    for row, text in enumerate(texts):
        ids = torch.cat([text, tokens[row]])[None]
        rounded, seen = (queries_and_keys(one, ids) for one in (model, exact))
        queries, expected = (
            torch.stack([q[0, :, -4:].transpose(0, 1) for q, *_ in one]) for one in (rounded, seen)
        )
        assert_accurate(result.queries[:, row], expected, queries)
        for layer, (q, k, scaling) in enumerate(seen):
            logits = (q @ k.repeat_interleave(2, 1).transpose(-1, -2))[0] * scaling
            if ranking == "logit":
                asked = logits[:, chosen]
            else:
                future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
                asked = logits.masked_fill(future, -torch.inf).softmax(-1)[:, chosen]
            by_row = asked[..., : len(text)].mean(0)
            expected = by_row.mean(0)
            # Weights come of logits in bfloat16: exp(x (1 + 2**-8)) is off by this share.
            largest = logits[:, chosen, : len(text)].abs().max()
            bound = 1e-5 if ranking == "logit" else torch.expm1(largest * 2**-8).item() + 1e-5
            torch.testing.assert_close(
                scores[layer, row, : len(text)], expected, rtol=bound, atol=1e-5
            )
            assert scores[layer, row, len(text) :].isneginf().all()
            # Rows by themselves are made of logits in bfloat16 however they are ranked.
            bound = 1e-5 + 2**-8 * largest.item() if ranking == "logit" else bound
            torch.testing.assert_close(
                each[layer, row, :, : len(text)],
                by_row,
                rtol=bound if ranking == "weight" else 0,
                atol=bound if ranking == "logit" else 1e-5,
            )
            assert each[layer, row, :, len(text) :].isneginf().all()


@pytest.mark.parametrize("family", ["qwen2-sliding", "gpt_oss"])
def test_sliding_layers_are_neither_scored_nor_thinned_out(family):
    model, texts = tiny_model(family), prompts([20])
    # One row and two are rounded differently; in float64, which gpt-oss lacks, that is nothing.
    dtype, bound = (torch.float32, 1e-4) if family == "gpt_oss" else (torch.float64, 1e-9)
    model.to(dtype)
    types = model.config.layer_types
    target = Target(model, batch=1, capacity=40)
    assert len(target.full_layers) == types.count("full_attention") < len(types)
    tokens = torch.stack(prompts([2], seed=4))
    with torch.no_grad():
        target.prefill(texts, chunk_size=64)
        exact = target.verify(Tree.chain(1), tokens, capture=CaptureSpec(rows=(0, -1)))
        everything = torch.arange(21, dtype=torch.int32).expand(len(target.full_layers), 1, -1)
        lengths = torch.tensor([[20], [21]], dtype=torch.int32)
        drafted = [
            target.draft(tokens[:, step : step + 1], step, Selection(everything, length)).logits
            for step, length in enumerate(lengths)
        ]
        at_once = target.draft(tokens, 0, Selection(everything, lengths[0]))
    assert len(exact.scores) == len(target.full_layers)
    torch.testing.assert_close(torch.cat(drafted, 1), exact.logits, rtol=bound, atol=bound)
    torch.testing.assert_close(at_once.logits, exact.logits, rtol=bound, atol=bound)
    torch.testing.assert_close(at_once.features, exact.features, rtol=bound, atol=bound)


def test_requests_draft_on_from_places_of_their_own():
    """Chains of different lengths go on in one pass as each would by itself."""
    model, texts, ends = tiny_model("qwen3-sliding"), prompts([5, 12]), [0, 2]
    tokens = torch.stack(prompts([5, 5], seed=4))
    lengths = torch.tensor([5, 12], dtype=torch.int32)
    target = Target(model, batch=2, capacity=20)
    everything = torch.arange(20, dtype=torch.int32).expand(len(target.full_layers), 2, -1)
    selection = Selection(everything, lengths)
    with torch.no_grad():
        target.prefill(texts, chunk_size=64)
        expected = target.verify(Tree.chain(4), tokens).logits
        target.cache.storage[:, :, 0, 5:] = torch.nan
        target.cache.storage[:, :, 1, 14:] = torch.nan
        first = torch.tensor(ends, dtype=torch.int32)
        block = torch.stack([row[end : end + 3] for row, end in zip(tokens, ends, strict=True)])
        logits = target.draft(block, first, selection.extended(first)).logits
    for row, end in enumerate(ends):
        torch.testing.assert_close(logits[row], expected[row, end : end + 3], rtol=1e-4, atol=1e-4)


def test_a_draft_step_reads_its_selection_alone():
    """Whatever stands at other positions may change without changing the draft."""
    model, (text,) = tiny_model("qwen3"), prompts([12])
    chosen = Selection(
        torch.tensor([1, 4, 5], dtype=torch.int32).expand(3, 1, -1),
        torch.tensor([3], dtype=torch.int32),
    )
    target = Target(model, batch=1, capacity=20)
    with torch.no_grad():
        target.prefill([text], chunk_size=64)
        first = target.draft(torch.tensor([[7]]), 0, chosen).logits
        others = [position for position in range(12) if position not in (1, 4, 5)]
        target.cache.storage[:, :, :, others] = torch.nan
        again = target.draft(torch.tensor([[7]]), 0, chosen).logits
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_a_model_on_two_devices_is_refused():
    model = tiny_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="one device, got cpu, meta"):
        Target(model, batch=1, capacity=8)


def test_a_window_that_the_model_ignores_is_ignored():
    """A Llama configuration may hold the field. The model never reads it; its cache would."""
    model, (text,) = tiny_model("llama", sliding_window=5), prompts([20])
    assert Target(model, batch=1, capacity=40).windows == [None] * 3
    output = generate(model, text, "plain", max_new_tokens=8)
    assert output.new_tokens == [greedy_by_transformers(model, text, 8, use_cache=False)]
