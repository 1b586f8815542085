"""Reads a drafter's ``config.json`` by a table: every field is read, has one value, or is named.

A folder describes a computation, and another one is drafted with where a field is overlooked: texts
stay right, since the target decides, and acceptance is lost without a word. So of a field

- that its table has, the value is checked; null is as absent;
- whose table has `served` values, all others are refused;
- in `MEANINGLESS`, nothing is looked at: it says nothing of the computation;
- that nobody knows, a warning names it. It is no error, since makers add fields of training to
  their folders with every release, and the worst of a wrong draft is that it is rejected.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MOST_LAYERS = 1024


class Kind(NamedTuple):
    """What a value must be, in words and as a test."""

    said: str
    holds: Callable[[Any], bool]


def _integer(x: Any, least: int, most: int = 2**31 - 1) -> bool:
    return type(x) is int and least <= x <= most


def _number(x: Any, least: float) -> bool:
    return type(x) in (int, float) and abs(x) < 2**127 and x >= least  # as float32 has them


def _list_of(x: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(x, list) and all(map(holds, x))


COUNT = Kind("a positive integer", lambda x: _integer(x, 1))
DEPTH = Kind(f"an integer from 1 to {MOST_LAYERS}", lambda x: _integer(x, 1, MOST_LAYERS))
INDEX = Kind("an integer from 0 on", lambda x: _integer(x, 0))
NUMBER = Kind("a number from 0 on", lambda x: _number(x, 0.0))
POSITIVE = Kind("a positive number", lambda x: _number(x, 0.0) and x > 0)
FLAG = Kind("true or false", lambda x: isinstance(x, bool))
TEXT = Kind("a text", lambda x: isinstance(x, str))
TEXTS = Kind("a list of texts", lambda x: _list_of(x, lambda y: isinstance(y, str)))
LAYERS = Kind("a list of integers from 0 on", lambda x: _list_of(x, lambda y: _integer(y, 0)))
INPUTS = Kind("a list of integers from 1 on", lambda x: _list_of(x, lambda y: _integer(y, 1)))
OBJECT = Kind("an object", lambda x: isinstance(x, dict))
ROPE_OBJECT = Kind("an object of a rope", lambda x: isinstance(x, dict))
ANYTHING = Kind("anything", lambda x: True)


class Field(NamedTuple):
    """What is read of one field.

    Attributes
    ----------
    kind : Kind
    default : object
        What null, a missing field and, of layers, an empty list stand for.
    served : tuple
        The values that are computed; others are refused. Empty: all of the kind.
    needed : bool
        Whether null is refused.
    absent : str
        What null means, where `default` does not say it.
    """

    kind: Kind
    default: Any = None
    served: tuple[Any, ...] = ()
    needed: bool = False
    absent: str = ""


Fields = dict[str, Field]
"""Fields by their names as a folder spells them; a dot goes into an object."""

NEVER = Field(ANYTHING, served=(None,))
"""A field that must be absent."""

FROM_FAMILY = "transformers' default of the `model_type`"

ROPE: Fields = {
    "rope_type": Field(TEXT, served=("default", "linear", "llama3", "yarn", "mrope")),
    "type": Field(TEXT, served=("default", "linear", "llama3", "yarn", "mrope")),
    "rope_theta": Field(POSITIVE),
    "partial_rotary_factor": Field(NUMBER, 1.0, served=(1.0,)),
    "factor": Field(POSITIVE),
    "low_freq_factor": Field(POSITIVE),
    "high_freq_factor": Field(POSITIVE),
    "original_max_position_embeddings": Field(COUNT),
    "attention_factor": Field(POSITIVE),
    "beta_fast": Field(POSITIVE),
    "beta_slow": Field(POSITIVE),
    "mscale": Field(NUMBER),
    "mscale_all_dim": Field(NUMBER),
    "truncate": Field(FLAG),
}
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_MROPE = ("mrope_section", "mrope_interleaved")  # of text alone all sections turn alike

# fmt: off
MEANINGLESS = frozenset((
    # names and dtypes
    "_name_or_path", "architectures", "attn_implementation", "auto_map", "dtype", "model_type",
    "name_or_path", "speculators_version", "target_model_type", "tokenizer_class",
    "torch_dtype", "transformers_version",
    # what is tied is seen from which weights there are, the target's depth from its layers
    "has_lm_head", "has_no_defaults_at_init", "num_target_layers", "reuse_target_lm_head",
    "tie_encoder_decoder", "tie_word_embeddings",
    # training, and division over devices
    "attention_dropout", "base_model_ep_plan", "base_model_pp_plan", "base_model_tp_plan",
    "embed_requires_grad", "finetuning_task", "initializer_range", "pretraining_tp",
    "pruned_heads", "tf_legacy_loss", "torchscript", "use_bfloat16",
    # tokens and media
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "image_token_id", "modal_type", "pad_token_id", "prefix",
    "sep_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id",
    # of other tasks
    "add_cross_attention", "chunk_size_feed_forward", "cross_attention_hidden_size", "id2label",
    "is_decoder", "is_encoder_decoder", "label2id", "problem_type", "task_specific_params",
    # generation
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
    "use_cache",
))
# fmt: on
"""Fields that say nothing of what a drafter computes."""


_SIZES = (COUNT, DEPTH, LAYERS, INPUTS)
_NO_SHAPES = (
    "block_size", "max_position_embeddings", "num_target_layers", "sliding_window",
    "swa_window_size", "target_layers", "window",
)  # fmt: skip
_SHAPING = (
    "attention_bias", "fc_bias", "fc_norm", "fusion_bias", "norm_before_fc", "norm_output",
    "own_embedding", "qk_norm", "qkv_bias",
)  # fmt: skip


class Values(dict[str, Any]):
    """Values of a table's fields; absent ones have their default.

    Attributes
    ----------
    folder : Path
        For messages.
    given : set of str
        Fields that the folder has, and not null.
    """

    def __init__(self, folder: Path, values: dict[str, Any], given: set[str]):
        super().__init__(values)
        self.folder, self.given = folder, given

    def under(self, prefix: str) -> Values:
        """Return the values of an object's fields, by their names in it."""
        cut = len(prefix)
        own = {name[cut:]: value for name, value in self.items() if name.startswith(prefix)}
        return Values(self.folder, own, {n[cut:] for n in self.given if n.startswith(prefix)})

    def one_of(self, *names: str) -> Any:
        """Return the value of fields that mean the same; ValueError: two of them differ."""
        found = [name for name in names if name in self.given] or [names[0]]
        for name in found[1:]:
            if self[name] != self[found[0]]:
                raise ValueError(
                    f"{self.folder}: {found[0]} is {self[found[0]]!r} and {name} {self[name]!r}, "
                    "which must be the same"
                )
        return self[found[0]]

    def sizes(self, fields: Fields) -> str:
        """Return what shapes of weights follow from, for messages."""
        found = list[str]()
        for name, field in fields.items():
            last = name.rpartition(".")[2]
            if last in _SHAPING or (field.kind in _SIZES and last not in _NO_SHAPES):
                found.append(f"{name} {json.dumps(self[name])}")
        return ", ".join(found)


def read_fields(folder: Path, config: Mapping[str, Any], fields: Fields) -> Values:
    """Return the values of `fields` in a folder's `config`.

    Raises ValueError naming a field that is needed and absent, of another kind, or not served; of
    fields that are not known a warning says the names.
    """
    values, given, unknown = dict[str, Any](), set[str](), list[str]()

    def look(own: Mapping[str, Any], prefix: str) -> None:
        for key, value in own.items():
            name = prefix + key
            if (field := fields.get(name)) is None:
                if value is not None and key not in MEANINGLESS:
                    unknown.append(name)
            elif value is not None and not (field.kind in (LAYERS, INPUTS) and value == []):
                check(name, field, value)
                given.add(name)
                values[name] = float(value) if field.kind in (NUMBER, POSITIVE) else value
                if field.kind is OBJECT:
                    look(value, f"{name}.")

    def check(name: str, field: Field, value: Any) -> None:
        if not field.kind.holds(value):
            raise ValueError(f"{folder}: {name} must be {field.kind.said}, got {value!r}")
        if field.served == (None,):
            raise ValueError(f"{folder}: {name} {value!r} is not served")
        if field.served and value not in field.served:
            served = " or ".join(repr(one) for one in field.served)
            raise ValueError(f"{folder}: {name} must be {served}, got {value!r}")

    look(config, "")
    for name, field in fields.items():
        if name not in given:
            if field.needed:
                got = "null" if _has(config, name) else "nothing"
                raise ValueError(f"{folder}: {name} is needed, {field.kind.said}, got {got}")
            values[name] = field.default
    if unknown:
        warnings.warn(
            f"{folder}: config.json has fields that are not known here and not heeded: "
            f"{', '.join(sorted(unknown))}",
            stacklevel=2,
        )
    return Values(folder, values, given)


def _has(config: Any, name: str) -> bool:
    for key in name.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return False
        config = config[key]
    return True


def read_rope(values: Values, prefix: str = "") -> dict[str, Any] | None:
    """Return the ``rope_parameters`` of a layer's `values`; None where nothing is said of its rope.

    `prefix` goes before names in messages.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if name in values]
    spelled, theta = values.one_of(*names), values.get("rope_theta")
    name = prefix + next((one for one in names if one in values.given), names[0])
    own = _read_rope_object(values.folder, name, spelled) if spelled else {}
    if theta is not None and own.setdefault("rope_theta", theta) != theta:
        raise ValueError(
            f"{values.folder}: {prefix}rope_theta is {theta!r} and {name}.rope_theta "
            f"{own['rope_theta']!r}, which must be the same"
        )
    return own or None


def _read_rope_object(folder: Path, name: str, spelled: dict[str, Any]) -> dict[str, Any]:
    """Return what an object says of a rope, with its type."""
    table = {name: Field(OBJECT)} | {f"{name}.{key}": field for key, field in ROPE.items()}
    inner = {key: value for key, value in spelled.items() if key not in _MROPE}
    read = read_fields(folder, {name: inner}, table).under(f"{name}.")
    own = {key: read[key] for key in ROPE if key in read.given}
    kinds = [own.pop(key, None) for key in ("rope_type", "type")]
    own.pop("partial_rotary_factor", None)
    kind = kinds[0] or kinds[1]
    if kind is None and own.keys() - {"rope_theta"}:
        raise ValueError(f"{folder}: {name}.rope_type is needed, a text, got nothing")
    own["rope_type"] = kind = "default" if kind in (None, "mrope") else kind
    if missing := [key for key in _NEEDED.get(kind, ()) if key not in own]:
        raise ValueError(f"{folder}: {name}.{missing[0]} is needed by a rope of type {kind!r}")
    return own
