"""Models of which some layers keep a state decode as they do in transformers."""

from functools import cache, partial

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding import METHODS, Target, generate, prove
from specattn.decoding.model.weights import Reordered
from specattn.decoding.passes.attention import Selection
from specattn.tree import Tree
from tests.decoding import own_memory, settings
from tests.decoding.models import (
    HYBRIDS,
    greedy_by_transformers,
    is_recorded,
    known,
    prompts,
    tiny_model,
)
from tests.decoding.own_memory import LENGTHS, NEW_TOKENS

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ONE_OF_A_KIND = ("plain", "vegas", "streaming", "suffix", "token_recycling")
QUICK = {("plain", "off"), ("vegas", "on"), ("token_recycling", "on")}


def hybrid(family):
    """Return a model, prompts and their texts by transformers."""
    return known(family, LENGTHS, NEW_TOKENS)


@pytest.mark.parametrize("name", settings.NAMES)
def test_every_method_says_what_transformers_says(name):
    model, texts, expected = hybrid("qwen3_5")
    output = generate(model, texts, settings.settings_of(model)[name], max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == expected


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        pytest.param(name, compile, marks=() if (name, compile) in QUICK else pytest.mark.slow)
        for name in ONE_OF_A_KIND
        for compile in ("off", "on")
    ],
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_every_family_says_what_transformers_says(family, name, compile):
    model, texts, expected = hybrid(family)
    method = settings.settings_without_layers(model)[name]
    output = generate(model, texts, method, max_new_tokens=NEW_TOKENS, compile=compile)
    assert output.new_tokens == expected
    if name in ("vegas", "streaming"):
        assert output.statistics.total.acceptance_rate > 0.5, "a scratch state should be followed"


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_text_that_was_said_before_is_accepted_and_stays_the_same(compile):
    own_memory.check_repetition(tiny_model("qwen3_5"), compile)


def test_a_request_that_ends_early_leaves_the_others_alone():
    own_memory.check_early_end(*hybrid("qwen3_5"))


@pytest.mark.parametrize("chunk_size", [1, 7, 200])
def test_chunks_of_the_prefill_do_not_show(chunk_size):
    model, texts = _model(), prompts([1, 30, 9 if chunk_size < 200 else 300])
    expected = [greedy_by_transformers(model, text, 4) for text in texts]
    output = generate(model, texts, "plain", max_new_tokens=4, prefill_chunk_size=chunk_size)
    assert output.new_tokens == expected


def test_a_seed_decides_the_text():
    own_memory.check_seed(tiny_model("qwen3_next", peak=2.0))


def states_of(target):
    """Return what the layers with a state have kept."""
    states = target.cache.states
    return states.state.double(), states.conv_state.double()


def close(found, expected, bound):
    """Whether two such are equal to a bound, relative to the largest."""
    return all(
        (a - b).abs().max() <= bound * b.abs().max() for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("compile", ["off", "on"])
@hypothesis.settings(max_examples=12)
@given(data=st.data())
@torch.no_grad()
def test_a_commit_leaves_the_state_of_plain_decoding(compile, data):
    """Whatever tree was verified, and whatever path of it was accepted, round for round."""
    batch, capacity = 2, 40
    model = _model()
    targets = [Target(model, batch, capacity, compile=compile) for _ in range(2)]
    assert is_recorded(targets[0]) == (compile == "on")
    seed = data.draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=batch, max_size=batch))
    texts = [torch.randint(96, (n,), generator=generator) for n in lengths]
    for target in targets:
        target.prefill(texts, 4)
    ours, plain = targets
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(1, 7))
        parents = [-1, *(int(torch.randint(0, n, (), generator=generator)) for n in range(1, size))]
        tree = Tree(parents)
        tokens = torch.randint(96, (batch, size), generator=generator)
        before = [x.clone() for x in (ours.cache.states.state, ours.cache.states.conv_state)]
        features = ours.verify(tree, tokens).features
        now = ours.cache.states.state, ours.cache.states.conv_state
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)), "only read"
        paths = [_path(parents, data.draw(st.integers(0, size - 1))) for _ in range(batch)]
        depth = max(map(len, paths))
        padded = [path + [-1] * (depth - len(path)) for path in paths]
        nodes = torch.tensor(padded, dtype=torch.int64)
        counts = torch.tensor([len(path) for path in paths])
        ours.cache.commit(nodes.view(batch, depth), counts)
        for step in range(depth + 1):  # those that have less to say repeat it, and are put back
            kept = [x.clone() for x in (plain.cache.states.state, plain.cache.states.conv_state)]
            own = [([0, *path] + [0] * depth)[step] for path in paths]
            rows = torch.arange(batch)
            one = plain.verify(Tree([-1]), tokens[rows, own][:, None]).features[:, 0]
            lengths_before = plain.cache.seqlens
            none = torch.zeros(batch, 0, dtype=torch.int64)
            plain.cache.commit(none, torch.zeros(batch, dtype=torch.int64), in_place=True)
            over = torch.tensor([step > len(path) for path in paths])
            plain.cache.seqlens = torch.where(over, lengths_before, plain.cache.seqlens)
            now = plain.cache.states.state, plain.cache.states.conv_state
            for x, old in zip(now, kept, strict=True):
                x[:, over] = old[:, over]
            error = (one - features[rows, own]).norm(dim=-1) / one.norm(dim=-1)
            assert error[~over].max() < 1e-4
        assert torch.equal(ours.cache.seqlens, plain.cache.seqlens)
        assert close(states_of(ours), states_of(plain), 2e-5)


@cache
def _model():
    """Return one model for all examples."""
    model = tiny_model("qwen3_5")
    prove(model)
    return model


def _path(parents, node):
    """Return the nodes from below the root down to a node."""
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@torch.no_grad()
def test_drafts_change_no_committed_state():
    model, texts = _model(), prompts([9, 17])
    target = Target(model, 2, 40)
    target.prefill(texts, 64)
    states = target.cache.states
    before = states.copy()
    everything = torch.arange(40, dtype=torch.int32).expand(1, 2, 40)
    features = []
    for step in range(3):
        selected = Selection(everything, target.cache.seqlens + step)
        tokens = torch.full((2, 1), 7 + step)
        features.append(target.draft(tokens, step, selected).features)
    assert torch.equal(states.state, before[0])
    assert torch.equal(states.conv_state, before[1])
    chain = torch.tensor([[7, 8, 9]] * 2)
    expected = target.verify(Tree.chain(2), chain).features
    torch.testing.assert_close(torch.cat(features, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(20,), (20, 20)], ids=["one", "batch"])
def test_runs_from_a_snapshot_begin_with_the_prompts_state(lengths):
    own_memory.check_snapshot(_model(), lengths)


def test_a_model_decodes_by_itself_as_before():
    own_memory.check_model_by_itself(
        tiny_model("qwen3_next"), lambda layer: layer.linear_attn.out_proj
    )


def test_a_layer_that_something_else_has_taken_over_is_refused():
    model = tiny_model("qwen3_5")
    layer = model.model.layers[1].linear_attn
    layer.forward = lambda hidden_states, **options: hidden_states
    with pytest.raises(ValueError, match="layer 1 keeps a state, and its forward was replaced"):
        prove(model)


def test_weights_in_another_order_follow_the_model():
    model = tiny_model("qwen3_next")
    projections = [layer.linear_attn.in_proj_qkvz for layer in model.model.layers[:3]]
    own_memory.check_changed_weights(model, projections)
    linear, order = torch.nn.Linear(3, 8), Reordered()
    first = order.parts(linear, 2, (1, 3), "here")
    assert torch.equal(first[0].weight, linear.weight[[0, 4]])
    assert torch.equal(first[1].bias, linear.bias[[1, 2, 3, 5, 6, 7]])
    assert order.parts(linear, 2, (1, 3), "here")[0].weight is first[0].weight


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_of_the_attending_layers_may_have_eight_bits(rounding_ties, kv_dtype):
    model, texts, _ = hybrid("qwen3_5")
    options = {"max_new_tokens": 12, "kv_dtype": kv_dtype}
    plainly = partial(generate, model, texts, "plain", **options)
    method = settings.settings_without_layers(model)["token_recycling"]
    found = generate(model, texts, method, **options).new_tokens
    rounding_ties.check(found, plainly().new_tokens, plainly)


def test_a_small_model_whose_states_cannot_go_back_is_refused():
    model, small = tiny_model("qwen3"), _model()
    with pytest.raises(ValueError, match=r"triforce: draft is of type 'qwen3_5_text'; its layers"):
        generate(model, [1, 2, 3], METHODS["triforce"](draft=small), max_new_tokens=4)


def test_trees_that_no_state_verifies_are_refused():
    method = METHODS["suffix"](nodes=200)
    with pytest.raises(ValueError, match=r"suffix may draft trees of 20\d nodes; layers .* 128"):
        generate(_model(), [1, 2, 3], method, max_new_tokens=4)


def test_ranks_are_refused(monkeypatch):
    own_memory.check_ranks_refused(_model(), "states", monkeypatch)
