"""MTP heads: as transformers computes them, from folders of every layout, and what comes out."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from specattn.decoding import Mtp, generate
from specattn.decoding.methods import mtp as method
from specattn.decoding.methods.mtp import MtpBlock
from specattn.decoding.model.mtp import LAYOUTS, find_head, read_head
from specattn.decoding.passes.mtp import prove_head
from tests.decoding.methods.test_poss import Listening, Under
from tests.decoding.models import BATCHES, greedy_by_transformers, known, prompts, tiny_model
from tests.decoding.mtp_folders import as_transformers, random_drafter, random_mtp, with_head

# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

V = 6  # of which a tree holds so much that even random heads are often right
QWEN, DEEPSEEK, MIMO = LAYOUTS
PUBLISHED = [
    ("qwen3_5", QWEN),
    ("qwen3_next", QWEN),
    ("qwen3_5_moe", QWEN),
    ("glm4_moe", DEEPSEEK),
    ("qwen2", MIMO),
]
SEEN = [("qwen3_next", QWEN), ("qwen3_5_moe", QWEN)]  # another family has their layout, too
SMALL = {"width": 4, "depth": 3, "total_tokens": 24}


class Witness(MtpBlock):
    """Checks every level of every round against transformers' model, which reads all text anew."""

    levels, theirs = 0, None

    def grow(self, root, width, depth):
        ops = Listening()
        self.growing = Under(ops)
        grown = super().grow(root, width, depth)
        type(self).levels += len(ops.levels)
        model, mtp = self.target.model, type(self).theirs
        for request, length in enumerate(self.target.cache.seqlens.tolist()):
            ids = self.sequences.text(self.sequences.active[request])[: length + 1]
            if length == 0:
                continue  # a root without a pair has no statement
            features = model.base_model(ids[None], use_cache=False).last_hidden_state[:, :-1]
            tokens, made = [None], [None]  # by number; the text has the root's
            for level in ops.levels:
                first = len(tokens)
                if level.tokens is not None:
                    tokens += level.tokens[request].tolist()
                for n, (bits, found) in enumerate(
                    zip(level.mask[request], level.features[request], strict=True)
                ):
                    own = first + n if level.tokens is not None else 0
                    path = [x for x in range(1, own + 1) if int(bits[0]) >> x & 1]
                    above = [made[x] for x in [0, *path][: len(path)]]
                    stated = _last(mtp, ids, features, [tokens[x] for x in path], above)
                    made[own:] = [found]
                    assert (found - stated).norm() <= 1e-5 * stated.norm()
        return grown


def _last(mtp, ids, features, path, above):
    """Return what transformers' layer makes of the last pair of a path behind a text's root."""
    tokens = torch.cat([ids[1:], torch.tensor(path, dtype=ids.dtype)])[None]
    known = torch.cat([features, *(x[None, None] for x in above)], 1)
    positions = torch.arange(1, tokens.shape[1] + 1)[None]
    return mtp.forward_layer(0, known, positions, None, input_ids=tokens)[0, -1]


def witnessed(monkeypatch, model, theirs, drafter=None):
    """Decode so that drafts are accepted and rejected, and requests end; all is compared."""
    monkeypatch.setattr(method, "MtpBlock", Witness)
    monkeypatch.setattr(Witness, "levels", 0)
    monkeypatch.setattr(Witness, "theirs", theirs)
    output = generate(
        model,
        prompts([1, 9, 14], vocabulary=V),
        Mtp(drafter, width=3, depth=4, total_tokens=12),
        max_new_tokens=9,
        temperature=1.0,
        top_k=0,
        seed=0,
        prefill_chunk_size=5,
    )
    assert Witness.levels > 2 * output.statistics.passes
    assert output.statistics.total.accepted > 3


@pytest.mark.parametrize(("family", "layout"), PUBLISHED)
def test_a_published_head_is_transformers(tmp_path, monkeypatch, family, layout):
    """In float64, of which transformers' own norms make float32."""
    model = tiny_model(family, vocab_size=V, peak=0.7).double()
    model, theirs = with_head(model, tmp_path, layout)
    witnessed(monkeypatch, model, theirs)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_head_of_ones_own_is_transformers(monkeypatch, family):
    model = tiny_model(family, vocab_size=V, peak=0.7).double()
    drafter = random_drafter(model, dtype=torch.float64)
    witnessed(monkeypatch, model, as_transformers(model, drafter), drafter)


@cache
def texts_of(family, layout, folder):
    """Return a model with a head in its folder, prompts, and transformers' texts."""
    model = with_head(tiny_model(family, vocab_size=V), folder, layout)[0]
    texts = prompts([2, 17, 33], vocabulary=V)
    return model, texts, [greedy_by_transformers(model, text, 30) for text in texts]


@pytest.mark.parametrize(
    ("family", "layout", "compile"),
    [
        *((*one, "on") for one in PUBLISHED),
        *((*one, "off") for one in PUBLISHED if one not in SEEN),
        *(pytest.param(*one, "off", marks=pytest.mark.slow) for one in SEEN),
    ],
)
def test_the_text_is_that_of_plain_decoding(tmp_path_factory, family, layout, compile):
    """By a tree and by a chain; and a seed decides the text."""
    folder = tmp_path_factory.getbasetemp() / f"mtp-{family}"
    model, texts, expected = texts_of(family, layout, folder)
    accepted = 0
    for options in (SMALL, {"width": 1, "depth": 2}):
        output = generate(model, texts, Mtp(**options), max_new_tokens=30, compile=compile)
        assert output.new_tokens == expected
        accepted += output.statistics.total.accepted
    assert accepted > 20
    sampled = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "compile": compile}
    plain = generate(model, texts, "plain", **sampled).new_tokens
    assert generate(model, texts, "mtp", **sampled).new_tokens == plain


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_every_family_with_a_head_of_its_own(family, lengths):
    model, texts, expected = known(family, lengths, 24)
    drafter = random_drafter(model)
    output = generate(model, texts, Mtp(drafter, **SMALL), max_new_tokens=24)
    assert output.new_tokens == expected


def test_where_a_head_is_looked_for(tmp_path):
    model = with_head(tiny_model("qwen3", vocab_size=V), tmp_path, QWEN)[0]
    found = find_head(tmp_path, 3)
    assert found.family == QWEN
    assert set(found.files.values()) == {tmp_path / "mtp.safetensors"}
    assert Mtp.offered(tmp_path, 3) == f"among its weights, as in {QWEN}"
    (tmp_path / "mtp.safetensors").unlink()
    text = prompts([5], vocabulary=V)
    model = type(model).from_pretrained(tmp_path)
    expected = r"MTP needs a head: .* have none \(mtp.fc.weight, model.layers.3.eh_proj.weight, "
    with pytest.raises(ValueError, match=expected + r".*mtp is not a folder"):
        generate(model, text, "mtp", max_new_tokens=4)
    random_drafter(model).save_pretrained(tmp_path / "mtp")
    assert Mtp.offered(tmp_path, 3) == "in mtp/"
    model = type(model).from_pretrained(tmp_path)
    expected = generate(model, text, "plain", max_new_tokens=8).new_tokens
    for spelled in ("mtp", f"mtp:drafter={tmp_path / 'mtp'},width=2"):
        assert generate(model, text, spelled, max_new_tokens=8).new_tokens == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp.norm.weight": None}, "lacks mtp.norm.weight"),
        ({"mtp.layers.0.mlp.up_proj.weight": None}, "missing mlp.up_proj.weight"),
        ({"mtp.layers.0.self_attn.kv_a_proj.weight": (4, 32)}, "unexpected self_attn.kv_a_proj"),
        ({"mtp.layers.0.self_attn.q_proj.weight": (8, 32)}, "misshapen self_attn.q_proj.weight"),
        ({"mtp.fc.weight": (64, 128)}, r"mtp.fc.weight is \[64, 128\], expected \[32, 64\]"),
    ],
    ids=["norm", "layer", "latents", "heads", "width"],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, change, message):
    model = with_head(tiny_model("qwen3", vocab_size=V), tmp_path, QWEN)[0]
    tensors = load_file(tmp_path / "mtp.safetensors")
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.randn(shape)
    save_file(tensors, tmp_path / "mtp.safetensors")
    with pytest.raises(ValueError, match=message):
        generate(model, [[1, 2, 3]], "mtp", max_new_tokens=4)


def test_a_layer_that_is_not_recognised_is_refused(tmp_path):
    model = with_head(tiny_model("glm4", vocab_size=V), tmp_path, DEEPSEEK)[0]
    with pytest.raises(ValueError, match="MTP head of DeepSeek.* is not supported: the MTP layer"):
        generate(model, [[1, 2, 3]], "mtp", max_new_tokens=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_computes_something_else_is_refused(tmp_path, dtype):
    """Here half of what the MLP adds: in 16 bits, too, that is more than rounding."""
    model = with_head(tiny_model("qwen3", vocab_size=V).to(dtype), tmp_path, QWEN)[0]
    head = read_head(model, find_head(tmp_path, 3))
    assert prove_head(head, model) is head
    half = head.layer.around_mlp._replace(factor=0.5)
    with pytest.raises(ValueError, match="MTP layer of models of type 'qwen3' is not supported"):
        prove_head(replace(head, layer=replace(head.layer, around_mlp=half)), model)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    model = with_head(tiny_model("qwen3", vocab_size=V), tmp_path, QWEN)[0]
    (tmp_path / "mtp.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"mtp.safetensors cannot be read"):
        generate(model, [[1, 2, 3]], "mtp", max_new_tokens=4)


def test_bfloat16_runs(tmp_path):
    model = with_head(tiny_model("qwen3_5").bfloat16(), tmp_path, QWEN)[0]
    output = generate(model, prompts([9, 30]), "mtp", max_new_tokens=6)
    assert [len(new) for new in output.new_tokens] == [6, 6]


def test_random_heads_differ():
    """Else the parity tests above would not tell one weight from another."""
    mtp = random_mtp(tiny_model("qwen3"))
    seen = [x.double().sum().item() for x in mtp.layers.state_dict().values()]
    assert len(set(seen)) == len(seen)
