"""DFlash's and JetFlow's blocks are what their equations say, restated plainly."""

from itertools import product

import pytest
import torch

from specattn.decoding import DFlash, generate
from specattn.decoding.methods import dflash as method
from specattn.decoding.methods.dflash import DFlashBlock
from specattn.drafters import DFlashDrafter
from tests.decoding.methods.test_dflash import OWN, store
from tests.decoding.models import prompts, tiny_model
from tests.drafters.dflash_statement import SIZE, random_drafter, stated

# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

V = 6


def stated_rows(block, request):
    """Return the restatement's rows [SIZE, H] of a request's next block, behind its text."""
    target, model = block.target, block.target.model
    length = int(target.cache.seqlens[request])
    ids = block.sequences.text(block.sequences.active[request])[: length + 1]
    out = model.base_model(ids[None], use_cache=False, output_hidden_states=True)
    features = torch.cat([out.hidden_states[n][0, :-1] for n in (1, 2)], -1)
    masked = torch.tensor([int(ids[-1]), *[V - 1] * (SIZE - 1)])
    embeds = list(target.embed.weight[masked])
    rotary = model.base_model.rotary_emb
    return stated(block.drafter, rotary, features, embeds, block.stated_window)


class Witness(DFlashBlock):
    """Checks every candidate of every round against the restatement."""

    compared = 0
    stated_window = None

    def grow(self, root, width, depth):
        grown = super().grow(root, width, depth)
        for request in range(len(root)):
            rows = stated_rows(self, request)
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


class EveryRow(DFlashBlock):
    """Compares the logits of all rows of a block, over the whole vocabulary."""

    compared = 0
    stated_window = None

    def logits(self, ops, x):
        self.found = super().logits(ops, x)
        return self.found

    def grow(self, root, width, depth):
        grown = super().grow(root, width, depth)
        for request in range(len(root)):
            expected = self.target.head(stated_rows(self, request))
            rows = len(self.found[request])  # of a causal head no more than are drafted from
            torch.testing.assert_close(self.found[request], expected[:rows], rtol=1e-12, atol=1e-12)
            type(self).compared += rows
        return grown


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_every_row_of_a_stored_folder_is_the_restatement(monkeypatch, tmp_path, causal, window):
    """In the authors' layout, with random weights, in float64."""
    monkeypatch.setattr(method, "DFlashBlock", EveryRow)
    monkeypatch.setattr(EveryRow, "compared", 0)
    monkeypatch.setattr(EveryRow, "stated_window", window and max(window, SIZE))
    model = tiny_model("qwen3", vocab_size=V, peak=0.7).double()
    drafter = random_drafter(model, dtype=torch.float64)
    store(tmp_path, drafter, dflash_config=OWN | {"causal_head": causal})
    read = DFlashDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    output = generate(
        model,
        prompts([1, 9], vocabulary=V),
        DFlash(read, width=3, total_tokens=12, window=window),
        max_new_tokens=12,
        temperature=1.0,
        top_k=0,
        seed=0,
        prefill_chunk_size=5,
        compile="off",
    )
    assert EveryRow.compared >= SIZE * output.statistics.total.rounds // 2
