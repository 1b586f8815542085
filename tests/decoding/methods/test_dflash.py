"""DFlash: blocks as a plain restatement computes them, the authors' folders, and what comes out."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from specattn.decoding import DFlash, generate
from specattn.decoding.methods import dflash as method
from specattn.decoding.methods.dflash import DFlashBlock
from specattn.drafters import DFlashConfig, DFlashDrafter
from tests.decoding.models import BATCHES, known, prompts, tiny_model
from tests.drafters.statement import attention, norm, rotated

# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

V, SIZE = 6, 5


def random_drafter(model, *, seed=0, dtype=torch.float32):
    """Return a drafter for `model` whose parts all matter."""
    own = {"layers": 2, "feature_layers": [1, 2], "block_size": SIZE, "mask_token_id": V - 1}
    drafter = DFlashDrafter(DFlashConfig.for_target(model, target="tiny", **own)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return drafter.eval()


def stated(drafter, rotary, features, embeds, window=None):
    """Return the normed rows [size, H] of a block behind features [n, layers * H], row by row.

    With a `window` they see so many positions up to the block's last one.
    """
    weights, config = {n: p.detach() for n, p in drafter.named_parameters()}, drafter.config
    eps, text = config.rms_norm_eps, len(features)
    seen = [norm(weights["fc.weight"] @ f, weights["hidden_norm.weight"], eps) for f in features]

    def heads(layer, part, x, position):
        y = weights[f"layers.{layer}.self_attn.{part}_proj.weight"] @ x
        if config.qkv_bias:
            y = y + weights[f"layers.{layer}.self_attn.{part}_proj.bias"]
        found = list(y.split(config.head_dim))
        if part == "v":
            return found
        if config.qk_norm:
            gain = weights[f"layers.{layer}.self_attn.{part}_norm.weight"]
            found = [norm(head, gain, eps) for head in found]
        return [rotated(head, position, rotary) for head in found]

    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        read = [norm(x, own["input_layernorm.weight"], eps) for x in embeds]
        keys, values = (
            torch.stack([torch.stack(heads(layer, part, x, n)) for n, x in enumerate(seen + read)])
            for part in "kv"
        )
        rows = []
        for at, (x, entered) in enumerate(zip(embeds, read, strict=True)):
            first = 0 if window is None else max(0, text + len(embeds) - window)
            q = heads(layer, "q", entered, text + at)
            out = attention(q, keys[first:], values[first:])
            x = x + own["self_attn.o_proj.weight"] @ out
            inner = norm(x, own["post_attention_layernorm.weight"], eps)
            gate, up = (own[f"mlp.{part}_proj.weight"] @ inner for part in ("gate", "up"))
            rows.append(x + own["mlp.down_proj.weight"] @ (F.silu(gate) * up))
        embeds = rows
    return torch.stack([norm(x, weights["norm.weight"], eps) for x in embeds])


class Witness(DFlashBlock):
    """Checks every candidate of every round against the restatement."""

    compared = 0
    stated_window = None

    def grow(self, root, width, depth):
        grown = super().grow(root, width, depth)
        model = self.target.model
        for request, length in enumerate(self.target.cache.seqlens.tolist()):
            ids = self.sequences.text(self.sequences.active[request])[: length + 1]
            out = model.base_model(ids[None], use_cache=False, output_hidden_states=True)
            features = torch.cat([out.hidden_states[n][0, :-1] for n in (1, 2)], -1)
            block = torch.tensor([int(ids[-1]), *[V - 1] * (SIZE - 1)])
            embeds = list(self.target.embed.weight[block])
            rotary, window = model.base_model.rotary_emb, self.stated_window
            rows = stated(self.drafter, rotary, features, embeds, window)
            chances = self.target.head(rows).log_softmax(-1)
            levels, parents = grown.places[0], grown.parents.expand(len(root), -1)[request]
            for n, (token, score) in enumerate(
                zip(grown.tokens[request].tolist(), grown.scores[request], strict=True)
            ):
                above = float(grown.scores[request][parents[n]]) if parents[n] >= 0 else 0.0
                expected = above + float(chances[levels[n], token])
                assert float(score) == pytest.approx(expected, abs=1e-5)
            best = chances[1].topk(min(width, V)).indices.tolist()
            assert grown.tokens[request][: len(best)].tolist() == best
            type(self).compared += grown.tokens.shape[1]
        return grown


@pytest.mark.parametrize(("width", "window"), [(1, None), (3, None), (1, 9), (3, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_block_is_the_restatement(monkeypatch, family, width, window):
    """In float64, over rounds that accept and reject, as requests end; from an empty cache on."""
    monkeypatch.setattr(method, "DFlashBlock", Witness)
    monkeypatch.setattr(Witness, "compared", 0)
    monkeypatch.setattr(Witness, "stated_window", window and max(window, SIZE))
    model = tiny_model(family, vocab_size=V, peak=0.7).double()
    output = generate(
        model,
        prompts([1, 9, 14], vocabulary=V),
        DFlash(
            random_drafter(model, dtype=torch.float64), width=width, total_tokens=12, window=window
        ),
        max_new_tokens=9,
        temperature=1.0,
        top_k=0,
        seed=0,
        prefill_chunk_size=5,
    )
    assert Witness.compared > 20 * width
    assert 1 < output.statistics.total.accepted < output.statistics.total.drafted


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize(
    "options", [{"width": 1}, {"width": 4, "total_tokens": 20}, {}, {"window": 6}]
)
def test_the_text_is_that_of_plain_decoding(options, compile):
    model, texts, expected = known("qwen3", (2, 17, 33), 40, vocabulary=V)
    drafter = random_drafter(model)
    output = generate(model, texts, DFlash(drafter, **options), max_new_tokens=40, compile=compile)
    assert output.new_tokens == expected
    if options.get("total_tokens"):
        assert output.statistics.total.accepted > 5
    sampled = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "compile": compile}
    plain = generate(model, texts, "plain", **sampled).new_tokens
    assert generate(model, texts, DFlash(drafter, **options), **sampled).new_tokens == plain


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_every_family(family, lengths):
    model, texts, expected = known(family, lengths, 24)
    method = DFlash(random_drafter(model), width=3, total_tokens=12)
    assert generate(model, texts, method, max_new_tokens=24).new_tokens == expected


def store(folder, drafter, **changes):
    """Store a drafter as its authors do."""
    config = drafter.config
    given = {
        name: getattr(config, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
                     "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")
    }  # fmt: skip
    given |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": SIZE}
    given |= {"num_hidden_layers": 2, "num_target_layers": 3, "attention_bias": False}
    given["dflash_config"] = {"mask_token_id": V - 1, "target_layer_ids": [0, 1]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given | changes))
    save_file(drafter.state_dict(), folder / "model.safetensors", {"format": "pt"})


def test_folders_of_the_authors_and_of_our_own(tmp_path):
    model, texts, expected = known("qwen3", (9,), 24, vocabulary=V)
    drafter = random_drafter(model)
    store(tmp_path / "theirs", drafter)
    drafter.save_pretrained(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        loaded = DFlashDrafter.from_pretrained(tmp_path / folder)
        assert loaded.config.feature_layers == [1, 2]
        assert (loaded.config.block_size, loaded.config.mask_token_id) == (SIZE, V - 1)
        for name, weight in drafter.state_dict().items():
            assert torch.equal(weight, loaded.state_dict()[name]), name
        output = generate(model, texts, f"dflash:{tmp_path / folder}", max_new_tokens=24)
        assert output.new_tokens == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "a model of 'LlamaForCausalLM', not a DFlash"),
        ({"dflash_config": {"conv_kernel_size": 4}}, "conv_kernel_size 4 is not served"),
        ({"layer_types": ["sliding_attention"] * 2}, "needs sliding_window, a positive integer"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            "layers of sliding_attention are not served",
        ),
        ({"block_size": 65}, "block_size must be from 2 to 64, got 65"),
        ({"dflash_config": {"mask_token_id": 1}}, r"config.target_layer_ids is needed, a list"),
        ({"num_hidden_layers": 1}, "unexpected keys layers.1"),
        ({"intermediate_size": 8}, r"down_proj.weight is \[32, 48\], expected \[32, 8\]"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 3]}},
            "deepest layer is 4, the target's is 3$",
        ),
        ({"vocab_size": 9}, "its vocab_size is 9, the target's is 6$"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, changes, message):
    model = tiny_model("qwen3", vocab_size=V)
    store(tmp_path / "dflash", random_drafter(model), **changes)
    with pytest.raises(ValueError, match=message):
        generate(model, [[1, 2, 3]], DFlash(tmp_path / "dflash"), max_new_tokens=4)
