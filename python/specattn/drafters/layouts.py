"""What is read of each layout of folders, and what is refused: a table per maker.

``docs/drafter-folders.md`` shows these tables. Flat layouts have the layer's fields at the top,
those of `speculators` in ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from specattn.drafters.fields import (
    ANYTHING,
    COUNT,
    DEPTH,
    FLAG,
    FROM_FAMILY,
    INDEX,
    INPUTS,
    LAYERS,
    NEVER,
    NUMBER,
    OBJECT,
    POSITIVE,
    ROPE_OBJECT,
    TEXT,
    TEXTS,
    Field,
    Fields,
    Kind,
    Values,
    read_rope,
)

_FAMILIES: dict[str, Callable[..., Any]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}

ONLY_FALSE = Field(FLAG, False, served=(False,))
ONLY_TRUE = Field(FLAG, True, served=(True,))

LAYER: Fields = {
    "hidden_size": Field(COUNT, absent=FROM_FAMILY),
    "intermediate_size": Field(COUNT, absent=FROM_FAMILY),
    "num_attention_heads": Field(COUNT, absent=FROM_FAMILY),
    "num_key_value_heads": Field(COUNT, absent=FROM_FAMILY),
    "head_dim": Field(COUNT, absent=FROM_FAMILY),
    "vocab_size": Field(COUNT, absent=FROM_FAMILY),
    "rms_norm_eps": Field(NUMBER, absent=FROM_FAMILY),
    "max_position_embeddings": Field(COUNT, absent=FROM_FAMILY),
    "rope_theta": Field(POSITIVE, absent=FROM_FAMILY),
    "rope_scaling": Field(ROPE_OBJECT, absent="a rope of `rope_theta` alone"),
    "rope_parameters": Field(ROPE_OBJECT, absent="a rope of `rope_theta` alone"),
    "partial_rotary_factor": Field(NUMBER, 1.0, served=(1.0,)),
    "attention_bias": Field(FLAG, False),
    "mlp_bias": ONLY_FALSE,
    "hidden_act": Field(TEXT, "silu", served=("silu",)),
    "layer_types": Field(TEXTS, absent="full attention, but for Qwen 3's `max_window_layers`"),
    "sliding_window": Field(COUNT, absent="no window"),
    "use_sliding_window": Field(FLAG, absent="whether `layer_types` says it"),
    "max_window_layers": Field(INDEX, absent=FROM_FAMILY),
    "quantization_config": NEVER,
    "compression_config": NEVER,
}
"""Of a decoder layer as Llama's or Qwen 3's."""

_ONE_LAYER: Fields = LAYER | {
    "num_hidden_layers": Field(COUNT, 1, served=(1,)),
    "model_type": Field(TEXT, "llama", served=tuple(_FAMILIES)),
}
_EAGLE3: Fields = {
    "draft_vocab_size": Field(COUNT, absent="`vocab_size`"),
    "target_hidden_size": Field(COUNT, absent="`hidden_size`"),
    "norm_before_fc": Field(FLAG, False),
    "fc_norm": Field(FLAG, False),
    "norm_output": Field(FLAG, False),
    "parallel_drafting": ONLY_FALSE,
    "ptd_token_id": NEVER,
}
_USUAL = "2, half of all, all but 3"

EAGLE3: Fields = (
    _ONE_LAYER
    | _EAGLE3
    | {
        "norm_before_residual": Field(FLAG, False),
        "additional_fc": ONLY_FALSE,
        "eagle_aux_hidden_state_layer_ids": Field(LAYERS, absent=_USUAL),
        "aux_hidden_states_layer_ids": Field(LAYERS, absent=_USUAL),
        "num_aux_hidden_states": Field(COUNT, absent="as many as are named"),
        "eagle_config": Field(OBJECT, absent="an empty object"),
        "eagle_config.eagle_aux_hidden_state_layer_ids": Field(LAYERS, absent=_USUAL),
        "eagle_config.use_aux_hidden_state": ONLY_TRUE,
        "eagle_config.use_input_layernorm_in_first_layer": ONLY_TRUE,
        "eagle_config.use_last_layernorm": ONLY_TRUE,
        "eagle_config.use_mtp_layernorm": ONLY_FALSE,
        "eagle_config.next_layer_regular": Field(FLAG, True),
        "eagle_config.parallel_draft_step": Field(COUNT, 1, served=(1,)),
        "eagle_config.parallel_draft_heads_num_layers": Field(INDEX, 0),
    }
)
"""EAGLE-3 as SafeAILab, SGLang (SpecForge), AngelSlim and NVIDIA's ModelOpt publish it."""

SPECULATORS: Fields = {
    "speculators_model_type": Field(TEXT, needed=True),
    "speculators_config": Field(OBJECT, absent="an empty object"),
    "speculators_config.verifier": Field(OBJECT, absent="an empty object"),
    "speculators_config.verifier.name_or_path": Field(TEXT, ""),
    "speculators_config.algorithm": Field(TEXT, absent="`speculators_model_type`"),
    "speculators_config.proposal_methods": Field(ANYTHING, absent="nothing: methods have options"),
    "speculators_config.default_proposal_method": Field(TEXT, absent="nothing"),
    "quantization_config": NEVER,
    "transformer_layer_config": Field(OBJECT, needed=True),
}
"""Of every folder of `speculators`."""


def _nested(fields: Fields) -> Fields:
    return {f"transformer_layer_config.{name}": field for name, field in fields.items()}


SPECULATORS_EAGLE3: Fields = (
    SPECULATORS
    | {"speculators_config.algorithm": Field(TEXT, "eagle3", served=("eagle3",))}
    | _EAGLE3
    | {
        "norm_before_residual": Field(FLAG, True),
        "eagle_aux_hidden_state_layer_ids": Field(LAYERS, absent=_USUAL),
    }
    | _nested(_ONE_LAYER)
)
"""EAGLE-3 as speculators (vLLM) publishes it."""

SPECULATORS_EAGLE: Fields = (
    SPECULATORS
    | {
        "speculators_config.algorithm": Field(TEXT, "eagle", served=("eagle",)),
        "transformer_layer_architecture": Field(
            TEXT, "LlamaDecoderLayer", served=("LlamaDecoderLayer",)
        ),
        "layernorms": ONLY_FALSE,
        "fc_norm": ONLY_FALSE,
        "norm_output": ONLY_FALSE,
        "fusion_bias": Field(FLAG, False),
    }
    | _nested(
        _ONE_LAYER
        | {
            "attention_bias": ONLY_FALSE,
            "model_type": Field(TEXT, "llama", served=("llama",)),
            "sliding_window": NEVER,
            "layer_types": Field(TEXTS, served=(["full_attention"],), absent="full attention"),
        }
    )
)
"""EAGLE, EAGLE-2 and HASS as speculators publishes them."""

_CAUSAL = Field(FLAG, absent="false, unless the method says `causal`")

DFLASH_OWN: Fields = {
    "block_size": Field(COUNT, 16),
    "mask_token_id": Field(INDEX, needed=True),
    "target_layer_ids": Field(LAYERS, needed=True),
    "causal_head": _CAUSAL,
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    "target_hidden_size": Field(COUNT, absent="`hidden_size`"),
    "draft_shift": Field(INDEX, 0, served=(0,)),
    "use_aux_hidden_state": ONLY_TRUE,
    "swa_window_size": Field(COUNT, absent="no window; read of layers that slide alone"),
    "use_swa": ONLY_FALSE,
    "conv_kernel_size": NEVER,
    "conv_group_size": NEVER,
    "selector_rank": NEVER,
    "selector_top_k": NEVER,
    "output_multiplier": Field(NUMBER, 1.0, served=(1.0,)),
    "final_logit_softcapping": Field(NUMBER, 0.0, served=(0.0,)),
    "input_embedding_scale": Field(NUMBER, 1.0, served=(1.0,)),
}
"""Fields of ``dflash_config``, which may stand at the top as well."""

DFLASH: Fields = (
    LAYER
    | {
        "num_hidden_layers": Field(DEPTH, absent=FROM_FAMILY),
        "model_type": Field(TEXT, "qwen3", served=("qwen3",)),
        "draft_vocab_size": Field(COUNT, absent="`vocab_size`"),
        "num_target_layers": Field(COUNT, absent="any target as deep as the layers that are read"),
        "speculators_model_type": NEVER,
        "dflash_config": Field(OBJECT, absent="an empty object"),
    }
    | {name: field._replace(needed=False) for name, field in DFLASH_OWN.items()}
    | {f"dflash_config.{n}": field._replace(needed=False) for n, field in DFLASH_OWN.items()}
)
"""DFlash and JetFlow as their authors publish them."""

_OF_DOMINO = Field(ANYTHING, absent="nothing: of Domino's projector or of training")

SPECULATORS_DFLASH: Fields = (
    SPECULATORS
    | {
        "speculators_config.algorithm": Field(TEXT, "dflash", served=("dflash",)),
        "draft_vocab_size": Field(COUNT, 32000),
        "target_hidden_size": Field(COUNT, absent="`hidden_size`"),
        "block_size": Field(COUNT, 8),
        "mask_token_id": Field(INDEX, needed=True),
        "aux_hidden_state_layer_ids": Field(INPUTS, needed=True),
        "sample_from_anchor": ONLY_FALSE,
        "shift_label": ONLY_FALSE,
        "projector_type": Field(TEXT, "dflash", served=("dflash",)),
        "sliding_window_non_causal": Field(
            FLAG, False, absent="`false`; read of layers that slide alone"
        ),
        "pure_draft_prefix_len": _OF_DOMINO,
        "emb_dim": _OF_DOMINO,
        "gru_hidden_dim": _OF_DOMINO,
        "lambda_base_start": _OF_DOMINO,
        "lambda_base_decay_ratio": _OF_DOMINO,
        "auf": _OF_DOMINO,
    }
    | _nested(
        LAYER
        | {
            "num_hidden_layers": Field(DEPTH, absent=FROM_FAMILY),
            "model_type": Field(TEXT, "qwen3", served=("qwen3",)),
        }
    )
)
"""DFlash as speculators (vLLM) publishes it."""

_OF_TYPES: dict[str, Kind] = {
    "str": TEXT,
    "bool": FLAG,
    "bool | None": FLAG,
    "int": COUNT,
    "float": NUMBER,
    "int | None": COUNT,
    "dict | None": ROPE_OBJECT,
    "list[int] | None": LAYERS,
}
_OF_NAMES = {"layers": DEPTH, "num_heads": DEPTH, "mask_token_id": INDEX}


def own_fields(config: type, root: type) -> Fields:
    """Return the fields of a folder that this package writes: what `config` has, up to `root`."""
    own = dict[str, Field]()
    for kind in reversed(config.__mro__):
        if issubclass(kind, root):
            for name, hint in vars(kind).get("__annotations__", {}).items():
                said = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
                if "ClassVar" not in said:
                    found = _OF_NAMES.get(name) or _OF_TYPES.get(said, ANYTHING)
                    own[name] = Field(found, getattr(config, name))
    return own | {"quantization_config": NEVER}


def as_in_family(values: Values, model_type: str, prefix: str = "") -> Any:
    """Return transformers' configuration of a layer, which fills in what a folder leaves out.

    `prefix` goes before the names of `values` in messages.
    """
    names = {name for name in values.given if name in LAYER} - _READ_APART
    given = {name: values[name] for name in names}
    if (rope := read_rope(values, prefix)) is not None:
        given["rope_parameters"] = rope
    if "num_hidden_layers" in values.given:
        given["num_hidden_layers"] = values["num_hidden_layers"]
    return _FAMILIES[model_type](**given)


def filled_sizes(values: Values, fields: Fields, family: Any, prefix: str = "") -> str:
    """Return the sizes of a folder's weights as it says them, and as the `family` fills them in."""
    said = {f"{prefix}{n}": getattr(family, n) for n in LAYER if hasattr(family, n)}
    return Values(values.folder, {**values, **said}, set()).sizes(fields)


_READ_APART = {name for name in LAYER if "rope" in name or "window" in name or "config" in name}
_READ_APART |= {"layer_types", "partial_rotary_factor"}


def windows(values: Values, model_type: str, layers: int, prefix: str = "") -> list[int | None]:
    """Return how many positions each of `layers` layers sees; None: all.

    As transformers reads it: ``layer_types`` decides; without it Qwen 3's layers from
    ``max_window_layers`` on have the window if ``use_sliding_window``; of Llama's it is not said.
    """
    folder, window, uses = values.folder, values["sliding_window"], values["use_sliding_window"]
    if (types := values["layer_types"]) is None:
        if model_type == "qwen3":
            first = values["max_window_layers"]
            first = 28 if first is None else first
            types = ["sliding_attention" if uses and n >= first else "full_attention"
                     for n in range(layers)]  # fmt: skip
        elif uses or (uses is None and window is not None):
            raise ValueError(
                f"{folder}: {prefix}layer_types is needed where there is a window: sliding_window "
                f"is {window!r}, use_sliding_window {uses!r}"
            )
        else:
            types = ["full_attention"] * layers
    if len(types) != layers:
        raise ValueError(
            f"{folder}: {prefix}layer_types has {len(types)} layers, num_hidden_layers is {layers}"
        )
    if odd := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"{folder}: {prefix}layer_types: {odd[0]!r} is not served")
    if "sliding_attention" in types and (window is None or uses is False):
        raise ValueError(
            f"{folder}: {prefix}layer_types has sliding_attention, which needs sliding_window, a "
            f"positive integer, got {window!r}, use_sliding_window {uses!r}"
        )
    return [window if kind == "sliding_attention" else None for kind in types]
