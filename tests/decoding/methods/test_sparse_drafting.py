"""What each rival of Vegas reads while it drafts, against a plain statement of its rule.

The statements are loops in float64 over what the passes of a real run saw: the keys that lay in the
cache and the queries that came. Where they rank, a method's choice is right when nothing that it
left out ranks above what it took by more than rounding can explain.
"""

import copy
import math
from dataclasses import dataclass

import pytest
import torch

from specattn.decoding import Quest, SpecExtend, Streaming, TriForce, generate
from specattn.decoding.passes.attention import Pass
from tests.decoding.engine.test_loop import StopAt
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

# What the cache holds beyond a request's length is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

NEW_TOKENS = 30
LENGTHS = (3, 61, 40)
SHARE = {"gamma": 3, "ratio": 0.3, "min_tokens": 6}


@dataclass
class Step:
    """What one full-attention layer of a draft pass saw and read, for one request."""

    request: int
    layer: int
    committed: int  # tokens in the cache before the round
    drafted: int  # tokens between them and the query
    q: torch.Tensor  # [Hq, D], float64
    k: torch.Tensor  # [N, Hk, D], float64
    read: list  # positions, one list per KV head


@dataclass
class Asked:
    """What one full-attention layer of a verification saw, for one request."""

    request: int
    layer: int
    committed: int
    q: torch.Tensor  # [T, Hq, D], float64
    k: torch.Tensor  # [N, Hk, D], float64

    @property
    def largest_logit(self):
        """The largest scaled logit of any row with the prefix, whatever its sign."""
        k = self.k[: self.committed].repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        logits = torch.einsum("thd,nhd->thn", self.q, k) * self.q.shape[-1] ** -0.5
        return float(logits.abs().amax())


def recorded(monkeypatch, model, method, *, ends=None):
    """Run a ragged batch; return its steps, and what verified rows asked for.

    A request is known by the first key of its first layer, for rows move when others end.
    """
    steps, asked, first_keys = [], [], []
    attend = Pass.attend

    def recording(self, layer, q, k, v, **options):
        seqlens = self.cache.seqlens.tolist()
        out = attend(self, layer, q, k, v, **options)
        verifies = self.queries is not None or self.scores is not None
        if self.windows[layer] is not None or not (verifies or self.selector is not None):
            return out
        if not first_keys:
            first_keys.extend(self.cache.layer(0)[0][:, 0].clone())
        full = self.windows[:layer].count(None)
        for row, committed in enumerate(seqlens):
            key = self.cache.layer(0)[0][row, 0]
            request = next(n for n, one in enumerate(first_keys) if torch.equal(one, key))
            keys = self.cache.layer(layer)[0][row].double().clone()
            if self.selector is None:
                asked.append(Asked(request, full, committed, q[row].double(), keys))
                continue
            indices, lengths = (x[row] for x in self.selector.select(full, q))
            if indices.dim() == 1:
                indices, lengths = indices[None], lengths[None]
            read = [one[:n].tolist() for one, n in zip(indices, lengths.tolist(), strict=True)]
            read *= keys.shape[1] // len(read)
            drafted = int(self.prefix[row]) - committed
            steps.append(Step(request, full, committed, drafted, q[row, 0].double(), keys, read))
        return out

    monkeypatch.setattr(Pass, "attend", recording)
    texts = [torch.cat([torch.tensor([n]), p]) for n, p in enumerate(prompts(LENGTHS))]
    criteria = [StopAt({n: len(texts[n]) + new for n, new in (ends or {}).items()})]
    options = {"max_new_tokens": NEW_TOKENS, "stopping_criteria": criteria, "compile": "off"}
    output = generate(model, texts, method, **options)
    assert steps
    return steps, asked, output


def share_of(tokens, unit=1):
    """Return how many of so many units of tokens are within the budget."""
    capture = max(math.ceil(SHARE["ratio"] * tokens - 1e-6), math.ceil(SHARE["min_tokens"] / unit))
    return min(capture, tokens)


def taken_apart(read, size, behind):
    """Return which chunks a list of positions holds; it must go on with all from `behind` on."""
    chunks = [position for position in read if position < behind]
    assert read == sorted(set(read)), "ascending, and each position once"
    assert read[len(chunks) :] == list(range(behind, behind + len(read) - len(chunks)))
    numbers = sorted({position // size for position in chunks})
    assert chunks == [n * size + i for n in numbers for i in range(size)], "whole chunks"
    return numbers


def assert_best(chosen, scores, slack=0.0):
    """Raise unless no score left out is above one that was taken, rounding apart."""
    out = [score for n, score in enumerate(scores) if n not in chosen]
    if chosen and out:
        assert min(scores[n] for n in chosen) >= max(out) - slack


@pytest.fixture(params=["qwen3", "gpt_oss"])
def model(request):
    """A model of full layers alone, and one in which every other layer slides."""
    return tiny_model(request.param)


@pytest.mark.parametrize("sinks", [0, 2])
def test_streaming_reads_the_first_tokens_and_the_last(monkeypatch, model, sinks):
    steps, _, _ = recorded(monkeypatch, model, Streaming(**SHARE, sinks=sinks), ends={1: 9})
    for step in steps:
        n = step.committed
        count = max(share_of(n), min(sinks, n))
        expected = {position for position in range(n) if position < sinks}
        expected |= set(range(n - (count - len(expected)), n))
        expected |= set(range(n, n + step.drafted))
        assert step.read == [sorted(expected)] * len(step.read)


def test_a_budget_in_tokens_does_not_grow(monkeypatch):
    steps, _, _ = recorded(monkeypatch, tiny_model(), Streaming(gamma=2, budget=9, sinks=3))
    assert {len(step.read[0]) - step.drafted for step in steps if step.committed > 9} == {9}


def page_bound(q, keys):
    """Return the largest product that any key within the page's box can have with q."""
    return float(torch.maximum(q * keys.amin(0), q * keys.amax(0)).double().sum())


@pytest.mark.parametrize("size", [4, 5])
def test_quest_reads_the_pages_with_the_largest_bounds(monkeypatch, model, size):
    """Requests grow by whole pages and end one after the other, so bounds are kept up to date."""
    method = Quest(**SHARE, page_size=size)
    steps, _, _ = recorded(monkeypatch, model, method, ends={0: 25, 2: 9})
    assert len({step.committed // size for step in steps if step.request == 1}) > 3
    for step in steps[:: len(steps) // 25]:
        pages, heads = step.committed // size, step.k.shape[1]
        for head, read in enumerate(step.read):
            chosen = taken_apart(read, size, pages * size)
            assert len(read) - len(chosen) * size == step.committed % size + step.drafted
            assert len(chosen) == share_of(pages, size)
            group = step.q.view(heads, -1, step.q.shape[-1])[head]
            bounds = [
                sum(page_bound(q, step.k[p * size : p * size + size, head]) for q in group)
                for p in range(pages)
            ]
            assert_best(chosen, bounds, slack=1e-4 * max(map(abs, bounds), default=0))


def test_quest_asks_every_step_and_layer_anew(monkeypatch):
    steps, _, _ = recorded(monkeypatch, tiny_model(), Quest(**SHARE, page_size=4))
    one = [s for s in steps if s.request == 1 and s.committed == steps[-1].committed]
    for key in ("drafted", "layer"):
        groups = {}
        for step in one:
            whole = step.committed // 4 * 4
            pages = tuple(p for head in step.read for p in head if p < whole)
            groups.setdefault(getattr(step, key), []).append(pages)
        assert len(groups) == 3
        first, *others = groups.values()
        assert any(pages != first for pages in others)


def attention_weights(model, text):
    """Return transformers' own attention weights of a text's tokens: per layer [Hq, L, L]."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [layer[0] for layer in model(text[None], output_attentions=True).attentions]


@pytest.mark.parametrize("size", [4, 5])
def test_specextend_reads_what_the_last_accepted_token_attended_to(monkeypatch, model, size):
    method = SpecExtend(**SHARE, chunk_size=size)
    steps, asked, output = recorded(monkeypatch, model, method, ends={2: 9})
    largest = {(one.request, one.layer, one.committed): one.largest_logit for one in asked}
    full = [n for n, w in enumerate(getattr(model.config, "layer_types", [])) if "full" in w]
    last_row_matters = False
    for request, text in enumerate(output.sequences):
        own = [step for step in steps if step.request == request]
        rounds = sorted({step.committed for step in own})
        weights = attention_weights(model, text)
        # A round chooses among what was cached when the round before was verified; the first one
        # verified the prompt's last token.
        before = [LENGTHS[request], *rounds[:-1]]
        for committed, prefix in zip(rounds, before, strict=True):
            chunks = prefix // size
            for step in (s for s in own if s.committed == committed):
                assert step.read == step.read[:1] * len(step.read), "shared by all heads"
                chosen = taken_apart(step.read[0], size, chunks * size)
                assert step.read[0][-1:] == [committed + step.drafted - 1]
                assert len(chosen) == share_of(chunks, size)
                layer = weights[full[step.layer]]
                row = layer[:, committed - 1].mean(0)  # of the last token that was accepted
                means = [float(row[c * size : c * size + size].mean()) for c in range(chunks)]
                # Weights come of logits in bfloat16, of a relative precision of 2**-9.
                off = largest[request, step.layer, prefix] * 2**-9
                slack = 2 * math.expm1(off) * max(means, default=0) + 1e-6
                assert_best(chosen, means, slack)
                root = layer[:, prefix].mean(0)
                best = sorted(range(chunks), key=lambda c: -float(root[c * size :][:size].mean()))
                last_row_matters |= sorted(best[: len(chosen)]) != chosen
    assert last_row_matters, "the root's weights must lead elsewhere"


@pytest.mark.parametrize("size", [4, 5])
def test_triforce_reads_chunks_by_their_mean_key(monkeypatch, model, size):
    method = TriForce(**SHARE, chunk_size=size)
    steps, asked, _ = recorded(monkeypatch, model, method, ends={1: 9, 0: 20})
    assert len(asked) == 3 * len({step.layer for step in steps}), "in the first round alone"
    for one in asked:
        prefix, heads = one.committed, one.k.shape[1]
        assert prefix == LENGTHS[one.request], "all of the prompt but its last token"
        chunks = prefix // size
        for head in range(heads):
            group = one.q[0].view(heads, -1, one.q.shape[-1])[head]
            means = [one.k[c * size : c * size + size, head].mean(0) for c in range(chunks)]
            scores = [sum(float(q @ mean) for q in group) for mean in means]
            own = [s for s in steps if (s.request, s.layer) == (one.request, one.layer)]
            choices = {tuple(taken_apart(s.read[head], size, chunks * size)) for s in own}
            (chosen,) = choices  # once and for all
            assert len(chosen) == share_of(chunks, size)
            assert not chunks or 0 in chosen
            slack = 1e-4 * max(map(abs, scores), default=0)
            assert_best([c for c in chosen if c], [-math.inf, *scores[1:]][:chunks], slack)
            for step in own:
                newer = step.committed - chunks * size + step.drafted
                assert len(step.read[head]) == len(chosen) * size + newer


@pytest.mark.parametrize("method", [Streaming, Quest, SpecExtend, TriForce])
def test_selecting_everything_makes_every_draft_right(method):
    model, texts = tiny_model("gpt_oss"), prompts([9, 17])
    output = generate(model, texts, method(gamma=3, ratio=1.0), max_new_tokens=13)
    assert output.statistics.total.acceptance_rate == 1


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of another family that half agrees with `tiny_model()`."""
    folder = tmp_path_factory.mktemp("small")
    tiny_model("llama", seed=5, num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("draft_gamma", [1, 3])
def test_the_hierarchy_says_what_the_target_says(small, draft_gamma):
    model, texts = tiny_model("gpt_oss"), prompts([40, 2, 300])
    method = TriForce(
        gamma=4, ratio=0.3, min_tokens=8, draft=small, draft_gamma=draft_gamma, draft_budget=30
    )
    output = generate(model, texts, method, max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == [greedy_by_transformers(model, p, NEW_TOKENS) for p in texts]
    assert 0 < output.statistics.total.accepted < output.statistics.total.drafted


@pytest.mark.parametrize("family", ["qwen3", "qwen2-sliding"])
@pytest.mark.parametrize("draft_gamma", [1, 2, 5])
def test_a_small_model_that_is_the_target_is_always_right(family, draft_gamma):
    """Both levels read everything: each middle pass keeps all guesses and adds a token."""
    model, texts = tiny_model(family), prompts([9, 17, 1])
    method = TriForce(
        gamma=6, ratio=1.0, draft=tiny_model(family), draft_gamma=draft_gamma, draft_budget=200
    )
    statistics = generate(model, texts, method, max_new_tokens=29).statistics
    assert statistics.total.acceptance_rate == 1
    passes = -(-6 // (draft_gamma + 1))
    said = statistics.details["tokens per pass of the middle level"]
    assert said == pytest.approx(6 / passes)


def test_a_chain_of_the_hierarchy_is_what_the_middle_level_says_alone(small):
    """Greedy chains do not depend on who guessed: the same rounds as without the small model."""
    model, texts = tiny_model("gpt_oss"), prompts([50, 23])
    options = {"gamma": 5, "ratio": 0.3, "min_tokens": 8}
    alone, both = (
        generate(model, texts, TriForce(**options, **draft), max_new_tokens=NEW_TOKENS).statistics
        for draft in ({}, {"draft": small, "draft_gamma": 2})
    )
    assert [r.to_dict() for r in alone.requests] == [r.to_dict() for r in both.requests]


def test_a_small_model_with_other_tokens_is_refused(tmp_path):
    tiny_model("llama", vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="draft: a vocabulary of 50 tokens, the target's has 96"):
        generate(tiny_model(), prompts([5]), TriForce(draft=tmp_path), max_new_tokens=2)
    with pytest.raises(ValueError, match="draft: nowhere is not a folder"):
        generate(tiny_model(), prompts([5]), TriForce(draft="nowhere"), max_new_tokens=2)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (Streaming, {"gamma": 0}, "gamma must be at least 1, got 0"),
        (Streaming, {"ratio": 1.5}, r"ratio must be in \(0, 1\], got 1.5"),
        (Streaming, {"budget": 0}, "budget must be at least 1, got 0"),
        (Streaming, {"min_tokens": -1}, "min_tokens must not be negative, got -1"),
        (Streaming, {"sinks": -1}, "sinks must not be negative, got -1"),
        (Quest, {"page_size": 0}, "page_size must be at least 1, got 0"),
        (Quest, {"gamma": 0}, "gamma must be at least 1"),
        (SpecExtend, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (SpecExtend, {"ratio": 0.0}, "ratio must be in"),
        (TriForce, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (TriForce, {"draft_gamma": 0}, "draft_gamma must be at least 1, got 0"),
        (TriForce, {"draft_budget": 16}, "draft_budget must be more than 16, got 16"),
        (TriForce, {"budget": -3}, "budget must be at least 1, got -3"),
    ],
)
def test_parameters_out_of_range(method, options, message):
    with pytest.raises(ValueError, match=message):
        method(**options)


def test_heads_too_wide_for_quest_are_refused():
    model = tiny_model(head_dim=136)
    with pytest.raises(ValueError, match="at most 128 channels, got 136"):
        generate(model, prompts([5]), "quest", max_new_tokens=2)
