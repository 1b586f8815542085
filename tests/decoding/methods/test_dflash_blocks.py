"""DFlash's and JetFlow's blocks are what their equations say, restated plainly."""

from itertools import product

import pytest
import torch

from specattn.decoding import DFlash, generate
from specattn.decoding.methods import dflash as method
from specattn.decoding.methods.dflash import DFlashBlock
from tests.decoding.models import prompts, tiny_model
from tests.drafters.dflash_statement import SIZE, random_drafter, stated

# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

V = 6


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
            levels, parents = grown.nodes().levels[request], grown.parents[request]
            for n, (token, score) in enumerate(
                zip(grown.tokens[request].tolist(), grown.scores[request], strict=True)
            ):
                above = float(grown.scores[request][parents[n]]) if parents[n] >= 0 else 0.0
                expected = above + float(chances[levels[n], token])
                assert float(score) == pytest.approx(expected, abs=1e-5)
            best = chances[1].topk(min(width, V)).indices.tolist()
            found = grown.tokens[request][levels == 1].tolist()
            assert found == best[: len(found)]
            type(self).compared += grown.tokens.shape[1]
        return grown


def blocks():
    """Yield families, widths and windows with either direction: both with every window are quick.

    Biases and norms by head are the families'; they, the tree and what rows see of one another
    know nothing of one another.
    """
    shapes = [("qwen3", 1, None), ("qwen3", 3, None), ("qwen3", 1, 9), ("qwen3", 3, 2)]
    shapes += [("llama", 3, None), ("qwen2", 3, 2)]
    slow = {(shapes[0], True), (shapes[1], False), (shapes[3], True), (shapes[4], False)}
    slow |= {(shapes[5], False)}
    for shape, causal in product(shapes, (False, True)):
        name = "-".join(map(str, (*shape, "causal" if causal else "bidirectional")))
        marks = pytest.mark.slow if (shape, causal) in slow else ()
        yield pytest.param(*shape, causal, marks=marks, id=name)


@pytest.mark.parametrize(("family", "width", "window", "causal"), list(blocks()))
def test_a_block_is_the_restatement(monkeypatch, family, width, window, causal):
    """In float64, over rounds that accept and reject, as requests end; from an empty cache on."""
    monkeypatch.setattr(method, "DFlashBlock", Witness)
    monkeypatch.setattr(Witness, "compared", 0)
    monkeypatch.setattr(Witness, "stated_window", window and max(window, SIZE))
    model = tiny_model(family, vocab_size=V, peak=0.7).double()
    output = generate(
        model,
        prompts([1, 9, 14], vocabulary=V),
        DFlash(
            random_drafter(model, dtype=torch.float64, causal=causal),
            width=width,
            total_tokens=12,
            window=window,
        ),
        max_new_tokens=12,
        temperature=1.0,
        top_k=0,
        seed=0,
        prefill_chunk_size=5,
    )
    assert Witness.compared > 20 * (1 if width == 1 else 3)
    assert 1 < output.statistics.total.accepted < output.statistics.total.drafted
