"""Methods inside ``model.generate``: what transformers prepares is obeyed, or refused aloud."""

import threading
from inspect import signature

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from specattn.decoding import Plain, Vegas
from specattn.decoding.engine.obeyed import refuse_unsupported
from tests.decoding.models import (
    VOCABULARY,
    greedy_by_transformers,
    letters,
    prompts,
    tiny_model,
)

METHODS = [Plain(), Vegas(gamma=3, ratio=0.5, min_tokens=4, switch=False)]
PAD, EOS = VOCABULARY - 1, VOCABULARY - 2
both_methods = pytest.mark.parametrize("method", METHODS, ids=["plain", "vegas"])


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


def left_padded(texts):
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), PAD)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :] = text
    return ids, (ids != PAD).long()


def check(model, method, ids, mask=None, **options):
    """Compare a method with transformers' own greedy decoding and return what both say."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": mask, **options}
    expected = model.generate(ids, **options)
    actual = model.generate(ids, custom_generate=method, **options)
    assert actual.tolist() == expected.tolist()
    return actual


@both_methods
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[n] for n in range(0, 60)]},
        {"suppress_tokens": list(range(20, 70))},
        {"min_new_tokens": 9, "eos_token_id": list(range(0, 50)), "pad_token_id": PAD},
        {"forced_eos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD},
        {"sequence_bias": [[[3], 40.0], [[3, 4], 60.0]]},
        {"exponential_decay_length_penalty": (4, 3.0), "eos_token_id": EOS, "pad_token_id": PAD},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_of_the_generation_config(model, method, options):
    plain = check(model, METHODS[0], prompts([12])[0][None])
    changed = check(model, method, prompts([12])[0][None], **options)
    assert changed.tolist() != plain.tolist(), "the option should matter here"


@both_methods
@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_left_padding(model, method, penalty):
    """With a mask, transformers' repetition penalty holds one number per row of the batch."""
    ids, mask = left_padded(prompts([5, 23, 14], vocabulary=VOCABULARY - 2))
    check(model, method, ids, mask, repetition_penalty=penalty, pad_token_id=PAD)


@both_methods
def test_rows_end_one_by_one_and_are_padded(model, method):
    texts = prompts([5, 23, 14], vocabulary=VOCABULARY - 2)
    ids, mask = left_padded(texts)
    ends = [greedy_by_transformers(model, p, 4 + 3 * row)[-1] for row, p in enumerate(texts)]
    options = {"eos_token_id": ends, "pad_token_id": PAD, "repetition_penalty": 1.3}
    output = check(model, method, ids, mask, max_new_tokens=24, **options)
    assert (output == PAD).any()


@both_methods
def test_without_a_padding_token_the_end_token_pads(model, method):
    texts = prompts([9, 9])
    end = greedy_by_transformers(model, texts[0], 4)[-1]
    output = check(model, method, torch.stack(texts), eos_token_id=end)
    assert output[0, -2:].tolist() == [end, end]


@both_methods
def test_max_length_counts_the_prompt(model, method):
    assert check(
        model, method, prompts([12])[0][None], max_new_tokens=None, max_length=19
    ).shape == (1, 19)


@both_methods
def test_a_single_new_token(model, method):
    assert check(model, method, prompts([1])[0][None], max_new_tokens=1).shape == (1, 2)


@both_methods
def test_stop_strings(model, method):
    """The string is spelled by two tokens, of which the first alone comes earlier, too."""
    (text,), tokenizer = prompts([12]), letters()
    plain = greedy_by_transformers(model, text, 16)
    string = tokenizer.decode(plain[6:8])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [string])])
    output = check(model, method, text[None], stopping_criteria=criteria)
    assert tokenizer.decode(output[0]).endswith(string)
    assert output.shape[1] <= 12 + 8


@both_methods
def test_several_sequences_per_prompt(model, method):
    ids, mask = left_padded(prompts([5, 9], vocabulary=VOCABULARY - 2))
    output = model.generate(
        ids,
        attention_mask=mask,
        custom_generate=method,
        max_new_tokens=5,
        do_sample=True,
        temperature=9.0,
        top_k=0,
        num_return_sequences=3,
        pad_token_id=PAD,
    )
    assert output[:, : ids.shape[1]].tolist() == ids.repeat_interleave(3, 0).tolist()
    assert len(set(map(tuple, output[:3].tolist()))) == 3, "copies should be independent"


class Recorder(BaseStreamer):
    def __init__(self):
        self.said, self.ended = [], False

    def put(self, value):
        self.said.append(value.flatten().tolist())

    def end(self):
        self.ended = True


@both_methods
@pytest.mark.parametrize("name", ["streamer", "token_streamer"])
def test_a_streamer_gets_the_prompt_and_then_every_round(model, method, name):
    streamer, ids = Recorder(), prompts([12])[0][None]
    given = {name: streamer}
    output = model.generate(ids, custom_generate=method, max_new_tokens=9, **given)
    assert streamer.said[0] == ids[0].tolist()
    assert sum(streamer.said, []) == output[0].tolist()
    assert streamer.ended


def test_a_streamer_is_that_of_the_call_that_decodes(model):
    """A processor that asks another model of ours, with a streamer of its own, disturbs nobody."""
    ids, outer, inner = prompts([12])[0][None], Recorder(), Recorder()

    class Asks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if not inner.ended:
                other = tiny_model("llama")
                other.generate(ids, custom_generate=METHODS[1], max_new_tokens=2, streamer=inner)
            return scores

    output = model.generate(
        ids, custom_generate=METHODS[0], max_new_tokens=5, streamer=outer, logits_processor=[Asks()]
    )
    assert sum(outer.said, []) == output[0].tolist()
    assert (len(sum(inner.said, [])), inner.ended, outer.ended) == (14, True, True)
    outer = Recorder()
    METHODS[0](
        model,
        ids,
        logits_processor=LogitsProcessorList(),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(15)]),
        generation_config=GenerationConfig(),
        token_streamer=outer,
    )
    assert len(sum(outer.said, [])) == 15


def test_an_iterator_over_the_text_ends(model):
    """Another thread waits for the end that the streamer is given."""
    streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=60)
    given = {"custom_generate": METHODS[1], "max_new_tokens": 9, "streamer": streamer}
    found = []
    thread = threading.Thread(
        target=lambda: found.append(model.generate(prompts([12])[0][None], **given))
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == letters().decode(found[0][0, 12:])


@both_methods
@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_stop_strings_with_their_tokenizer(model, method, where):
    (text,), tokenizer = prompts([12]), letters()
    plain = greedy_by_transformers(model, text, 16)
    string = tokenizer.decode(plain[6:8])
    given, own = {"tokenizer": tokenizer}, model.generation_config
    if where == "argument":
        given["stop_strings"] = string
    elif where == "config":
        given["generation_config"] = GenerationConfig(stop_strings=[string], max_new_tokens=16)
    else:
        model.generation_config = GenerationConfig(stop_strings=[string])
    try:
        output = check(model, method, text[None], **given)
    finally:
        model.generation_config = own
    assert tokenizer.decode(output[0]).endswith(string)
    assert output.shape[1] <= 12 + 8


def test_classes_keep_the_signature_of_what_makes_them():
    assert [*signature(Vegas).parameters] == [*signature(Vegas.__init__).parameters][1:]
    assert "token_streamer" in signature(Vegas()).parameters
    assert "self" not in signature(Vegas()).parameters


def test_text_streamer(model, capsys):
    streamer = TextStreamer(letters(), skip_prompt=True)
    output = model.generate(
        prompts([12])[0][None],
        custom_generate=METHODS[1],
        max_new_tokens=9,
        token_streamer=streamer,
    )
    assert capsys.readouterr().out.rstrip("\n") == letters().decode(output[0, 12:])


@both_methods
def test_a_dictionary_carries_the_statistics(model, method):
    output = model.generate(
        prompts([12])[0][None],
        custom_generate=method,
        max_new_tokens=9,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape == (1, 21)
    assert output.statistics.total.new_tokens == 9
    assert output["statistics"].requests[0].prompt_tokens == 12


@both_methods
def test_a_seed_reproduces(model, method):
    def run(**options):
        return model.generate(
            prompts([12])[0].expand(2, -1),
            attention_mask=torch.ones(2, 12),
            custom_generate=method,
            max_new_tokens=12,
            do_sample=True,
            temperature=8.0,
            top_k=0,
            **options,
        ).tolist()

    assert run(seed=3) == run(seed=3) != run(seed=4)
    one, other = (run(generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one == other
    torch.manual_seed(5)
    first = run()
    torch.manual_seed(5)
    assert run() == first


class Recording(LogitsProcessor):
    def __init__(self):
        self.contexts = []

    def __call__(self, input_ids, scores):
        self.contexts += [tuple(row) for row in input_ids.tolist()]
        return scores


def test_processors_see_the_text_and_the_path_of_a_draft_alone(model):
    """Whatever was rejected in an earlier round never appears in a context."""
    recording, ids = Recording(), prompts([12])[0][None]
    rounds = []
    output = model.generate(
        ids,
        custom_generate=METHODS[1],
        max_new_tokens=16,
        logits_processor=LogitsProcessorList([recording]),
        on_tokens=lambda request, tokens: rounds.append((len(recording.contexts), len(tokens))),
    )
    committed, begin, said = 12, 0, tuple(output[0].tolist())
    assert len(rounds) < 16, "some drafts should be accepted"
    for end, count in rounds:
        contexts = recording.contexts[begin:end]
        assert {context[:committed] for context in contexts} == {said[:committed]}
        assert set(map(len, contexts)) <= set(range(committed, committed + METHODS[1].gamma + 1))
        committed, begin = committed + count, end


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"output_scores": True}, "output_scores"),
        ({"output_logits": True}, "output_logits"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"inputs_embeds": torch.zeros(1, 12, 32)}, "inputs_embeds"),
        ({"position_ids": torch.arange(5, 17)[None]}, "position_ids"),
        ({"attention_mask": torch.tensor([[1] * 11 + [0]])}, "left"),
        ({"attention_mask": torch.zeros(1, 12)}, "empty"),
        ({"capacity": 20}, "capacity is 20"),
        ({"seed": 1, "generator": torch.Generator()}, "not both"),
        ({"assistant_model": tiny_model("llama")}, "assistant_model"),
        ({"streamer": Recorder(), "token_streamer": Recorder()}, "one of them"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_obeyed_is_refused(model, options, message):
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        model.generate(
            prompts([12])[0][None],
            custom_generate=METHODS[1],
            **{"max_new_tokens": 9, "return_dict_in_generate": True, **options},
        )
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("name", "expected"), [("generator", "a torch.Generator"), ("on_tokens", "a function")]
)
def test_options_of_a_wrong_type_are_named(model, name, expected):
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(TypeError, match=f"^{name}: expected {expected}, got 3"):
        model.generate(ids, custom_generate=Plain(), max_new_tokens=2, **{name: 3})


def test_a_cache_that_holds_something_is_refused(model):
    cache, ids = DynamicCache(), prompts([12])[0][None]
    model(ids[:, :5], past_key_values=cache)
    with pytest.raises(ValueError, match="must be empty"):
        model.generate(ids, custom_generate=METHODS[0], past_key_values=cache, max_new_tokens=3)
    for name in ("cache", "past_key_values"):  # as transformers calls it from 5.24 on, and before
        with pytest.raises(ValueError, match=f"{name} must be empty"):
            refuse_unsupported(model.generation_config, {name: cache})
        refuse_unsupported(model.generation_config, {name: DynamicCache()})


def test_a_streamer_follows_one_row(model):
    with pytest.raises(ValueError, match="one prompt"):
        model.generate(
            torch.ones(2, 3, dtype=torch.int64),
            custom_generate=METHODS[0],
            token_streamer=Recorder(),
            max_new_tokens=3,
        )


def test_the_models_own_config_is_obeyed(model):
    """What a checkpoint's generation_config.json says needs no argument."""
    ids = prompts([12])[0][None]
    own = model.generation_config
    model.generation_config = GenerationConfig(repetition_penalty=1.7, max_new_tokens=8)
    try:
        expected = model.generate(ids)
        assert model.generate(ids, custom_generate=METHODS[1]).tolist() == expected.tolist()
    finally:
        model.generation_config = own
