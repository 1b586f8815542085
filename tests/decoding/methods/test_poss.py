"""PosS: what its specialists compute while decoding, what they remember, and what comes out."""

from collections import Counter
from itertools import product
from typing import NamedTuple

import pytest
import torch
from transformers import StoppingCriteriaList

from specattn import use_backend
from specattn.blocks import TORCH, Direct, Ops
from specattn.decoding import DraftContext, PosS, Sampler, Target, generate
from specattn.decoding.methods import poss
from specattn.decoding.methods.poss import SpecialistBlock
from specattn.decoding.text.sequences import Sequences
from specattn.drafters.poss import fuse, keys_and_values, specialist
from tests.decoding.models import (
    BATCHES,
    ending_at,
    greedy_by_transformers,
    known,
    prompts,
    tiny_model,
)
from tests.drafters.poss_statement import BOTH_NORMS, Statement, random_drafter

# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

NEW_TOKENS = 24
SMALL_VOCABULARY = 6  # of which a tree holds so much that even random drafters are often right


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_the_text_is_that_of_plain_decoding(family, lengths):
    """The paper's tree of 60 nodes, at depth 4."""
    model, texts, expected = known(family, lengths, NEW_TOKENS)
    drafter = random_drafter(model, layers=2, positions_per_layer=2, dtype=torch.float32)
    output = generate(
        model, texts, PosS(drafter, depth=4, total_tokens=60), max_new_tokens=NEW_TOKENS
    )
    assert output.new_tokens == expected
    total, cut = output.statistics.total, 4 * len(texts)  # the last rounds need fewer levels
    assert 59 * (total.rounds - cut) <= total.drafted < 59 * total.rounds


def accepting():
    """Yield families with windows and norms: all in one family, one of each in all are quick."""
    families = ("qwen3", "llama", "qwen2", "mistral-sliding", "gpt_oss")
    for family, window, (seed, norms) in product(families, (None, 4), ((3, {}), (0, BOTH_NORMS))):
        quick = family == "qwen3" or (window is None) == bool(norms)
        name = f"{family}-{window}-{'norms' if norms else 'plain'}"
        marks = () if quick else pytest.mark.slow
        yield pytest.param(family, window, seed, norms, id=name, marks=marks)


@pytest.mark.parametrize(("family", "window", "seed", "norms"), list(accepting()))
def test_the_text_stays_right_where_much_is_accepted(family, window, seed, norms):
    model, texts, expected = known(family, (2, 17, 33), 40, vocabulary=SMALL_VOCABULARY)
    drafter = random_drafter(model, seed=seed, dtype=torch.float32, **norms)
    method = PosS(drafter, width=4, depth=3, total_tokens=24, window=window)
    output = generate(model, texts, method, max_new_tokens=40)
    assert output.new_tokens == expected
    assert output.statistics.total.mean_acceptance_length > 1.2


class Level(NamedTuple):
    """One level of a tree: its nodes' tokens (the root has none), what they see, their features."""

    tokens: torch.Tensor | None
    mask: torch.Tensor
    features: torch.Tensor


class Listening(Ops):
    """Torch's operators, which keep the levels of a round."""

    def __init__(self):
        self.levels, self.tokens = [], None

    def embed(self, tokens, module):
        self.tokens = tokens
        return super().embed(tokens, module)

    def hybrid_tree_attention(self, q, *read, **options):
        self.mask = read[5]
        return super().hybrid_tree_attention(q, *read, **options)

    def head(self, x, module):
        self.levels.append(Level(self.tokens, self.mask, x))
        return super().head(x, module)


class Under(Direct):
    """Runs programs with operators of a test's own."""

    def __init__(self, ops):
        self.ops = ops

    def run(self, key, program, inputs, batch=None):
        return program(self.ops, **inputs)


class Witness(SpecialistBlock):
    """Checks every level of every round against the statement, which reads all text anew."""

    levels = expected = 0

    def grow(self, root, width, depth):
        ops = Listening()
        self.growing = Under(ops)
        grown = super().grow(root, width, depth)
        type(self).expected += min(4, self.sequences.draft_depth)
        type(self).levels += len(ops.levels)
        model, embed = self.target.model, self.target.embed
        statement = Statement(self.drafter, model.base_model.rotary_emb)
        for request, length in enumerate(self.target.cache.seqlens.tolist()):
            ids = self.sequences.text(self.sequences.active[request])[: length + 1]
            features = model.base_model(ids[None], use_cache=False).last_hidden_state[0, :-1]
            if length == 0:
                continue  # a root without a pair has no statement
            nodes = [None]  # by number; the text has the root's embedding
            for level in ops.levels:
                if level.tokens is not None:
                    nodes += list(embed(level.tokens[request]))
                for bits, found in zip(level.mask[request], level.features[request], strict=True):
                    path = [
                        x for n, x in enumerate(nodes) if n and int(bits[n // 64]) >> n % 64 & 1
                    ]
                    stated = statement.drafted(embed(ids), features, path)[-1]
                    torch.testing.assert_close(found, stated, rtol=1e-8, atol=1e-8)
        return grown


def in_float64(model):
    """Return the model in float64 throughout: transformers' own norms compute in float32."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if name.endswith("norm"):
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.load_state_dict(child.state_dict())
                setattr(parent, name, norm)
    return model.double()


DRAFTERS = {
    "one-layer": (1, {}),
    "poss-2": (2, {}),
    "poss-1": (4, {}),
    "fc-norm": (2, {"fc_norm": True}),
    "norm-output": (1, {"norm_output": True}),
    "norms": (2, BOTH_NORMS),
}


def drafters():
    """Yield every family with every drafter; those of which no other quick one has a part are slow.

    Families differ in biases and norms of the attention, drafters in what surrounds it.
    """
    quick = [("qwen3", "one-layer"), ("qwen3", "poss-1"), ("qwen3", "norms")]
    quick += [("qwen2", "poss-2"), ("llama", "poss-2")]
    for family, name in product(["qwen2", "qwen3", "llama"], DRAFTERS):
        marks = () if (family, name) in quick else pytest.mark.slow
        yield pytest.param(family, *DRAFTERS[name], marks=marks, id=f"{family}-{name}")


@pytest.mark.parametrize(("family", "layers", "norms"), list(drafters()))
def test_decoding_mode_is_the_statement(monkeypatch, family, layers, norms):
    """In float64, from the first round on, over rounds that accept and reject, as requests end."""
    monkeypatch.setattr(poss, "SpecialistBlock", Witness)
    monkeypatch.setattr(Witness, "levels", 0)
    monkeypatch.setattr(Witness, "expected", 0)
    model = in_float64(tiny_model(family, vocab_size=SMALL_VOCABULARY, peak=0.7))
    drafter = random_drafter(
        model, layers=layers, positions_per_layer={1: 1, 2: 2, 4: 1}[layers], **norms
    )
    output = generate(
        model,
        prompts([1, 9, 14], vocabulary=SMALL_VOCABULARY),
        PosS(drafter, width=3, depth=4, total_tokens=12),
        max_new_tokens=9,
        temperature=1.0,
        top_k=0,
        seed=0,
        prefill_chunk_size=5,
    )
    assert Witness.levels == Witness.expected > 2 * output.statistics.passes
    assert 5 < output.statistics.total.accepted < output.statistics.total.drafted


def test_every_depth_has_its_own_specialist_from_the_first_round_on(monkeypatch):
    called = []

    def listening(ops, drafter, layer, x, place, attend):
        called.append((int(place.depths[0, 0]), layer))
        return specialist(ops, drafter, layer, x, place, attend)

    monkeypatch.setattr(poss, "specialist", listening)
    model = tiny_model("qwen3")
    drafter = random_drafter(model, layers=3, positions_per_layer=2, dtype=torch.float32)
    method, options = PosS(drafter, depth=8, total_tokens=60), ending_at(13)
    output = generate(model, prompts([7]), method, compile="off", **options)
    assert output.statistics.passes > 1
    assert called == list(enumerate([0, 0, 1, 1, 2, 2, 2, 2])) * output.statistics.passes


@pytest.mark.parametrize("window", [1, 3, 9, 100])
def test_a_window_counts_positions_along_the_path(monkeypatch, window):
    """One level of nodes at depth 2, in any order: each sees the same last pairs of its path."""
    model = tiny_model("llama").double()
    drafter = random_drafter(model, layers=1)
    (ids,) = prompts([14])
    context = started(model, ids[None], nodes=9)
    block = SpecialistBlock(drafter, context, 9, 2, window)
    features = torch.randn(1, 13, 32, generator=torch.Generator().manual_seed(2)).double()
    cache, embed = context.target.cache, context.target.embed
    cache.seqlens = cache.seqlens + 13
    children = torch.tensor([[5, 6, 7, 8]])
    ops = Listening()

    def four(tokens, scores, masks, first, width):
        seen = torch.tensor([[[3], [5], [9], [17]]])
        return children, children, torch.zeros(1, 4), torch.zeros_like(children), seen

    monkeypatch.setattr(ops, "expand_best", four)
    block.growing = Under(ops)
    with torch.no_grad():
        block.on_prefill(0, features)
        block.grow(ids[-1:], 4, 2)
        root, below = (level.features for level in ops.levels)
        pairs = fuse(TORCH, drafter, embed(ids[None, 1:]), features)
        drafted = fuse(TORCH, drafter, embed(children), root.expand(-1, 4, -1))
        for child, out in zip(drafted[0], below[0], strict=True):
            path = torch.cat([pairs[0], child[None]])[None]
            place = drafter.rotated(path, torch.arange(14)[None])
            k, v = keys_and_values(TORCH, drafter, 0, path, place)

            def attend(q, k=k, v=v):
                k, v = (x[0].repeat_interleave(2, 1) for x in (k, v))
                far = torch.ones(14, 14).triu(1).bool() | torch.ones(14, 14).tril(-window).bool()
                logits = torch.einsum("qhd,khd->hqk", q[0], k) / 4
                weights = logits.masked_fill(far, -torch.inf).softmax(-1)
                return torch.einsum("hqk,khd->qhd", weights, v)[None]

            expected = specialist(TORCH, drafter, 0, path, place, attend)[0, -1]
            torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def started(model, ids, nodes):
    """Return the context of requests ids [B, n] whose cache is empty."""
    room = ids.shape[1] + nodes + 10
    sequences = Sequences(ids, [0] * len(ids), room, StoppingCriteriaList(), model.device)
    sampler = Sampler([], do_sample=False, sequences=sequences)
    return DraftContext(Target(model, len(ids), room), sampler, sequences)


@pytest.mark.parametrize("context", [20, 200])
def test_catching_up_costs_the_same_at_any_length(monkeypatch, context):
    """Per round: the nodes that are drafted; for the next, pairs of what came, of few sizes."""
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY)
    drafter = random_drafter(model, seed=3, dtype=torch.float32)
    rows, linear = Counter(), Ops.linear

    def counting(self, x, *projections, **options):
        rows[projections[0].weight.data_ptr()] += x.shape[0] * x.shape[1]
        return linear(self, x, *projections, **options)

    monkeypatch.setattr(Ops, "linear", counting)
    method = PosS(drafter, width=3, depth=3, total_tokens=10)
    texts = prompts([context], vocabulary=SMALL_VOCABULARY)
    output = generate(model, texts, method, compile="off", **ending_at(context + 20))
    rounds = output.statistics.passes
    came = [1 + one.accepted for one in output.statistics.requests[0].history]
    assert max(came) > 1
    again = sum(1 << (count - 1).bit_length() for count in came[:-1])
    prompt_rows = 1 + context - 1  # the first token's stand-in, and every pair of the prompt
    fused = rows[drafter.fc.weight.data_ptr()]
    assert fused == prompt_rows + rounds * (3 + 3) + again
    whole = [rows[s.attention.q_proj.weight.data_ptr()] for s in drafter.specialists]
    assert whole == [rounds, 3 * rounds, 3 * rounds]


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_chunks_of_the_prefill_do_not_show(chunk_size):
    model = tiny_model("llama", vocab_size=SMALL_VOCABULARY)
    texts = prompts([1, 30, 15], vocabulary=SMALL_VOCABULARY)
    drafter = random_drafter(model, seed=3, dtype=torch.float32)
    method = PosS(drafter, width=4, depth=3, total_tokens=40)
    runs = [
        generate(model, texts, method, max_new_tokens=12, prefill_chunk_size=size)
        for size in (chunk_size, 1000)
    ]
    assert runs[0].new_tokens == runs[1].new_tokens
    assert runs[0].statistics.total.accepted_at == runs[1].statistics.total.accepted_at


def test_a_run_says_where_its_time_went():
    model = tiny_model("qwen3")
    method = PosS(random_drafter(model, dtype=torch.float32), total_tokens=60)
    output = generate(model, prompts([9, 3]), method, max_new_tokens=8)
    details = output.statistics.details
    parts = [details[name] for name in ("layer_seconds", "tree_seconds", "catch_up_seconds")]
    assert min(parts) > 0
    assert sum(parts) <= output.statistics.draft_seconds


def test_the_folder_within_the_target_is_the_default(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    (text,) = prompts([9])
    with pytest.raises(ValueError, match="none was given, and .*poss is not a folder"):
        generate(model, text, "poss", max_new_tokens=4)
    drafter = random_drafter(model, dtype=torch.float32)
    drafter.save_pretrained(tmp_path / "poss")
    given = [
        generate(model, text, method, max_new_tokens=8)
        for method in ("poss", PosS(drafter), f"poss:drafter={tmp_path / 'poss'}")
    ]
    assert all(output.new_tokens == given[0].new_tokens for output in given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"total_tokens": 1}, "total_tokens must be at least 2, got 1"),
        ({"window": 0}, "window must be at least 1, got 0"),
    ],
)
def test_parameters_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        PosS(**options)


def test_a_drafter_that_does_not_fit_is_refused():
    drafter = random_drafter(tiny_model("llama", hidden_size=64), dtype=torch.float32)
    with pytest.raises(ValueError, match="does not fit the target: its hidden_size is 64"):
        generate(tiny_model("llama"), [[1, 2]], PosS(drafter), max_new_tokens=4)


def test_bfloat16_runs():
    model = tiny_model("qwen3").bfloat16()
    method = PosS(random_drafter(model, dtype=torch.bfloat16))
    output = generate(model, prompts([9, 30]), method, max_new_tokens=6)
    assert [len(new) for new in output.new_tokens] == [6, 6]


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU")
@pytest.mark.slow
def test_on_triton_kernels():
    model, texts = tiny_model("qwen3", num_hidden_layers=1), prompts([1, 8])
    method = PosS(random_drafter(model, dtype=torch.float32), width=2, depth=2, total_tokens=5)
    with use_backend("triton"):
        output = generate(model, texts, method, max_new_tokens=3)
    assert output.new_tokens == [greedy_by_transformers(model, p, 3) for p in texts]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("total_tokens", [60, None])
@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gpt_oss"])
def test_on_a_gpu(family, total_tokens):
    model, texts = tiny_model(family).cuda(), prompts([9, 300, 170])
    drafter = random_drafter(model, dtype=torch.float32).cuda()
    method = PosS(drafter, total_tokens=total_tokens)
    output = generate(model, texts, method, max_new_tokens=32)
    assert output.new_tokens == [greedy_by_transformers(model, p.cuda(), 32) for p in texts]
