"""vLLM with the plugin says what transformers says: for every mixture of requests and drafts.

The same engine serves all tests of a drafter, for starting one takes longer than they do.
"""

import pytest

pytest.importorskip("vllm", reason="run by `make test-vllm`")
import psutil
from vllm.exceptions import VLLMValidationError

from specattn.integrations.vllm.attention import SpecattnAttention
from tests.integrations.vllm.engine import BLOCK, BLOCKS, CAPACITY, Engine, Expected, prompt_of

DRAFTERS = {
    "plain": None,
    "prompt_lookup": "specattn.integrations.vllm.PromptLookup",
    "suffix": "specattn.integrations.vllm.Suffix",
    "auto": "specattn.integrations.vllm.Auto",
    "vegas": "tests.integrations.vllm.always.AlwaysVegas",
}


@pytest.fixture(scope="module")
def expected():
    """Return greedy texts by transformers."""
    return Expected()


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request):
    """Name what drafts."""
    return request.param


@pytest.fixture(scope="module")
def engine(drafter):
    """Return an engine that has our attention, with a drafter or without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECATTN_VLLM", "1")
        made = Engine(DRAFTERS[drafter])
        yield made
        made.close()


def test_every_layer_has_our_attention(engine):
    assert {type(layer.impl) for layer in engine.layers()} == {SpecattnAttention}


def test_mixed_batches(engine, expected):
    """Prompts that are read in parts beside requests that decode, around the size of a block."""
    prompts = [prompt_of(n, n) for n in (5, BLOCK - 1, BLOCK, BLOCK + 1, 300, 500, 64, 2)]
    assert engine.texts(prompts) == [expected(prompt) for prompt in prompts]


def test_a_request_that_comes_while_others_decode(engine, expected):
    first, second = prompt_of(200, 1), prompt_of(180, 2)
    texts = {engine.add(first, 40): [], engine.add(first[:90], 40): []}
    for _ in range(6):
        for name, tokens in engine.step().items():
            texts[name] += tokens
    texts[engine.add(second, 40)] = []
    while engine.engine.has_unfinished_requests():
        for name, tokens in engine.step().items():
            texts[name] += tokens
    wanted = [expected(prompt, 40) for prompt in (first, first[:90], second)]
    assert list(texts.values()) == wanted


def test_a_prompt_that_was_read_before(engine, expected):
    prompt = prompt_of(400, 3)
    hits = engine.count("prefix_cache_hits")
    assert engine.texts([prompt]) == [expected(prompt)]
    assert engine.texts([prompt, prompt]) == [expected(prompt)] * 2
    assert engine.count("prefix_cache_hits") > hits


def test_requests_that_are_preempted(engine, expected):
    """All grow over the end of their first block, which is more than the cache has."""
    prompts = [prompt_of(BLOCK - 8, 10 + i) for i in range(8)]
    assert 2 * len(prompts) > BLOCKS
    before = engine.count("num_preemptions")
    assert engine.texts(prompts, 32) == [expected(prompt, 32) for prompt in prompts]
    assert engine.count("num_preemptions") > before


def test_a_request_that_is_given_up(engine, expected):
    left, stays = prompt_of(250, 20), prompt_of(140, 21)
    gone, name = engine.add(left, 200), engine.add(stays)
    text = []
    for _ in range(5):
        text += engine.step().get(name, [])
    engine.engine.abort_request([gone])
    while engine.engine.has_unfinished_requests():
        text += engine.step().get(name, [])
    assert text == expected(stays)


def test_up_to_the_last_position(engine, expected):
    prompt = prompt_of(CAPACITY - 20, 30)
    assert engine.texts([prompt], 20) == [expected(prompt, 20)]


def test_a_prompt_that_is_too_long(engine, expected):
    with pytest.raises(VLLMValidationError, match=str(CAPACITY)):
        engine.add(prompt_of(CAPACITY + 1, 40))
    prompt = prompt_of(30, 41)
    assert engine.texts([prompt]) == [expected(prompt)]


def test_drafts_are_made_and_accepted(engine, drafter):
    """A text that repeats itself is drafted well; this also says that all of the above drafted."""
    engine.texts([prompt_of(600, 50)], 60)
    drafted, accepted = (engine.count(f"spec_decode_num_{x}_tokens") for x in ("draft", "accepted"))
    assert (drafted > 0) == (accepted > 0) == (drafter != "plain")


def test_what_drafts_were_worth_is_told_for_each_request(engine, drafter):
    if drafter == "plain":
        pytest.skip("vLLM tells it where something drafts")
    for seed in (51, 52, 53):  # by a clock: on a busy machine one text may draft nothing
        drafted = engine.count("spec_decode_num_draft_tokens")
        accepted = engine.count("spec_decode_num_accepted_tokens")
        told = engine.acceptance(prompt_of(600, seed), 60)
        assert told["num_draft_tokens"] == engine.count("spec_decode_num_draft_tokens") - drafted
        kept = engine.count("spec_decode_num_accepted_tokens") - accepted
        assert told["num_accepted_draft_tokens"] == kept
        if kept:
            return
    pytest.fail("no draft was accepted")


@pytest.mark.slow
def test_hundreds_of_requests_leave_nothing_behind(engine):
    """The first rounds fill what is filled once; the last one adds nothing."""
    process, held = psutil.Process(), []
    for _ in range(4):
        for begin in range(0, 200, 8):
            lengths = [50 + (begin + i) * 7 % 400 for i in range(8)]
            engine.texts([prompt_of(length, i) for i, length in enumerate(lengths)])
        held.append(process.memory_info().rss)
    assert held[-1] - held[-2] < 4 << 20
