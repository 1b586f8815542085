"""Families beyond those of every other test: their texts are transformers' own."""

from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Kimi_K25Config,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    SiglipVisionConfig,
)

from specattn.decoding import FAMILIES, Target, generate
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.text_model import text_model
from specattn.tree import Tree
from tests.decoding.models import (
    CONFIGS,
    HYBRIDS,
    LATENTS,
    OTHERS,
    SHAPE,
    decisive,
    greedy_by_transformers,
    is_recorded,
    prompts,
    tiny_model,
)
from tests.decoding.passes.test_static_pass import LENGTHS, PARENTS, assert_alike, two_targets
from tests.decoding.settings import settings_of, settings_without_layers
from tests.decoding.test_greedy import METHODS, ON_THE_CACHE
from tests.drafters.statement import random_drafter

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NEW_TOKENS = 12
# Ropes that turn neighbours, and not the halves of a head; queries scaled by their position.
EAGER = {"glm4", "cohere2", "ministral3"}
# No trained drafter has the shape of their layers: one projection for q, k and v; no RMSNorm.
NO_LAYERS = {"phi3", "phi3-longrope", "phi4", "cohere2"}
# Of settings.py, which tests of other families try: drafters that learn from the model's features.
TRAINED = ("auto", "medusa", "tokenswift", "tokenswift-static")
OF_LAYERS = ("longspec-tree", "longspec-chain", "poss", "eagle3")
# What a family may do otherwise: passes, selections in its layers, features, layers of drafters.
DIFFERENT = (
    *("plain", "vegas", "quest", "triforce-hierarchy", "tokenswift", "longspec-tree", "poss"),
    "eagle3",
)


@cache
def known(family):
    """Return a family's model, methods for it, and transformers' own texts."""
    model, texts = tiny_model(family), prompts([5, 40])
    trained = settings_without_layers if family in NO_LAYERS else settings_of
    methods = {**trained(model), **METHODS}
    return model, methods, [greedy_by_transformers(model, text, NEW_TOKENS) for text in texts]


def pairs():
    """Return every family with every method; one of each that reads a model alike is quick."""
    for family in OTHERS:
        of_layers = () if family in NO_LAYERS else OF_LAYERS
        for method in (*METHODS, *TRAINED, *of_layers):
            marks = () if method in DIFFERENT else pytest.mark.slow
            yield pytest.param(family, method, marks=marks)


@pytest.mark.filterwarnings("ignore:.* decodes through its own:UserWarning")
@pytest.mark.parametrize(("family", "method"), list(pairs()))
def test_a_ragged_batch_equals_transformers(family, method):
    model, methods, expected = known(family)
    compiled = "auto" if family in EAGER else "on"
    output = generate(
        model, prompts([5, 40]), methods[method], max_new_tokens=NEW_TOKENS, compile=compiled
    )
    assert output.new_tokens == expected
    if method in OF_LAYERS:
        assert output.statistics.total.drafted > 0


@pytest.mark.parametrize("family", sorted(OTHERS.keys() - EAGER))
def test_kernel_calls_alone_are_the_models_own_pass(family):
    model = tiny_model(family, peak=1.0)
    tree = Tree(PARENTS)
    tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=3))
    with torch.no_grad():
        found, expected = (target.verify(tree, tokens) for target in two_targets(model))
    assert_alike(model, found.logits, expected.logits)
    assert_alike(model, found.features, expected.features)


@pytest.mark.parametrize("family", ["gemma2", "granite", "olmo3", "phi4"])
def test_kernel_calls_in_bfloat16(family):
    model = tiny_model(family, peak=1.0).bfloat16()
    tokens = torch.stack(prompts([7] * len(LENGTHS), seed=3))
    with torch.no_grad():
        found, expected = (t.verify(Tree(PARENTS), tokens) for t in two_targets(model))
    assert_alike(model, found.features, expected.features)


@pytest.mark.parametrize("family", sorted(EAGER))
def test_what_the_recorder_does_not_take_is_said_once(family):
    with pytest.warns(UserWarning, match="decodes through its own, slower modules: layer 0"):
        assert not is_recorded(Target(tiny_model(family), 1, 8))


def test_every_family_has_a_model_here():
    names = (*CONFIGS, *OTHERS, *HYBRIDS, *LATENTS)
    tested = {tiny_model(name).config.model_type for name in names}
    assert tested == set(FAMILIES)


_OWN_HEAD = {"tie_word_embeddings": False}
_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
WRAPPERS = {
    "mistral-small": lambda: Mistral3Config(
        text_config=MistralConfig(**SHAPE, sliding_window=None),
        vision_config=PixtralVisionConfig(**_EYES, head_dim=8),
        **_OWN_HEAD,
    ),
    "ministral-3": lambda: Mistral3Config(
        text_config=Ministral3Config(**SHAPE),
        vision_config=PixtralVisionConfig(**_EYES, head_dim=8),
        **_OWN_HEAD,
    ),
    "gemma-3": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(**{**SHAPE, **OTHERS["gemma3"][1]}),
        vision_config=SiglipVisionConfig(**_EYES),
        mm_tokens_per_image=4,
        **_OWN_HEAD,
    ),
    "qwen-3.5": lambda: Qwen3_5Config(
        text_config=Qwen3_5TextConfig(**{**SHAPE, **HYBRIDS["qwen3_5"][1]}).to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}
        | {"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
        **_OWN_HEAD,
    ),
    "kimi-k2.5": lambda: Kimi_K25Config(
        text_config={"model_type": "kimi_k2", **SHAPE, **LATENTS["deepseek_v3"][1]},
        vision_config={**_EYES, "pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=16,
        **_OWN_HEAD,
    ),
}


@pytest.fixture(params=WRAPPERS)
def reader_of_images(request):
    torch.manual_seed(0)
    return decisive(AutoModelForImageTextToText.from_config(WRAPPERS[request.param]()).eval())


def test_a_model_that_reads_images_continues_text(reader_of_images):
    (text,) = prompts([30])
    expected = greedy_by_transformers(reader_of_images, text, NEW_TOKENS)
    assert len(set(expected)) > 1
    method = METHODS["token_recycling"]
    output = generate(reader_of_images, text, method, max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == [expected]
    ids = reader_of_images.generate(
        text[None],
        attention_mask=torch.ones_like(text)[None],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        custom_generate=METHODS["vegas"],
    )
    assert ids[0, len(text) :].tolist() == expected


def test_a_folder_of_such_a_model_loads_as_its_text_model(reader_of_images, tmp_path):
    reader_of_images.save_pretrained(tmp_path)
    model, (text,) = load_causal_model(tmp_path, torch.float32), prompts([30])
    inside = text_model(reader_of_images)
    assert type(model) is type(inside)
    found, expected = model.state_dict(), inside.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)
    expected = greedy_by_transformers(reader_of_images, text, 4)
    assert generate(model, text, "plain", max_new_tokens=4).new_tokens == [expected]


def test_one_text_model_is_made_for_each(reader_of_images):
    assert text_model(reader_of_images) is text_model(reader_of_images)
    model = tiny_model("llama")
    assert text_model(model) is model


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "options", "limit"),
    [
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, 64),
        ("phi3-longrope", {}, 128),
    ],
    ids=["dynamic", "longrope"],
)
def test_a_rope_that_turns_with_the_length_is_served_as_far_as_it_does_not(family, options, limit):
    model, (text,) = tiny_model(family, **options), prompts([limit - 9])
    output = generate(model, text, "plain", max_new_tokens=8)
    assert output.new_tokens == [greedy_by_transformers(model, text, 8)]
    with pytest.raises(ValueError, match=f"turns with the current length beyond {limit} tokens"):
        Target(model, 1, limit + 1)


def test_a_longrope_whose_factors_are_the_same_does_not_turn_with_the_length():
    factors = [2.0] * 4
    limit = {"original_max_position_embeddings": 32}
    rope = {**OTHERS["phi3-longrope"][1]["rope_parameters"], **limit}
    rope |= {"short_factor": factors, "long_factor": factors}
    model = tiny_model("phi3-longrope", rope_parameters=rope, **limit)
    (text,) = prompts([28])
    output = generate(model, text, METHODS["token_recycling"], max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == [greedy_by_transformers(model, text, NEW_TOKENS)]


@pytest.mark.parametrize("family", sorted(NO_LAYERS))
def test_layers_that_no_drafter_is_shaped_as_are_refused(family):
    with pytest.raises(ValueError, match="no drafter has the shape of a layer of"):
        random_drafter(tiny_model(family), window=7, dtype=torch.float32)


@pytest.mark.parametrize("family", ["gemma3", "olmo3", "smollm3"])
def test_methods_on_the_cache_have_layers_to_draft_on(family):
    """So that the tests above try what they are for."""
    model, (text,) = tiny_model(family), prompts([40])
    for method in ON_THE_CACHE:
        total = generate(model, text, METHODS[method], max_new_tokens=8).statistics.total
        assert total.drafted > 0
