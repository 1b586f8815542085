"""Widened models compute what their source does, and are stored whole or not at all."""

import errno
import os
from concurrent.futures import _base
from dataclasses import replace
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding import METHODS, generate
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.embedded import EMBEDDED
from specattn.planning import MODELS, ModelShape
from specattn.widening import Multiples, Source, checks, widen, write
from specattn.widening.multiples import shares
from tests.decoding.models import letters, tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.drafters.dflash_statement import random_drafter as random_dflash
from tests.drafters.eagle3_statement import random_drafter as random_eagle3
from tests.drafters.poss_statement import random_drafter as random_poss
from tests.drafters.statement import random_drafter as random_longspec
from tests.drafters.test_heads import random_heads

TWICE = Multiples(hidden=2, intermediate=1, q_heads=2, kv_heads=2, layers=4)
UNEVEN = Multiples(hidden=3, intermediate=5, q_heads=6, kv_heads=4, layers=7)
SAME = Multiples(hidden=1, intermediate=1, q_heads=1, kv_heads=2, layers=4)  # head tied as before
BIASES = {"attention_bias": True, "mlp_bias": True}
SOURCES = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "llama": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "llama-biases": ("llama", {"tie_word_embeddings": False, **BIASES}),
}
STATE, ATTENDS = "linear_attention", "full_attention"
HYBRID = {"tie_word_embeddings": True, "layer_types": [STATE, ATTENDS, STATE, ATTENDS]}
DRAFTERS = ("dflash", "eagle3", "longspec", "medusa", "mtp", "poss", "tokenswift")


def store(folder, family="qwen3", **options):
    """Store a random model with its tokenizer and a random drafter of every kind; return it."""
    model = tiny_model(family, **options)
    model.save_pretrained(folder)
    letters().save_pretrained(folder)
    norms = {"fc_norm": family == "qwen3", "norm_output": family == "llama"}
    for drafter in (
        random_longspec(model, window=64),
        random_poss(model, layers=2, **norms),
        random_eagle3(model, layers=(1, model.config.num_hidden_layers), tokens=40, **norms),
        random_dflash(model, feature_layers=[1, model.config.num_hidden_layers], causal=True),
        random_mtp(model),
        *(random_heads(kind, model) for kind in ("medusa", "tokenswift")),
    ):
        drafter.float().save_pretrained(folder / drafter.config.model_type)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    store(folder)
    return Source.load(folder, letters())


@pytest.fixture(scope="module")
def headed(source):
    """Return the source with heads as its one drafter: comparing all seven takes seconds."""
    return replace(source, drafters={"medusa": source.drafters["medusa"]})


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def in_float64(model):
    """Return the model computing in float64 throughout; transformers' norms do so in float32."""
    for parent in list(model.double().modules()):
        for name, one in list(parent.named_children()):
            if type(one).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(len(one.weight), one.variance_epsilon)
                norm.weight = one.weight
                setattr(parent, name, norm)
    return model


@given(times=st.integers(1, 200))
def test_shares_are_powers_of_two_that_sum_to_one(times):
    found = [Fraction(share) for share in shares(times)]
    assert len(found) == times
    assert sum(found) == 1
    assert all(share.numerator == 1 and share.denominator.bit_count() == 1 for share in found)
    assert max(found) <= 2 * min(found)


@pytest.mark.parametrize(
    ("name", "expected", "millions"),
    [
        ("qwen3-0.6b", Multiples(4, 3, 4, 8, 28), 449),
        ("qwen3-1.7b", Multiples(8, 6, 4, 8, 28), 1426),
        ("qwen3-4b", Multiples(10, 10, 8, 8, 36), 3797),
        ("llama-3.2-1b", Multiples(8, 8, 4, 4, 16), 990),
    ],
)
def test_multiples_come_close_to_the_real_model(name, expected, millions):
    real, tiny = MODELS[name], MODELS["tiny"]
    times = Multiples.towards(real, tiny)
    assert times == expected
    assert tiny.hidden * times.hidden == real.hidden
    assert tiny.q_heads * times.q_heads * tiny.head_dim == real.q_heads * real.head_dim
    assert tiny.kv_heads * times.kv_heads * tiny.head_dim == real.kv_heads * real.head_dim


def test_a_hybrid_comes_close_to_a_real_one():
    real, small = MODELS["qwen3.5-0.8b"], ModelShape.from_config(EMBEDDED["tiny-hybrid"])
    assert small.state_layers == 4
    times = Multiples.towards(real, small)
    assert times == Multiples(4, 4, 4, 4, 24, 8, 8, 4)
    for side, each in (("k", times.state_k_heads), ("v", times.state_v_heads)):
        own, wanted = (
            getattr(x, f"state_{side}_heads") * getattr(x, f"state_{side}_dim")
            for x in (small, real)
        )
        assert own * each == wanted
    with pytest.raises(ValueError, match="4b has no layers with a state, the source has such"):
        Multiples.towards(MODELS["qwen3-4b"], small)
    with pytest.raises(ValueError, match="0.8b has layers with a state, the source has no such"):
        Multiples.towards(real, MODELS["tiny"])
    with pytest.raises(ValueError, match="a multiple of 4, as the last of so many attends"):
        Multiples.towards(replace(real, layers=23), small)
    with pytest.raises(ValueError, match="state's values: 2048 are fewer than the source's 2304"):
        Multiples.towards(real, replace(small, state_v_heads=36))


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(Multiples(3, 2, 2, 2, 8, 6, 3, 2), id="uneven"),
        pytest.param(Multiples(2, 1, 1, 1, 12, 2, 2, 4), id="three of four"),
        pytest.param(Multiples(2, 3, 2, 4, 4, 2, 4, 4), id="no further layers"),
    ],
)
def test_a_widened_hybrid_computes_the_same(times, tmp_path):
    small = tiny_model("qwen3_5", **HYBRID)
    small.save_pretrained(tmp_path / "small")
    source = Source.load(tmp_path / "small", letters())
    found = widen(source, tmp_path / "wide", times, torch.float32)
    wide = load_causal_model(tmp_path / "wide", torch.float32)
    ids = torch.arange(90)[None]
    expected = logits(small, ids)
    # Sums of more terms, in float32: the last bits of all weights move logits by 5e-6 of that.
    most = 5e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits(wide, ids), expected, rtol=0, atol=most)
    assert found.same_tokens == 1
    kinds = wide.config.layer_types
    assert len(kinds) == times.layers
    every = times.attends_every
    if times.layers > 4:
        assert kinds == ([STATE] * (every - 1) + [ATTENDS]) * (times.layers // every)
    else:
        assert kinds == HYBRID["layer_types"]
    own = 0
    for kind, layer in zip(kinds, wide.model.layers, strict=True):
        last = layer.linear_attn.out_proj if kind == STATE else layer.self_attn.o_proj
        if written := bool(last.weight.any()):  # in the order of the source
            assert kind == small.config.layer_types[own]
            own += 1
        assert bool(layer.mlp.down_proj.weight.any()) == written
    assert own == 4
    assert written  # the last: its cache is what LongSpec reads
    config = wide.config
    assert config.linear_num_key_heads == 2 * times.state_k_heads
    assert config.linear_num_value_heads == 4 * times.state_v_heads
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (8, 16)
    # As a user decodes: recorded passes of trees.
    prompt, run = list(range(40)) * 2, {"max_new_tokens": 24, "temperature": 0}
    text = generate(small, prompt, "plain", **run).new_tokens
    assert generate(wide, prompt, "suffix", **run).new_tokens == text


def test_a_hybrid_whose_layers_have_no_place_is_named(tmp_path):
    kinds = [STATE, ATTENDS, ATTENDS, ATTENDS]
    tiny_model("qwen3_5", layer_types=kinds).save_pretrained(tmp_path)
    source = Source.load(tmp_path, letters())
    with pytest.raises(ValueError, match="do not fit in order into 8, of each 4 of which the last"):
        source.empty(Multiples(1, 1, 1, 1, 8, 1, 1, 4))


def test_a_real_model_that_is_smaller_is_refused():
    real = MODELS["llama-3.2-1b"]
    deep, wide = replace(MODELS["tiny"], layers=17), replace(MODELS["tiny"], kv_heads=9)
    with pytest.raises(ValueError, match="layers: 16 are fewer than the source's 17"):
        Multiples.towards(real, deep)
    with pytest.raises(ValueError, match="KV heads: 512 are fewer than the source's 576"):
        Multiples.towards(real, wide)


def widenings():
    """Yield every source in every way; of each source one way is quick."""
    ways = {"twice": TWICE, "uneven": UNEVEN, "same width": SAME}
    for (place, name), way in product(enumerate(SOURCES), ways):
        quick = way == list(ways)[place % len(ways)]
        marks = () if quick else pytest.mark.slow
        yield pytest.param(name, ways[way], id=f"{name}-{way}", marks=marks)


@pytest.mark.parametrize(("name", "times"), list(widenings()))
def test_a_widened_model_computes_the_same(name, times, tmp_path):
    family, options = SOURCES[name]
    small = store(tmp_path / "small", family, **options)
    found = widen(
        Source.load(tmp_path / "small", letters()), tmp_path / "wide", times, torch.float32
    )
    wide = load_causal_model(tmp_path / "wide", torch.float32)
    ids = torch.arange(90)[None]
    # Shares are powers of two, so the stored weights are exact.
    expected = logits(in_float64(small), ids)
    torch.testing.assert_close(logits(in_float64(wide), ids), expected, rtol=0, atol=1e-10)
    assert found.difference < 1e-4 * found.largest
    assert found.same_tokens == 1
    assert set(found.trees) == set(DRAFTERS)
    assert min(found.trees.values()) >= 5
    config = wide.config
    assert (config.num_hidden_layers, config.head_dim) == (times.layers, 16)
    assert (config.hidden_size, config.intermediate_size) == (
        32 * times.hidden,
        48 * times.intermediate,
    )
    assert config.num_attention_heads == 4 * times.q_heads
    assert config.num_key_value_heads == 2 * times.kv_heads
    zeros = [
        not one.self_attn.o_proj.weight.any() and not one.mlp.down_proj.weight.any()
        for one in wide.model.layers
    ]
    assert sum(zeros) == times.layers - small.config.num_hidden_layers
    assert not zeros[-1]  # its cache is what LongSpec reads
    assert all(one.self_attn.q_proj.weight.any() for one in wide.model.layers)


@pytest.fixture(scope="module")
def wide(source, tmp_path_factory):
    """Return the source's twice as wide model, stored and loaded."""
    folder = tmp_path_factory.mktemp("out") / "wide"
    widen(source, folder, TWICE, torch.float32)
    return load_causal_model(folder, torch.float32)


@pytest.mark.parametrize("method", DRAFTERS)
def test_the_stored_drafters_are_found_and_draft(method, source, wide):
    """As a user decodes: recorded passes, drafts of any size, the text of plain decoding."""
    prompt = list(range(40)) * 2
    run = {"max_new_tokens": 24, "temperature": 0}
    expected = generate(source.model, prompt, "plain", **run).new_tokens
    found = generate(wide, prompt, METHODS[method](**checks._TREES[method]), **run)
    assert found.new_tokens == expected
    assert found.statistics.total.drafted > 0


def test_it_is_stored_in_the_dtype_layer_by_layer(headed, tmp_path):
    found = widen(headed, tmp_path / "wide", TWICE, torch.bfloat16)
    assert 0.9 < found.same_tokens <= 1
    assert {file.name for file in (tmp_path / "wide").glob("*.safetensors")} == {
        f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)
    }
    wide = load_causal_model(tmp_path / "wide", "auto")
    assert wide.dtype == torch.bfloat16
    assert (tmp_path / "wide" / "tokenizer.json").is_file()


def test_what_would_compute_something_else_is_not_stored(headed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("specattn.widening.weights.shares", lambda times: [0.9 / times] * times)
        with pytest.raises(ValueError, match="its logits would differ by"):
            widen(headed, tmp_path / "wide", TWICE, torch.float32)
    linear = headed.drafters["medusa"].linears[0]
    wide_drafter = Source.wide_drafter

    def bent(self, name, times, target):
        drafter = wide_drafter(self, name, times, target)
        if name == "medusa":
            drafter.linears[0].weight.data.mul_(-1)
        return drafter

    assert linear.weight.any()
    monkeypatch.setattr(Source, "wide_drafter", bent)
    with pytest.raises(ValueError, match="its medusa would draft otherwise"):
        widen(headed, tmp_path / "wide", TWICE, torch.float32)
    assert not os.listdir(tmp_path)


class Killed(BaseException):
    """As the command ends by a signal."""


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ValueError, "No space left on device"),
        (Killed("by a signal"), Killed, "by a signal"),
    ],
    ids=["full disk", "killed"],
)
def test_of_half_a_model_nothing_stays(error, expected, said, headed, tmp_path, monkeypatch):
    save, saved = write.save_file, []

    def fail_at_the_third(tensors, path, metadata):
        save(tensors, path, metadata)
        saved.append(path)
        if len(saved) == 3:
            raise error

    monkeypatch.setattr(write, "save_file", fail_at_the_third)
    with pytest.raises(expected, match=said):
        widen(headed, tmp_path / "wide", TWICE, torch.float32)
    assert len(saved) == 3
    assert not os.listdir(tmp_path)


def test_what_the_disk_has_no_room_for_is_not_begun(headed, tmp_path, monkeypatch):
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**5))
    with pytest.raises(ValueError, match="it needs 0.00059 GB, of which 0.0001 are free"):
        widen(headed, tmp_path / "wide", TWICE, torch.float32)
    assert not os.listdir(tmp_path)


def test_nothing_is_replaced(source, tmp_path):
    (tmp_path / "wide").mkdir()
    with pytest.raises(ValueError, match="wide exists, and is not replaced"):
        widen(source, tmp_path / "wide", TWICE, torch.float32)
    (tmp_path / ".other.partial").mkdir()
    with pytest.raises(ValueError, match="of a run that was killed, or goes on: remove it"):
        widen(source, tmp_path / "other", TWICE, torch.float32)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        widen(source, tmp_path / "nowhere" / "wide", TWICE, torch.float32)
    assert sorted(os.listdir(tmp_path)) == [".other.partial", "wide"]


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_moe", "of type 'qwen3_moe'; only llama, qwen2, qwen3, qwen3_5_text can be widened"),
        ("gemma2", "of type 'gemma2'"),
        ("qwen2-sliding", "sliding attention"),
    ],
)
def test_other_models_are_refused(family, said, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        Source.load(tmp_path, letters())


def test_a_drafter_whose_heads_cannot_be_divided_is_named(source, tmp_path):
    drafter = source.drafters["poss"]
    few = drafter.config.num_attention_heads
    assert few // drafter.config.num_key_value_heads == 2
    with pytest.raises(ValueError, match="4 query heads times 1 cannot share 2 KV heads times 4"):
        source.wide_drafter("poss", Multiples(1, 1, 1, 4, 4), "")


def test_the_text_is_real(source):
    text = source.tokenizer.decode(checks.text_of(source)[0])
    with open(_base.__file__, encoding="utf-8") as file:
        assert text == file.read().replace("\n", "")[: len(text)]
    assert len(text) == 512
