"""Tiny random models of every family, decisive enough that rounding never changes a token."""

from functools import cache

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoHybridConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StoppingCriteria,
    StoppingCriteriaList,
    YoutuConfig,
)

VOCABULARY = 96
WINDOW = 7

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-sliding": (Qwen2Config, _SLIDING),
    "qwen3": (Qwen3Config, {}),
    "qwen3-sliding": (Qwen3Config, _SLIDING),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (MistralConfig, {"sliding_window": WINDOW}),
    "gpt_oss": (
        GptOssConfig,
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131072,  # what its scaled rope is made for
        },
    ),
}

_SHORT = {"sliding_window": WINDOW, "num_hidden_layers": 4}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
OTHERS = {  # that not every test runs over
    "gemma2": (
        Gemma2Config,
        {
            **_SHORT,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 90.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {**_SHORT, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING},
    ),
    "phi3": (Phi3Config, {"sliding_window": WINDOW}),
    "phi4": (Phi3Config, {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3-longrope": (
        Phi3Config,
        {"rope_parameters": _LONG, "original_max_position_embeddings": 128, "head_dim": 8},
    ),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (Olmo3Config, {**_SHORT, "layer_types": _ALTERNATING}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "glm4": (Glm4Config, {"attention_bias": True}),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            **_EXPERTS,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "ministral": (MinistralConfig, {**_SHORT, "layer_types": _ALTERNATING}),
    "ministral3": (
        Ministral3Config,
        {
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "seed_oss": (SeedOssConfig, {"attention_bias": True, "attention_dropout": 0.0}),
    "cohere2": (Cohere2Config, {**_SHORT, "layer_types": _ALTERNATING, "logit_scale": 0.5}),
    "exaone4": (Exaone4Config, {**_SHORT, "layer_types": _ALTERNATING}),
    "llama-linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama-llama3": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "original_max_position_embeddings": 64,
                **_LLAMA3,
            }
        },
    ),
    "llama-yarn": (LlamaConfig, {"rope_parameters": _YARN}),
}

_STATES = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS_AND_ONE = {
    **_STATES,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
HYBRIDS = {  # three of four layers keep a state in place of keys
    "qwen3_next": (Qwen3NextConfig, _EXPERTS_AND_ONE),
    "qwen3_5": (Qwen3_5TextConfig, _STATES),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, _EXPERTS_AND_ONE),
    "olmo_hybrid": (
        OlmoHybridConfig,
        {**_STATES, "linear_num_key_heads": 4, "head_dim": 8, "rope_parameters": None},
    ),
}

_LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 24,
}
_GROUPS = {**_EXPERTS, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_YARN_OF_ALL = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
LATENTS = {  # one latent is cached for each token
    "deepseek_v2": (
        DeepseekV2Config,
        {**_LATENTS, **_GROUPS, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2-lite": (
        DeepseekV2Config,
        {**_LATENTS, **_GROUPS, "first_k_dense_replace": 1, "q_lora_rank": None}
        | {"topk_method": "greedy", "rope_parameters": _YARN_OF_ALL},
    ),
    "deepseek_v3": (DeepseekV3Config, {**_LATENTS, **_GROUPS, "first_k_dense_replace": 1}),
    "deepseek_v3-yarn": (
        DeepseekV3Config,
        {**_LATENTS, **_GROUPS, "first_k_dense_replace": 1, "rope_interleave": False}
        | {"attention_bias": True, "rope_parameters": _YARN_OF_ALL},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**_LATENTS, **_GROUPS, "n_group": 1}),
    "minicpm3": (
        MiniCPM3Config,
        {**_LATENTS, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16},
    ),
    "youtu": (YoutuConfig, _LATENTS),
}


def tiny_model(family="qwen3", *, seed=0, peak=8.0, **options):
    """Return a random float32 model in which attention matters and one token stands out.

    `peak` scales the logits: large for greedy tests, near 1 for tests of a sampled distribution.
    """
    torch.manual_seed(seed)
    config_class, own = {**CONFIGS, **OTHERS, **HYBRIDS, **LATENTS}[family]
    config = config_class(**{**SHAPE, **own, **options})
    return decisive(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), peak)


def decisive(model, peak=8.0):
    """Return `model` with random weights that make its logits and its attention stand out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
            elif name.endswith(("q_proj.weight", "k_proj.weight", "q_b_proj.weight")):
                parameter.normal_(0.0, 0.6)  # peaked attention: a wrong key changes the text
            elif name.endswith(("v_proj.weight", "o_proj.weight", "kv_b_proj.weight")):
                parameter.normal_(0.0, 0.1)  # and a missing one does so only now and then
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
            else:
                parameter.normal_(0.0, 0.1)
        model.get_output_embeddings().weight.mul_(peak)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    return model


def is_recorded(target):
    """Whether a target's passes of few rows run as recorded kernel calls."""
    return type(target.runner).__name__ == "KernelRunner"


def letters():
    """Return a tokenizer that spells every token as one printable character."""
    vocabulary = {chr(32 + n): n for n in range(VOCABULARY)}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


# Families that a drafter reads as one of the others: experts lie behind what it reads, and biases,
# norms by head and windows are those of qwen2-sliding, qwen3 and mistral-sliding.
READ_ALIKE = ("qwen2", "qwen3-sliding", "qwen3_moe", "mistral")

# Every other family with a batch of three; with one request alone quickly in one.
BATCHES = [
    pytest.param(
        family,
        lengths,
        id=f"{family}-batch-{len(lengths)}",
        marks=pytest.mark.slow
        if family in READ_ALIKE or len(lengths) == 1 and family != "qwen3"
        else (),
    )
    for family in CONFIGS
    for lengths in ((31,), (5, 23, 1))
]


def prompts(lengths, *, vocabulary=VOCABULARY, seed=1):
    """Return random prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]


def nothing_follows(model, prompt, max_new_tokens, **options):
    """Return whether transformers' greedy text comes to a place where no token is allowed."""
    with torch.no_grad():
        steps = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        ).scores
    return any(bool((scores == -torch.inf).all()) for scores in steps)


def greedy_by_transformers(model, prompt, max_new_tokens, **options):
    """Return how transformers itself continues a prompt, with its own attention and cache."""
    ids = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **options,
    )
    return ids[0, len(prompt) :].tolist()


@cache
def known(family, lengths, max_new_tokens, *, seed=0, vocabulary=VOCABULARY):
    """Return a model, prompts, and how transformers continues each: once for all that ask alike."""
    model, texts = (
        tiny_model(family, seed=seed, vocab_size=vocabulary),
        prompts(lengths, vocabulary=vocabulary),
    )
    return model, texts, [greedy_by_transformers(model, text, max_new_tokens) for text in texts]


def skewed_text(length, vocabulary, seed):
    """Return random tokens of which small ones are frequent, as words are."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(length, generator=generator) ** 4 * vocabulary
    return drawn.long().tolist()


class _EndAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def ending_at(length):
    """Return options that end texts at a length long before they must: no draft is cut short."""
    return {"max_new_tokens": 200, "stopping_criteria": StoppingCriteriaList([_EndAt(length)])}
