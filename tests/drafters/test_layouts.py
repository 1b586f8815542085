"""What is read of each published layout, and what is refused: as its table says."""

import json
import warnings

import pytest
import torch

from specattn.drafters import (
    DrafterConfig,
    Eagle3Drafter,
    MedusaHeads,
    layouts,
)
from specattn.drafters.fields import MEANINGLESS, Field
from tests.decoding.models import tiny_model
from tests.drafters.eagle3_statement import random_drafter
from tests.drafters.test_eagle3 import publish

SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 8}
TABLES = (layouts.EAGLE3, layouts.SPECULATORS_EAGLE3, layouts.SPECULATORS_EAGLE, layouts.DFLASH)
TABLES += (layouts.SPECULATORS_DFLASH,)


def write(folder, layout="sglang", nested=None, *, layers=(2, 3, 4), **changes):
    """Write a drafter's folder with some fields changed."""
    model = tiny_model("llama", num_hidden_layers=6)
    drafter = random_drafter(model, tokens=24, layers=layers, dtype=torch.float32)
    config = {**publish(folder, drafter, layout), **changes}
    if nested:
        config["transformer_layer_config"] |= nested
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return drafter


@pytest.mark.parametrize("layout", ["safeailab", "sglang", "speculators"])
@pytest.mark.parametrize(
    ("said", "window"),
    [
        (SLIDING, 8),
        (SLIDING | {"use_sliding_window": True}, 8),
        ({"layer_types": ["full_attention"], "sliding_window": 8}, None),
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "model_type": "qwen3", "use_sliding_window": True}, None),
        ({**SLIDING, "layer_types": None, "model_type": "qwen3", "use_sliding_window": True,
          "max_window_layers": 0}, 8),
    ],
)  # fmt: skip
def test_a_window_is_read_as_transformers_reads_it(tmp_path, layout, said, window):
    if layout == "speculators":
        write(tmp_path, layout, nested=said)
    else:
        write(tmp_path, layout, **said)
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    assert loaded.config.window == window
    loaded.save_pretrained(tmp_path / "ours")
    assert Eagle3Drafter.from_pretrained(tmp_path / "ours").config.window == window


def test_texts_beyond_a_window_are_no_training_data(tmp_path):
    write(tmp_path, **SLIDING)
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="texts of 9 tokens are longer than the window 8"):
        loaded(torch.zeros(1, 9, 32), torch.zeros(1, 9, 96), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "layer_types is needed .* sliding_window is 8"),
        ({"layer_types": ["sliding_attention"]}, "needs sliding_window, .* got None"),
        (SLIDING | {"use_sliding_window": False}, "use_sliding_window False"),
        ({"layer_types": ["chunked_attention"]}, "layer_types: 'chunked_attention' is not served"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 layers, num_hidden_layers is"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "eagle_config.use_aux_hidden_state must be True, got False",
        ),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm must be False, got"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step must be 1, got 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not served"),
        ({"model_type": "gemma3"}, "model_type must be 'llama' or 'qwen3', got 'gemma3'"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor must be 1.0, got 0.25"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type is needed, a text, got noth"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is needed by a rope of type"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type must be 'default' or 'linear'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0 and rope_parameters.rope_theta 1000000.0, which must",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"is \[1, 2, 3\], and the layers whose"),
        ({"aux_hidden_states_layer_ids": [0, 1, 2]}, "layer_ids is .* and aux_hidden_states_layer"),
        ({"num_aux_hidden_states": 4}, r"num_aux_hidden_states is 4, the layers are \[2, 3, 4\]"),
        ({"transformer_layer_config": {}}, "holds a transformer_layer_config, not an EAGLE-3"),
        ({"hidden_size": 32.0}, "hidden_size must be a positive integer, got 32.0"),
        ({"fc_norm": "yes"}, "fc_norm must be true or false, got 'yes'"),
        ({"intermediate_size": 40}, r"expected \[32, 40\].*intermediate_size 40"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_its_name(tmp_path, changes, message):
    write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        Eagle3Drafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("layout", "changes", "layers"),
    [
        ("sglang", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ("sglang", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 3, 3)),
        ("sglang", {"eagle_config": None}, (2, 3, 3)),
        ("safeailab", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
        ("safeailab", {"aux_hidden_states_layer_ids": [0, 2, 3]}, (1, 3, 4)),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": None}, (2, 3, 3)),
    ],
)
def test_layers_are_counted_as_their_maker_counts_them(tmp_path, layout, changes, layers):
    write(tmp_path, layout, **changes)
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    assert loaded.config.layers_of(tiny_model("llama", num_hidden_layers=6).config) == layers


@pytest.mark.parametrize("absent", [{}, {"norm_before_residual": None}])
def test_speculators_norm_before_the_residual_unless_they_say_no(tmp_path, absent):
    """As vLLM reads the layout; in flat layouts it is off."""
    write(tmp_path, "speculators", **absent)
    config = json.loads((tmp_path / "config.json").read_text())
    if not absent:
        del config["norm_before_residual"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert Eagle3Drafter.from_pretrained(tmp_path).config.norm_before_residual
    write(tmp_path, "sglang", **absent)
    assert not Eagle3Drafter.from_pretrained(tmp_path).config.norm_before_residual


def test_a_field_that_nobody_knows_is_told_of_by_its_name(tmp_path):
    write(tmp_path, feature_shift=1, eagle_config={"wider": True}, not_said=None, use_cache=True)
    with pytest.warns(UserWarning, match="not heeded: eagle_config.wider, feature_shift$"):
        Eagle3Drafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["transformer_layer_config", "speculators_config", "feature_shift"]
)
def test_another_layouts_field_is_absent_where_it_is_null(tmp_path, name):
    write(tmp_path, **{name: None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Eagle3Drafter.from_pretrained(tmp_path)


def test_what_means_nothing_is_not_told_of(tmp_path):
    write(tmp_path, **dict.fromkeys(MEANINGLESS - {"architectures", "model_type"}, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Eagle3Drafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("rope", ["mrope", "default"])
def test_of_text_alone_the_sections_of_a_rope_turn_alike(tmp_path, rope):
    sections = {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_type": rope}
    write(tmp_path, rope_scaling=sections, rope_theta=5e6)
    loaded = Eagle3Drafter.from_pretrained(tmp_path).config
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 5e6}


@pytest.mark.parametrize("layout", ["sglang", "speculators", "ours"])
def test_angles_are_as_exact_in_16_bits(tmp_path, layout):
    """Rounded frequencies would turn far tokens by other angles."""
    drafter = write(tmp_path, "sglang" if layout == "ours" else layout)
    if layout == "ours":
        drafter.save_pretrained(tmp_path)
    loaded = Eagle3Drafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_stay_when_their_file_is_written_anew(tmp_path):
    drafter = MedusaHeads.for_target(tiny_model("llama"), target="tiny")
    drafter.save_pretrained(tmp_path)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"\x3f" * 64)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert not loaded.training


def test_a_dtype_is_one(tmp_path):
    MedusaHeads.for_target(tiny_model("llama"), target="tiny").save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="dtype must be a torch.dtype or None, got 'auto'"):
        MedusaHeads.from_pretrained(tmp_path, dtype="auto")


def test_a_field_of_any_type_is_read_of_ones_own_drafter():
    class OwnConfig(DrafterConfig):
        model_type = "own-of-a-test"
        shared = ("sizes",)
        sizes: tuple[int, ...] = (1, 2)
        count: int = 3

    fields = layouts.own_fields(OwnConfig, DrafterConfig)
    assert list(fields) == ["target", "sizes", "count", "quantization_config"]
    assert (fields["sizes"].kind.said, fields["count"].default) == ("anything", 3)


def test_every_field_has_a_kind():
    for table in TABLES:
        assert all(isinstance(field, Field) and field.kind.said for field in table.values())
