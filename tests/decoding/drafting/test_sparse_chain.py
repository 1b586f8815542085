"""What a self-drafted chain reads: what was chosen, and everything newer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from specattn import kv_cache, reference
from specattn.decoding import DraftContext, Sampler, Target, Vegas
from specattn.decoding.drafting.sparse_chain import PrefixSelection, SparseChain
from specattn.decoding.passes.attention import Selection
from specattn.decoding.text.sequences import Sequences
from tests import distributions
from tests.decoding.models import prompts, tiny_model
from tests.decoding.tape import Tape

LAYERS, KV_HEADS = 2, 3


@st.composite
def choices(draw):
    """Return who chose: positions by layer, request and KV head (or None for all of them)."""
    heads = draw(st.sampled_from([None, KV_HEADS]))
    prefix = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    rows = []
    for length in prefix:
        counts = [draw(st.integers(0, length)) for _ in range(heads or 1)]
        rows.append(
            [
                [sorted(draw(st.permutations(range(length)))[:count]) for count in counts]
                for _ in range(LAYERS)
            ]
        )
    return heads, prefix, rows


def as_selected(heads, prefix, rows):
    width = max(len(p) for row in rows for layer in row for p in layer)
    indices = torch.tensor(
        [
            [[p + [-1] * (width - len(p)) for p in row[layer]] for row in rows]
            for layer in range(LAYERS)
        ],
        dtype=torch.int32,
    ).view(LAYERS, len(rows), heads or 1, width)
    lengths = torch.tensor([[len(p) for p in row[0]] for row in rows], dtype=torch.int32)
    if heads is None:
        indices, lengths = indices[:, :, 0], lengths[:, 0]
    return PrefixSelection(Selection(indices, lengths), torch.tensor(prefix, dtype=torch.int32))


@given(choices(), st.data())
def test_every_step_reads_the_chosen_and_all_newer_tokens(choice, data):
    heads, prefix, rows = choice
    steps = data.draw(st.integers(1, 4), label="steps")
    newer = [data.draw(st.integers(0, 5), label="newer") for _ in prefix]
    seqlens = torch.tensor([p + n for p, n in zip(prefix, newer, strict=True)], dtype=torch.int32)
    selections = as_selected(*choice).steps(seqlens, steps, max(newer) + steps - 1)
    assert len(selections) == steps
    for step, selection in enumerate(selections):
        for layer in range(LAYERS):
            table, lengths = selection.select(layer, None)
            assert table.dtype == lengths.dtype == torch.int32
            for request, chosen in enumerate(rows):
                recent = list(range(prefix[request], int(seqlens[request]) + step))
                for head, positions in enumerate(chosen[layer]):
                    at = request if heads is None else (request, head)
                    assert table[at][: lengths[at]].tolist() == positions + recent


def test_steps_of_what_a_graph_has_chosen_take_two_launches():
    """However many they are, since the table that they share is there already."""
    rows = [[[list(range(n))]] * LAYERS for n in (1, 2)]
    chosen, prefix = as_selected(None, [4, 5], rows)[:2]
    seqlens = torch.tensor([6, 9], dtype=torch.int32)
    expected = PrefixSelection(chosen, prefix).steps(seqlens, 3, newer=6)
    there = PrefixSelection(chosen._replace(indices=expected[0].indices), prefix, followed=True)
    with Tape() as tape:
        found = there.steps(seqlens, 3, newer=6)
    assert tape.kernels == ["sub", "add"]
    for one, other in zip(found, expected, strict=True):
        assert one.inputs.keys() == other.inputs.keys()
        assert all(x.equal(other.inputs[name]) for name, x in one.inputs.items())


@pytest.mark.parametrize("heads", [None, KV_HEADS])
def test_rows_can_be_kept(heads):
    rows = [[[list(range(n))] * (heads or 1)] * LAYERS for n in (1, 2, 3)]
    kept = as_selected(heads, [4, 5, 6], rows).compact([2, 0])
    expected = as_selected(heads, [6, 4], [rows[2], rows[0]])
    width = expected.selection.indices.shape[-1]
    assert torch.equal(kept.selection.indices[..., :width], expected.selection.indices)
    assert torch.equal(kept.selection.lengths, expected.selection.lengths)
    assert torch.equal(kept.prefix, expected.prefix)


def test_probs_are_the_very_law_that_tokens_were_drawn_from(monkeypatch):
    """With penalties and min-p: each node's own, in the context of its path."""
    for op in ("hybrid_tree_attention", "sparse_gather_attention"):  # all copies at once
        monkeypatch.setattr(kv_cache, op, getattr(reference, op))
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.8),
            TemperatureLogitsWarper(1.3),
            MinPLogitsWarper(0.05),
        ]
    )
    vocabulary, copies = 6, 2000
    model = tiny_model(vocab_size=vocabulary, peak=0.7)
    (text,) = prompts([14], vocabulary=vocabulary - 2)
    texts = text.expand(copies, -1)
    sequences = Sequences(texts, [0] * copies, 20, StoppingCriteriaList(), model.device)
    one = Target(model, copies, 20)
    few = torch.tensor([1, 4, 12], dtype=torch.int32).expand(len(one.full_layers), copies, -1)
    selection = Selection(few, torch.full((copies,), 3, dtype=torch.int32))
    generator = torch.Generator().manual_seed(0)
    context = DraftContext(one, Sampler(processors, True, sequences), sequences, generator)
    chain = SparseChain(Vegas(gamma=2, rejection=True), context)
    asked = []
    draft_step = one.draft
    monkeypatch.setattr(one, "draft", lambda *a: asked.append(draft_step(*a)) or asked[-1])
    with torch.no_grad():
        one.prefill(list(texts[:, :-1]), chunk_size=64)
        draft = chain.propose(texts[:, -1], [selection, selection])
    tables = []
    for step, said in enumerate(asked):
        context = torch.cat([texts, draft.tokens[:, 1 : step + 1]], 1)
        distribution = processors(context, said.logits[:, 0]).softmax(-1)
        torch.testing.assert_close(draft.probs[:, step], distribution)
        path = draft.tokens[:, 1 : step + 1]
        number = (path * vocabulary ** torch.arange(step - 1, -1, -1)).sum(-1)
        table = torch.zeros(vocabulary**step, vocabulary, dtype=torch.float64)
        table[number] = distribution.double()  # all with the same path have the same distribution
        tables.append(table / table.sum(-1, keepdim=True).clamp_min(1e-9))
    drawn = (draft.tokens[:, 1:] * torch.tensor([vocabulary, 1])).sum(-1)
    assert distributions.p_value(drawn, distributions.joint(tables)) > distributions.SIGNIFICANCE
    unpenalised = [said.logits[:1, 0].div(1.3).softmax(-1).double() for said in asked[:1]]
    assert distributions.p_value(draft.tokens[:, 1], distributions.joint(unpenalised)) < 1e-12
