"""A drafter whose block is stated once trains, and drafts eagerly, recorded and captured."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from specattn.blocks import Direct, captured, recorded
from specattn.decoding import Target, generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model
from tests.decoding.tape import TapeGraph
from tests.decoding.toy_drafter import Toy, ToyConfig, ToyDrafter

pytest.importorskip("specattn._cpu")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

VOCABULARY = 12
TEXTS = prompts([5, 19, 1], vocabulary=VOCABULARY)
WAYS = {
    "eager": Direct,
    "recorded": recorded,
    "captured": lambda: captured(lambda: TapeGraph),
}


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def drafter(model):
    """A drafter trained on the target's own continuations, and its losses by step."""
    torch.manual_seed(0)
    config = ToyConfig(target="tiny", hidden_size=32, vocab_size=VOCABULARY)
    drafter = ToyDrafter(config)
    texts = generate(model, TEXTS * 4, "plain", max_new_tokens=60, seed=0, temperature=1.0)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=1e-2), []
    for _ in range(60):
        total = 0
        for ids in texts.sequences:
            with torch.no_grad():
                features = model.model(ids[None]).last_hidden_state[0]
                embeds, wanted = model.get_input_embeddings()(ids), model.lm_head(features)
            drafted = drafter(embeds[1:][None], features[:-1][None])[0]
            total = total + cross_entropy(model.lm_head(drafted), wanted[1:].softmax(-1))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / len(texts.sequences))
    return drafter.eval(), losses


def test_it_trains(model, drafter):
    """The loss falls, and what was trained is accepted more often than what was not."""
    trained, losses = drafter
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.requires_grad for p in trained.parameters())
    fresh = ToyDrafter(trained.config).eval()
    rates = [
        generate(model, TEXTS, Toy(d), max_new_tokens=60).statistics.total.mean_acceptance_length
        for d in (trained, fresh)
    ]
    assert rates[0] > 1.2 * rates[1]


@pytest.mark.parametrize("way", WAYS)
def test_it_drafts_the_same_in_every_way(model, drafter, way, monkeypatch):
    """Round by round, of texts that end one after the other; the text is that of plain decoding."""
    programs = WAYS[way]()
    monkeypatch.setattr(Target, "programs", lambda self: programs)
    drafts = noted(monkeypatch)
    output = generate(model, TEXTS, Toy(drafter[0], gamma=4), max_new_tokens=20, temperature=0)
    assert output.new_tokens == [greedy_by_transformers(model, p, 20) for p in TEXTS]
    assert output.statistics.total.accepted > 10
    if way != "eager":
        assert programs._kept, "nothing was kept to be replayed"
    text = output.sequences[0]
    assert drafts == [(place, stated(model, drafter[0], text[: place + 1], len(chain) - 1))
                      for place, chain in drafts]  # fmt: skip


def noted(monkeypatch):
    """Return a list that every drafted token of the first request is added to, round by round."""
    rounds, start = [], Toy.start

    def noting(self, context):
        drafting = start(self, context)
        propose = drafting.propose

        def propose_and_note(root):
            draft = propose(root)
            if len(draft.tokens) == len(TEXTS):
                place = context.target.cache.seqlens[0].item()
                rounds.append((place, draft.tokens[0].tolist()))
            return draft

        drafting.propose = propose_and_note
        return drafting

    monkeypatch.setattr(Toy, "start", noting)
    return rounds


@torch.no_grad()
def stated(model, drafter, text, depth):
    """Return the chain behind the last token of a text, from the drafter's equations."""
    chain = [text[-1].item()]
    feature = model.model(text[None, :-1]).last_hidden_state[0, -1]
    for _ in range(depth):
        embedding = model.get_input_embeddings().weight[chain[-1]]
        x = drafter.fc.weight @ torch.cat([embedding, feature])
        y = x / (x.square().mean() + 1e-6).sqrt() * drafter.norm.weight
        gate, up = (drafter.gate_up_proj.weight @ y).chunk(2)
        feature = x + drafter.down_proj.weight @ (gate * gate.sigmoid() * up)
        chain.append(model.lm_head(feature).argmax().item())
    return chain
