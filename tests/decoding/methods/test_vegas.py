"""Vegas selects what equation (3) says, in every layer and round of real runs."""

import math
from dataclasses import dataclass, field
from itertools import product
from typing import get_args

import pytest
import torch
from transformers import AttentionInterface

from specattn.decoding import Vegas, generate
from specattn.decoding.methods.vegas import Ranking, Rows
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

RATIO, MIN_TOKENS, GAMMA = 0.3, 6, 3
OPTIONS = {"gamma": GAMMA, "ratio": RATIO, "min_tokens": MIN_TOKENS, "switch": False}


@dataclass(frozen=True)
class Watched(Vegas):
    """Keeps what every verification led to."""

    seen: list = field(default_factory=list)

    def start(self, context):
        drafter = super().start(context)
        observe = drafter.observe

        def watching(verified):
            observe(verified)
            self.seen.append((verified, drafter.selected))

        drafter.observe = watching
        return drafter


def attention_of(model, ids):
    """Return logits and weights [Hq, L, L] of every full-attention layer, stated plainly."""
    seen = []

    def stated(module, q, k, v, mask, *, scaling, sliding_window=None, s_aux=None, **_):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        logits = (q @ k.transpose(-1, -2) * scaling)[0]
        distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
        hidden = (distance < 0) | (distance >= (sliding_window or len(ids)))
        sink = logits.new_zeros(len(logits)) - torch.inf if s_aux is None else s_aux
        sink = sink[:, None, None].expand(-1, len(ids), 1)
        seen_logits = logits.masked_fill(hidden, -torch.inf)
        weights = torch.cat([seen_logits, sink], -1).softmax(-1)[..., :-1]
        if sliding_window is None:
            seen.append((logits, weights))
        return (weights @ v[0])[None].transpose(1, 2), None

    AttentionInterface.register("stated", stated)
    before = model.config._attn_implementation
    model.set_attn_implementation("stated")
    with torch.no_grad():
        model(ids[None])
    model.set_attn_implementation(before)
    return seen


def selections():
    """Yield every way to select in every family; all in one with both kinds of layers are quick."""
    families = "qwen2-sliding", "llama", "gpt_oss"
    for family, rows, ranking, per_head in product(
        families, get_args(Rows), get_args(Ranking), (False, True)
    ):
        usual = (rows, ranking, per_head) in [("two", "logit", False), ("all", "weight", True)]
        quick = family == families[0] or usual
        name = f"{'per head' if per_head else 'shared'}-{rows}-{ranking}-{family}"
        marks = () if quick else pytest.mark.slow
        yield pytest.param(rows, ranking, family, per_head, id=name, marks=marks)


@pytest.mark.parametrize(("rows", "ranking", "family", "per_head"), list(selections()))
def test_it_selects_what_the_paper_says(rows, ranking, family, per_head):
    model, texts = tiny_model(family, peak=3.0), prompts([5, 40])
    method = Watched(rows=rows, ranking=ranking, per_head=per_head, **OPTIONS)
    groups = model.config.num_key_value_heads if per_head else 1
    assert not per_head or groups > 1
    output = generate(model, texts, method, max_new_tokens=12)
    assert output.new_tokens == [greedy_by_transformers(model, text, 12) for text in texts]
    if family == "gpt_oss":
        model.set_experts_implementation("eager")  # the default has no float64
    model.double()
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    full_layers = types.count("full_attention")
    exactly = compared = 0
    together = [pair for pair in method.seen if len(pair[0].prefix) == len(texts)]
    for verified, chosen in together:
        assert torch.equal(chosen.prefix, verified.prefix)
        for request, text in enumerate(output.sequences):
            prefix = int(verified.prefix[request])
            drafted = verified.draft.tokens[request]
            last = int(verified.accepted.counts[request])
            asked = {"two": [0, -1], "all": list(range(len(drafted))), "last": [last]}[rows]
            k = min(max(math.ceil(RATIO * prefix), MIN_TOKENS), prefix)
            assert set(chosen.selection.lengths[request].flatten().tolist()) == {k}
            truth = attention_of(model, torch.cat([text[:prefix], drafted]))
            assert len(truth) == len(chosen.selection.indices) == full_layers
            for layer, (logits, weights) in enumerate(truth):
                rated = logits if ranking == "logit" else weights
                assert rated.dtype == torch.float64
                rated = rated[:, prefix:][:, asked, :prefix].unflatten(0, (groups, -1))
                scores = rated.mean((1, 2))  # equation (3), over 2 H
                indices = chosen.selection.indices[layer, request]
                assert indices.dim() == 1 + per_head
                taken = indices.view(groups, -1)[:, :k].long()
                least = scores.sort().values[:, -k, None]
                # What is computed in bfloat16 is a logit x of which 2**-9 x may be missing.
                missing = 2 * logits.abs().max() * 2**-9
                slack = 2 * torch.expm1(missing) * least if ranking == "weight" else missing
                if ranking == "logit" and rows != "last":
                    slack = 1e-4
                assert (scores.gather(1, taken) >= least - slack).all()
                expected = scores.topk(k).indices
                exactly += (taken.sort().values == expected.sort().values).all(1).sum().item()
                compared += groups
    assert compared >= 10
    assert exactly >= 0.8 * compared


def test_it_draws_no_more_than_it_says_of_a_root():
    """A run of one token has one round, which has nothing to draft on."""
    output = generate(tiny_model(), prompts([9]), Vegas(**OPTIONS), max_new_tokens=1)
    assert output.statistics.total.drafted == 0


def test_the_switch_shows_in_the_statistics():
    model, texts = tiny_model(), prompts([30])
    on = generate(model, texts, Vegas(gamma=2, min_tokens=4, switch=True), max_new_tokens=80)
    off = generate(model, texts, Vegas(gamma=2, min_tokens=4), max_new_tokens=80)
    assert on.new_tokens == off.new_tokens
    assert off.statistics.details == {}
    details = on.statistics.details
    assert min(details["ms of a pass"].values()) > 0
    assert 2 <= details["rounds without a draft"] <= on.statistics.passes
    assert "plain decoding 1 in" in details["last choice"]


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}])
def test_a_given_length_is_drafted_in_every_round_unless_the_switch_is_on(sampling, switch):
    method = Vegas(gamma=2, min_tokens=4, switch=switch)
    output = generate(tiny_model(), prompts([9]), method, max_new_tokens=9, **sampling)
    history = output.statistics.requests[0].history
    assert bool(output.statistics.details) == switch
    if not switch:  # the first round has nothing selected, the last no use for a draft
        assert all(round.drafted for round in history[1:-1])
