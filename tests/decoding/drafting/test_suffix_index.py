"""The index of suffix decoding in Python: draft for draft what C++ finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.decoding import Auto, Suffix, generate
from specattn.decoding.drafting import suffix_index
from specattn.decoding.text import sampling
from tests.decoding.drafting.machines import Machine
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

_cpu = pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")
BOTH = (suffix_index, _cpu)
KINDS = st.integers(1, 5)
TEXTS = KINDS.flatmap(lambda kinds: st.lists(st.integers(0, kinds), max_size=60))
VOCABULARY = 8


def corpora_of(module, texts):
    found = []
    for text in texts:
        tokens = torch.tensor([*text, -1], dtype=torch.int32)
        order = torch.empty_like(tokens)
        module.sort_suffixes(tokens, order)
        found.append(module.Corpus(tokens, order, VOCABULARY))
    return found


@given(text=TEXTS, context=TEXTS, most=st.integers(1, 20))
def test_corpora_find_the_same(text, context, most):
    tokens = torch.tensor([*text, -1, *text[::-1], -1], dtype=torch.int32)
    orders = [torch.empty_like(tokens) for _ in BOTH]
    for module, order in zip(BOTH, orders, strict=True):
        module.sort_suffixes(tokens, order)
    assert orders[0].equal(orders[1])
    ours, theirs = (module.Corpus(tokens, orders[0], VOCABULARY) for module in BOTH)
    assert len(ours) == len(theirs)
    assert ours.followers(context, most) == theirs.followers(context, most)


@pytest.mark.parametrize(
    ("tokens", "order"), [([1, 8, -1], [0, 1, 2]), ([1, 2, -1], [0, 3, 1]), ([-2], [0])], ids=str
)
def test_a_corpus_that_is_none_is_refused_alike(tokens, order):
    given = (torch.tensor(x, dtype=torch.int32) for x in (tokens, order))
    given, said = tuple(given), []
    for module in BOTH:
        with pytest.raises(ValueError, match="expected") as error:
            module.Corpus(*given, VOCABULARY)
        said.append(str(error.value))
    assert said[0] == said[1]


@settings(deadline=None)
@given(data=st.data(), corpora=st.lists(TEXTS, max_size=2), recycling=st.booleans())
def test_texts_that_grow_are_drafted_for_alike(data, corpora, recycling):
    """Two requests: prompts, then rounds of what was generated and ranked."""
    prompts = data.draw(st.lists(TEXTS.filter(bool), min_size=1, max_size=2), label="prompts")
    batch, room = len(prompts), 200
    drafters, tables, texts = [], [], torch.zeros(batch, room, dtype=torch.int64)
    ends = [len(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        texts[row, : len(prompt)] = torch.tensor(prompt)
    for module in BOTH:
        tables.append(torch.full((VOCABULARY, 3), -1, dtype=torch.int32) if recycling else None)
        held = corpora_of(module, corpora)
        drafters.append([module.SuffixDrafter(held) for _ in prompts])
        for drafter, prompt in zip(drafters[-1], prompts, strict=True):
            drafter.extend(prompt, tables[-1])
    for _ in range(3):
        sizes = data.draw(st.sets(st.integers(1, 12), min_size=1).map(sorted), label="rows")
        seconds = data.draw(
            st.lists(st.floats(0.5, 2.0, width=16), min_size=len(sizes), max_size=len(sizes))
        )
        depths = data.draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch))
        found = []
        for module, own, table in zip(BOTH, drafters, tables, strict=True):
            single = [one.draft(9, 5, 0.01, table) for one in own]
            drafted = torch.full((batch * sizes[-1],), -7)
            best = module.best_trees(own, depths, module.PassTimes(sizes, seconds), drafted, table)
            found.append((single, best, drafted[: batch * best[0]].tolist()))
        assert found[0] == found[1]
        assert [len(one) for one in drafters[0]] == [len(one) for one in drafters[1]]
        assert [one.match for one in drafters[0]] == [one.match for one in drafters[1]]
        for row in range(batch):
            new = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6), label="new")
            texts[row, ends[row] : ends[row] + len(new)] = torch.tensor(new)
            ends[row] += len(new)
        seed = data.draw(st.integers(0, 9), label="seed")
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(-3, 3, (batch, 4, VOCABULARY), generator=generator).float()
        logits[0, 0, 1], logits[0, 1, :6] = torch.nan, -torch.inf
        tokens = torch.randint(0, VOCABULARY, (batch, 4), generator=generator)
        nodes = torch.tensor([[1, 3], [2, -1]][:batch])
        ranked = (logits, tokens, nodes) if recycling else ()
        rows = list(range(batch))
        for module, own, table in zip(BOTH, drafters, tables, strict=True):
            module.learn(own, texts, rows, [0] * batch, ends, table, *ranked)
        if recycling:
            assert tables[0].equal(tables[1])


def test_long_texts_are_drafted_for_alike():
    """Edges of a state are kept in order, counts are cut off, shares are halved."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(0, 40, (900,), generator=generator).tolist()
    for text in (kinds, [1, 2] * 400, [1] * 300 + kinds, (kinds[:50] * 12)):
        own = [module.SuffixDrafter() for module in BOTH]
        for begin in range(0, len(text), 97):
            for one in own:
                one.extend(text[begin : begin + 97], None, begin > 200)
            assert own[0].draft(40, 9) == own[1].draft(40, 9, None, None)


@pytest.fixture
def unbuilt(monkeypatch):
    """Let there be no C++ module for what looks texts up."""
    monkeypatch.setattr("specattn.decoding.drafting.corpus.kernels", lambda: None)


@pytest.mark.parametrize(
    "method", [Suffix(nodes=6), Suffix(nodes=6, recycling=False), Suffix(), Auto()], ids=repr
)
def test_methods_look_texts_up_where_the_module_is_not_built(unbuilt, method):
    model = tiny_model("qwen3")
    texts = [torch.cat([x, x, x]) for x in prompts([9, 14])]
    with Machine("toy").at_work():
        output = generate(model, texts, method, max_new_tokens=60)
    assert output.new_tokens == [greedy_by_transformers(model, x, 60) for x in texts]
    assert sum(one.drafted for one in output.statistics.requests) > 0


def test_a_built_module_is_taken():
    from specattn.decoding.drafting.corpus import suffix_index as chosen

    assert chosen() is _cpu is sampling.kernels()
