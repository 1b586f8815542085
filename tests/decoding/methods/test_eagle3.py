"""EAGLE-3: what its layer drafts while decoding, in every way to run it, and what comes out."""

from functools import cache

import pytest
import torch

from specattn.blocks import Direct, captured, recorded
from specattn.decoding import Eagle3, Target, generate, parse_method
from specattn.decoding.drafting.timings import SIZES, PassCosts
from specattn.decoding.methods import eagle3
from specattn.decoding.methods.eagle3 import Eagle3Block
from tests.decoding.models import BATCHES, known, prompts, tiny_model
from tests.decoding.tape import TapeGraph
from tests.drafters.eagle3_statement import NORMS, Statement, random_drafter
from tests.drafters.test_eagle3 import publish

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NEW_TOKENS = 24
SMALL_VOCABULARY = 6
WAYS = {"eager": Direct, "recorded": recorded, "captured": lambda: captured(lambda: TapeGraph)}


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_the_text_is_that_of_plain_decoding(family, lengths):
    model, texts, expected = known(family, lengths, NEW_TOKENS)
    drafter = random_drafter(model, tokens=40, dtype=torch.float32)
    method = Eagle3(drafter, depth=4, total_tokens=60)
    output = generate(model, texts, method, max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == expected
    assert output.statistics.total.drafted > 0


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_the_text_stays_right_where_much_is_accepted(norms, window):
    model, texts, expected = known("qwen3", (2, 17, 33), 40, vocabulary=SMALL_VOCABULARY)
    drafter = random_drafter(model, dtype=torch.float32, **norms)
    method = Eagle3(drafter, width=4, depth=3, total_tokens=24, window=window)
    output = generate(model, texts, method, max_new_tokens=40)
    assert output.new_tokens == expected
    assert output.statistics.total.mean_acceptance_length > 1.2


@pytest.mark.parametrize("tokens", [None, 4], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seeded_text_is_plains(temperature, tokens, monkeypatch):
    """In a batch, by trees and by chains; drafts are free, however busy this machine is."""
    free = lambda self, sizes=SIZES: dict.fromkeys(sizes, 1.0)  # noqa: E731
    monkeypatch.setattr(PassCosts, "estimates", free)
    model = tiny_model("llama", vocab_size=SMALL_VOCABULARY, peak=1.0)
    drafter = random_drafter(model, tokens=tokens, dtype=torch.float32)
    texts, options = prompts([3, 1, 30], vocabulary=SMALL_VOCABULARY), {"max_new_tokens": 30}
    options |= {"temperature": temperature, "seed": 3 if temperature else None}
    expected = generate(model, texts, "plain", **options).new_tokens
    for method in (Eagle3(drafter, width=3, depth=4), Eagle3(drafter, width=1, total_tokens=4)):
        output = generate(model, texts, method, **options)
        assert output.new_tokens == expected
        assert output.statistics.total.accepted > 0


@torch.no_grad()
def stated(model, drafter, text, depth):
    """Return the scores of the first ranks behind a text, from the statement: a greedy chain."""
    statement = Statement(drafter, model.base_model.rotary_emb)
    hidden = model.base_model(text[None], use_cache=False, output_hidden_states=True).hidden_states
    features = torch.cat([hidden[n][0] for n in drafter.config.feature_layers], -1)
    table, chain, path = model.get_input_embeddings().weight, [], []
    embeddings = list(table[text])
    for _ in range(depth):
        x = statement.drafted(embeddings, list(features[:-1]), path)[-1]
        best = int(statement.logits(x).argmax())
        chain.append(best if drafter.tokens is None else int(drafter.tokens[best]))
        path.append(table[chain[-1]])
    return chain


OPTIONS = NORMS | {"window": {"window": 5}, "window within a tree": {"window": 2}}


def drafting(norms):
    """Return a model and a drafter of it, each time anew and the same."""
    model = tiny_model("qwen3", vocab_size=12)
    options = {"layers": (2, 1), "tokens": 9, "dtype": torch.float32}
    return model, random_drafter(model, **options, **OPTIONS[norms])


stated_of = cache(drafting)


@cache
def chain_of(norms, text, depth):
    """Return what is stated of a text, once for all ways that come to it."""
    return stated(*stated_of(norms), torch.tensor(text), depth)


@pytest.mark.parametrize(
    "norms", [name for name in OPTIONS if name not in ("fc_norm", "norm_output")]
)
@pytest.mark.parametrize("way", WAYS)
def test_it_drafts_what_is_stated_in_every_way(way, norms, monkeypatch):
    """Round by round, in a batch whose texts end one after the other."""
    model, drafter = drafting(norms)
    programs, rounds = WAYS[way](), []
    monkeypatch.setattr(Target, "programs", lambda self: programs)

    class Noting(Eagle3Block):
        def grow(self, root, width, depth):
            grown = super().grow(root, width, depth)
            draft = grown.best(1 + depth)
            for row, active in enumerate(self.sequences.active):
                rounds.append((self.sequences.text(active).clone(), draft.tokens[row, 1:].tolist()))
            return grown

    monkeypatch.setattr(eagle3, "Eagle3Block", Noting)
    texts = prompts([2, 14, 9], vocabulary=12)
    method = Eagle3(drafter, width=1, depth=3, total_tokens=4)
    generate(model, texts, method, max_new_tokens=12)
    assert len(rounds) > 12
    if way != "eager":
        assert programs._kept, "nothing was kept to be replayed"
    for text, chain in rounds:
        assert chain == chain_of(norms, tuple(text.tolist()), len(chain))


@pytest.mark.parametrize("layout", ["safeailab", "sglang", "speculators"])
def test_a_published_folder_drafts(tmp_path, layout):
    model = tiny_model("llama", num_hidden_layers=6)
    drafter = random_drafter(model, tokens=24, dtype=torch.float32)
    drafter.config.feature_layers = None
    publish(tmp_path, drafter, layout, model.get_input_embeddings().weight)
    name, options = parse_method(f"eagle3:{tmp_path},width=3,depth=2,total_tokens=6")
    assert (name, options["drafter"]) == ("eagle3", str(tmp_path))
    (text,) = prompts([20])
    outputs = [
        generate(model, text, method, max_new_tokens=12, seed=1, temperature=1.0)
        for method in (Eagle3(**options), Eagle3(drafter, 3, 2, 6))
    ]
    assert outputs[0].new_tokens == outputs[1].new_tokens
    accepted = [one.statistics.total.accepted for one in outputs]
    assert accepted[0] == accepted[1]


def test_a_folder_of_another_target_is_refused_before_a_token(tmp_path, monkeypatch):
    drafter = random_drafter(tiny_model("llama"), dtype=torch.float32)
    publish(tmp_path, drafter, "speculators")
    monkeypatch.setattr(Target, "prefill", None)
    for own, message in (
        ({"hidden_size": 64}, "hidden_size is 32, the target's is 64"),
        ({"vocab_size": 95}, "vocab_size is 96, the target's is 95"),
        ({"num_hidden_layers": 2}, "deepest layer is 3, the target's is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(tiny_model("llama", **own), [1, 2], Eagle3(tmp_path), max_new_tokens=4)
