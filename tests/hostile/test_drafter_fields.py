"""Drafters' folders with a field that is null, missing or something else: read as absent, or named.

Of every published layout and of our own. What loads with another value must draft with it: whatever
the drafter then computes, the text is the target's.
"""

import json
import warnings

import pytest
import torch

from specattn.decoding import DFlash, Eagle3, LongSpec, Medusa, Mtp, PosS, TokenSwift, generate
from specattn.drafters import (
    DFlashDrafter,
    Eagle3Drafter,
    LongSpecDrafter,
    MedusaHeads,
    MtpDrafter,
    PosSDrafter,
    TokenSwiftHeads,
    layouts,
    load_speculators,
    save_speculators,
)
from tests.decoding.methods import test_dflash as dflash
from tests.decoding.models import tiny_model
from tests.drafters import eagle3_statement, poss_statement
from tests.drafters.test_eagle3 import publish
from tests.hostile.fields import MISSING, NULL, WRONG, edited, paths, verdict, write

NEW_TOKENS = 6
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32, "beta_slow": 1}
WINDOW = {"sliding_window": 9, "layer_types": ["sliding_attention"], "use_sliding_window": True}


def target(family="llama", **own):
    return tiny_model(family, num_hidden_layers=6, **own)


def eagle3(folder, layout, *, tokens=24, layers=(2, 3, 4), **own):
    drafter = eagle3_statement.random_drafter(
        target(), layers=layers, tokens=tokens, dtype=torch.float32
    )
    return {**publish(folder, drafter, layout), "norm_before_residual": True, **own}


def safeailab(folder):
    extra = {"rope_scaling": LLAMA3, "rope_theta": 5e5, "mlp_bias": False, "attention_bias": False}
    return eagle3(folder, "safeailab", tokens=96, **extra, pretraining_tp=1, bos_token_id=1)


def sglang(folder):
    given = eagle3(folder, "sglang", target_hidden_size=32, rope_scaling=None, rope_theta=1e4)
    given |= {"max_window_layers": 48, "sliding_window": None, "use_sliding_window": False}
    return {**given, "fc_norm": False, "norm_output": True, "norm_before_fc": False}


def nvidia(folder):
    given = eagle3(folder, "sglang", attention_bias=False, quantization_config=None)
    given["eagle_config"] |= {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 0,
    }
    return given


def angelslim(folder):
    given = eagle3(folder, "safeailab", modal_type="LLM", partial_rotary_factor=1.0)
    given["architectures"] = ["Eagle3LlamaForCausalLM"]
    layers = {"aux_hidden_states_layer_ids": [1, 2, 3], "num_aux_hidden_states": 3}
    rope = {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0}}
    return given | layers | rope | {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}


def speculators(folder):
    given = eagle3(folder, "speculators", embed_requires_grad=False, parallel_drafting=False)
    given["transformer_layer_config"] |= WINDOW | {"rope_theta": 1e4, "attention_dropout": 0.0}
    given["speculators_config"] |= {
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    }
    return given


def read_config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def eagle(folder):
    drafter = poss_statement.random_drafter(target(), layers=1, dtype=torch.float32)
    save_speculators(drafter, folder)
    return read_config(folder)


def dflash_authors(folder):
    model = target("qwen3", vocab_size=dflash.V)
    dflash.store(folder, dflash.random_drafter(model))
    given = read_config(folder)
    given |= {"layer_types": ["full_attention"] * 2, "sliding_window": None, "mlp_bias": False}
    given |= {"use_sliding_window": False, "max_window_layers": 2}
    given["num_target_layers"] = model.config.num_hidden_layers
    given["dflash_config"] |= {"use_swa": False, "causal_head": False, "block_size": dflash.SIZE}
    return given


def dflash_speculators(folder):
    model = target("qwen3", vocab_size=dflash.V)
    dflash.store_speculators(folder, dflash.random_drafter(model), model)
    return read_config(folder)


def own(kind):
    """Return what writes a folder of our own."""

    def store(folder):
        if kind is Eagle3Drafter:
            drafter = eagle3_statement.random_drafter(target(), tokens=24, dtype=torch.float32)
        elif kind is DFlashDrafter:
            drafter = dflash.random_drafter(target("qwen3", vocab_size=dflash.V))
        elif kind is PosSDrafter:
            drafter = poss_statement.random_drafter(target(), layers=2, dtype=torch.float32)
        else:
            drafter = kind.for_target(target(), target="tiny").float()
        drafter.save_pretrained(folder)
        return read_config(folder)

    return store


FOLDERS = {
    "SafeAILab": (safeailab, Eagle3Drafter, Eagle3, layouts.EAGLE3),
    "SGLang": (sglang, Eagle3Drafter, Eagle3, layouts.EAGLE3),
    "NVIDIA": (nvidia, Eagle3Drafter, Eagle3, layouts.EAGLE3),
    "AngelSlim": (angelslim, Eagle3Drafter, Eagle3, layouts.EAGLE3),
    "speculators, EAGLE-3": (speculators, Eagle3Drafter, Eagle3, layouts.SPECULATORS_EAGLE3),
    "speculators, EAGLE": (eagle, PosSDrafter, PosS, layouts.SPECULATORS_EAGLE),
    "DFlash": (dflash_authors, DFlashDrafter, DFlash, layouts.DFLASH),
    "speculators, DFlash": (dflash_speculators, DFlashDrafter, DFlash, layouts.SPECULATORS_DFLASH),
    "our EAGLE-3": (own(Eagle3Drafter), Eagle3Drafter, Eagle3, {}),
    "our DFlash": (own(DFlashDrafter), DFlashDrafter, DFlash, {}),
    "our PosS": (own(PosSDrafter), PosSDrafter, PosS, {}),
    "our LongSpec": (own(LongSpecDrafter), LongSpecDrafter, LongSpec, {}),
    "our Medusa": (own(MedusaHeads), MedusaHeads, Medusa, {}),
    "our TokenSwift": (own(TokenSwiftHeads), TokenSwiftHeads, TokenSwift, {}),
    "our MTP": (own(MtpDrafter), MtpDrafter, Mtp, {}),
}
PUBLISHED = list(FOLDERS)[:8]
ABSENT = {"null": NULL, "missing": MISSING}


def every_path(name, config):
    """Return the way to every field of a folder, and to those that its table has beside them."""
    table = (tuple(field.split(".")) for field in FOLDERS[name][3])
    return dict.fromkeys([*paths(config), *table])


def of(name, folder):
    """Return a written folder's config, its target, and what loads it and checks that it fits."""
    store, kind, method, _ = FOLDERS[name]
    folder.mkdir(exist_ok=True)
    config = store(folder)
    write(folder, config)
    small = kind is DFlashDrafter
    model = target("qwen3", vocab_size=dflash.V) if small else target()
    load = load_speculators if name == "speculators, EAGLE" else kind.from_pretrained

    def fitting():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            drafter = load(folder)
        assert all(".x" in str(one.message) for one in told)  # of fields that nobody knows
        drafter.config.check_target(model.config)
        return drafter

    return config, model, fitting, method


@pytest.mark.parametrize("name", FOLDERS)
def test_null_is_as_absent(tmp_path, name):
    config, _, load, _ = of(name, tmp_path)
    load()
    wrong = []

    def read():
        return load().config.to_dict()

    for path in every_path(name, config):
        outcomes, field = [], ".".join(path)
        for how, value in ABSENT.items():
            write(tmp_path, edited(config, path, value))
            said = verdict(read, path, outcomes.append)
            wrong += [f"{field} {how}: {said}"] if said else []
        if outcomes[1:] != outcomes[:1]:
            wrong.append(f"{field}: null and a missing field are read differently")
    assert not wrong, "\n".join(wrong)


def check_all(tmp_path, name, values, decodes):
    config, model, load, method = of(name, tmp_path)
    default, wrong = load().config.to_dict(), []
    text = torch.arange(1, 5)
    if decodes:
        plain = generate(model, [text], "plain", max_new_tokens=NEW_TOKENS).new_tokens

    def heeded(drafter):
        if not decodes or drafter.config.to_dict() == default:
            return ""
        output = generate(model, [text], method(drafter), max_new_tokens=NEW_TOKENS)
        return "" if output.new_tokens == plain else f"another text: {output.new_tokens}"

    for path in every_path(name, config):
        for how, value in values.items():
            write(tmp_path, edited(config, path, value))
            if said := verdict(load, path, heeded):
                wrong.append(f"{'.'.join(path)} {how}: {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PUBLISHED)
def test_another_value_of_a_published_field_is_read_or_named(tmp_path, name):
    values = {how: value for how, value in WRONG.items() if how not in ABSENT}
    check_all(tmp_path, name, values, decodes=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_another_value_is_heeded_or_named(tmp_path, name):
    check_all(tmp_path, name, WRONG, decodes=True)
