"""Models that cache one latent for each token decode as they do in transformers."""

from functools import cache, partial

import pytest
import torch

from specattn.blocks import TORCH, Rotated, Unrecognised
from specattn.decoding import Target, generate, prove
from specattn.decoding.model.latents import latent_layers
from specattn.decoding.passes import attention
from specattn.decoding.passes.latents import latent_heads
from specattn.tree import Tree
from tests.decoding import own_memory, settings
from tests.decoding.models import (
    LATENTS,
    greedy_by_transformers,
    is_recorded,
    known,
    prompts,
    tiny_model,
)
from tests.decoding.own_memory import LENGTHS, NEW_TOKENS
from tests.drafters import poss_statement
from tests.drafters.statement import random_drafter

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ONE_OF_A_KIND = ("plain", "vegas", "streaming", "quest", "suffix", "tokenswift", "token_recycling")
QUICK = {("plain", "off"), ("plain", "on"), ("vegas", "on"), ("token_recycling", "on")}


def with_latents(family):
    """Return a model, prompts and their texts by transformers."""
    return known(family, LENGTHS, NEW_TOKENS)


@cache
def methods():
    """Return a method of every kind for the model of one family."""
    return settings.settings_without_layers(tiny_model("deepseek_v3"))


@pytest.mark.parametrize("name", settings.settings_without_layers(tiny_model("deepseek_v3")))
def test_every_method_says_what_transformers_says(name):
    model, texts, expected = with_latents("deepseek_v3")
    output = generate(model, texts, methods()[name], max_new_tokens=NEW_TOKENS, compile="on")
    assert output.new_tokens == expected


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        pytest.param(name, compile, marks=() if (name, compile) in QUICK else pytest.mark.slow)
        for name in ONE_OF_A_KIND
        for compile in ("off", "on")
    ],
)
@pytest.mark.parametrize("family", LATENTS)
def test_every_family_says_what_transformers_says(family, name, compile):
    model, texts, expected = with_latents(family)
    method = settings.settings_without_layers(model)[name]
    output = generate(model, texts, method, max_new_tokens=NEW_TOKENS, compile=compile)
    assert output.new_tokens == expected
    if name in ("vegas", "streaming", "quest"):
        assert output.statistics.total.accepted > 0, "drafts should not be useless"


def test_a_row_of_the_cache_is_key_and_value():
    model = tiny_model("deepseek_v3")
    cache = Target(model, 2, 32).cache
    config = model.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert cache.storage.shape == (config.num_hidden_layers, 1, 2, 32, 1, width)
    k, v = cache.layer(1)
    assert v.shape[-1] == config.kv_lora_rank
    assert v.data_ptr() == k.data_ptr()
    assert cache.nbytes == config.num_hidden_layers * 2 * 32 * width * 4


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_text_that_was_said_before_is_accepted_and_stays_the_same(compile):
    own_memory.check_repetition(tiny_model("deepseek_v2"), compile)


def test_a_request_that_ends_early_leaves_the_others_alone():
    own_memory.check_early_end(*with_latents("deepseek_v3"))


def test_a_seed_decides_the_text():
    own_memory.check_seed(tiny_model("glm4_moe_lite", peak=2.0))


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("counts", [(9, 300), (300,)], ids=["ragged", "one"])
def test_expanding_a_prompt_does_not_show(counts, compile, monkeypatch):
    """Keys and values are made of the latents of two heads at a time, behind a prefix too."""
    monkeypatch.setattr("specattn.decoding.passes.latents._EXPANDED_BYTES", 2**16)
    model, texts = tiny_model("deepseek_v2-lite"), prompts(counts)
    expected = [greedy_by_transformers(model, text, 4) for text in texts]
    seen, inner = [], attention.expanded
    monkeypatch.setattr(attention, "expanded", lambda *a, **k: (seen.append(1), inner(*a, **k))[1])
    for rows in (64, attention.EXPANDED_ROWS):
        options = {"prefill_chunk_size": rows, "compile": compile}
        assert generate(model, texts, "plain", max_new_tokens=4, **options).new_tokens == expected
        assert bool(seen) == (rows >= attention.EXPANDED_ROWS)


@torch.no_grad()
def test_queries_of_latents_give_the_logits_of_keys():
    """q . (W_UK c) is (W_UK^T q) . c."""
    model = tiny_model("deepseek_v3")
    weights = latent_layers(model)[1]
    x = torch.randn(1, 6, 32)
    cos, sin = model.model.rotary_emb(x, torch.arange(6)[None])
    place = Rotated(*(part[:, :, None, : part.shape[-1] // 2] for part in (cos, sin)))
    q, row = latent_heads(TORCH, weights, x, place)
    of_latents = TORCH.by_head(q[..., : weights.nope], weights.k_up, q[..., weights.nope :])
    found = torch.einsum("bthd,bsd->bhts", of_latents, row[:, :, 0])
    latents, turned = row[:, :, 0].split([weights.rank, row.shape[-1] - weights.rank], -1)
    keys = torch.einsum("bsr,hnr->bshn", latents, weights.up[:, : weights.nope])
    keys = torch.cat([keys, turned[:, :, None].expand(-1, -1, 4, -1)], -1)
    torch.testing.assert_close(found, torch.einsum("bthd,bshd->bhts", q, keys))


def test_weights_that_change_are_read_anew():
    model = tiny_model("deepseek_v3")
    projections = [layer.self_attn.kv_b_proj for layer in model.model.layers]
    own_memory.check_changed_weights(model, projections)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3"])
@torch.no_grad()
def test_recorded_passes_in_bfloat16_are_the_models_own(family):
    model = tiny_model(family, peak=1.0).bfloat16()
    tree, found = Tree([-1, 0, 0, 1, 1, 2, 5]), []
    tokens = torch.stack(prompts([7] * 2, seed=3))
    for how in ("on", "off"):
        target = Target(model, 2, 48, how)
        assert is_recorded(target) == (how == "on")
        target.prefill(prompts([5, 19]), chunk_size=8)
        found.append(target.verify(tree, tokens).features.float())
    error = (found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)
    assert error.median() < 0.05


def test_rounded_weights_are_decoded():
    model, (text,) = tiny_model("deepseek_v3"), prompts([20])
    rounded = [
        generate(model, text, "plain", max_new_tokens=8, quantize="int8", compile=how).new_tokens
        for how in ("on", "off")
    ]
    assert rounded[0] == rounded[1]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_runs_from_a_snapshot_begin_with_the_prompts_latents(family):
    own_memory.check_snapshot(tiny_model(family), (20, 20))


def test_a_model_decodes_by_itself_as_before():
    own_memory.check_model_by_itself(
        tiny_model("deepseek_v3"), lambda layer: layer.self_attn.o_proj
    )


def test_a_layer_that_something_else_has_taken_over_is_refused():
    model = tiny_model("minicpm3")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **options: (hidden_states, None)
    with pytest.raises(ValueError, match="layer 1 keeps latents, and its forward was replaced"):
        prove(model)


def test_queries_that_positions_scale_are_not_guessed():
    model = tiny_model("deepseek_v3")
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.1
    with pytest.raises(Unrecognised, match="layer 0: queries are scaled by position"):
        latent_layers(model)


def test_no_drafter_is_a_layer_with_latents():
    model = tiny_model("deepseek_v3")
    for drafter in (random_drafter, poss_statement.random_drafter):
        with pytest.raises(ValueError, match="a layer of 'deepseek_v3', which caches latents"):
            drafter(model, **({"window": 7} if drafter is random_drafter else {"layers": 2}))


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_latents_of_eight_bits(rounding_ties, kv_dtype):
    """What was stored is what every pass sees, so texts are those of plain decoding over it."""
    model, texts, _ = with_latents("deepseek_v3")
    options = {"max_new_tokens": 12, "kv_dtype": kv_dtype}
    plainly = partial(generate, model, texts, "plain", **options, compile="off")
    expected = plainly().new_tokens
    for name in ("plain", "token_recycling", "vegas"):
        found = generate(model, texts, methods()[name], **options).new_tokens
        rounding_ties.check(found, expected, plainly)
    target = Target(model, 1, 32, kv_dtype=kv_dtype)
    target.prefill(prompts([20]), 8)
    (rows, values), exact = target.cache.layer(1), Target(model, 1, 32)
    exact.prefill(prompts([20]), 8)
    assert values.data_ptr() == rows.data_ptr()
    found = target.cache.numbers(target.cache.storage[1, 0, 0, :20])
    expected = exact.cache.storage[1, 0, 0, :20]
    assert 0 < (found - expected).norm() / expected.norm() < 0.05


def test_ranks_are_refused(monkeypatch):
    own_memory.check_ranks_refused(tiny_model("deepseek_v3"), "latents", monkeypatch)
