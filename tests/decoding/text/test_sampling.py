"""The sampler at every node against transformers' processors called on that node's text alone."""

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specattn.decoding import ContextualPenalty, Sampler
from specattn.decoding.text import processors as contextual
from specattn.decoding.text.node_processors import LENGTH_ONLY, knows_rows
from specattn.decoding.text.processors import CONTEXT_FREE, ContextualProcessors
from specattn.decoding.text.sequences import Sequences
from specattn.tree import Tree

V, PROMPT, ROWS = 9, 7, 4


class Triples(TemperatureLogitsWarper):
    """A subclass may look at the text, whatever its parent does."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores) + 3 * (input_ids[:, -1:] == 2)


def allowed(row, text):
    return [(int(text[-1]) + row + step) % V for step in range(4)]


LENGTHS = [  # lengths that some nodes have and others have not
    MinLengthLogitsProcessor(PROMPT + 3, 4),
    MinNewTokensLengthLogitsProcessor(PROMPT, 5, 4),
    ForcedEOSTokenLogitsProcessor(PROMPT + 5, 4),
    ExponentialDecayLengthPenalty((1, 1.5), 4, PROMPT),
    SuppressTokensAtBeginLogitsProcessor([1, 2], PROMPT + 4),
]
CONTEXTUAL = {
    "repetition": [RepetitionPenaltyLogitsProcessor(1.9)],
    "repetition-per-row": [
        RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=torch.tensor([0, 3, 6, 1]))
    ],
    "n-grams": [NoRepeatNGramLogitsProcessor(2)],
    **{f"length-{type(one).__name__}": [one] for one in LENGTHS},
    "prefix-constrained": [PrefixConstrainedLogitsProcessor(allowed, num_beams=1)],
    "subclass": [Triples(0.5)],
    "window": [ContextualPenalty(4, 1.9)],
    "window-beyond-the-text": [ContextualPenalty(50, 1.9)],
    "in-order": [
        TopKLogitsWarper(6),
        RepetitionPenaltyLogitsProcessor(1.9),
        TemperatureLogitsWarper(0.4),
        NoRepeatNGramLogitsProcessor(2),
        ContextualPenalty(3, 1.4),
        TopPLogitsWarper(0.8),
    ],
}
TREES = {
    "root": Tree.chain(0),
    "chain": Tree.chain(4),
    "branching": Tree([-1, 0, 0, 1, 1, 3, 2]),
    "one-each": Tree.stack([Tree([-1, 0, 0, 2]), Tree.chain(5), Tree([-1, 0, 1])]),
}


def started(active=(0, 2, 3), padding=(0,) * ROWS):
    """Return a run in which requests have said 3, 0, 1 and 3 tokens, and request 1 is finished."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, V, (ROWS, PROMPT), generator=generator)
    sequences = Sequences(ids, padding, 30, StoppingCriteriaList(), torch.device("cpu"))
    for row, count in enumerate([3, 0, 1, 3]):
        sequences.extend(row, torch.randint(0, V, (count,), generator=generator).tolist())
    sequences.active = list(active)
    return sequences


def node_by_node(processors, sequences, tree, tokens, logits):
    """Ask the processors about one node at a time, in a batch of copies of its text."""
    expected = torch.empty_like(logits)
    paths = tree.paths.expand(len(tokens), -1, -1)
    for request, row in enumerate(sequences.active):
        committed = sequences.padded_rows[row, : sequences.ends[row]]
        for node in range(tree.size):
            path = [step for step in paths[request, node].tolist() if step > 0]
            text = torch.cat([committed, tokens[request, path]])
            scores = logits[request, node].expand(ROWS, -1).clone()
            expected[request, node] = processors(text.expand(ROWS, -1), scores)[row]
    return expected


def can_occur(tree, tokens, scores):
    """Return which nodes follow allowed tokens alone, bool [B, T]."""
    parents = tree.parents.expand(len(tokens), -1).tolist()
    possible = torch.zeros(tokens.shape, dtype=torch.bool)
    possible[:, 0] = True
    for request, own in enumerate(parents):
        for node, parent in enumerate(own):
            if parent >= 0:
                allowed = scores[request, parent, tokens[request, node]] > -torch.inf
                possible[request, node] = possible[request, parent] & allowed
    return possible


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("processors", CONTEXTUAL.values(), ids=CONTEXTUAL)
def test_every_node_is_judged_by_its_own_text(processors, tree):
    sequences = started()
    tokens = torch.randint(0, V, (3, tree.size))
    logits = torch.randn(3, tree.size, V) * 2
    processors = LogitsProcessorList(processors)
    sampler = Sampler(processors, True, sequences)
    actual = sampler.scores(logits.clone(), tree, tokens)
    expected = node_by_node(processors, sequences, tree, tokens, logits)
    possible = can_occur(tree, tokens, expected)
    torch.testing.assert_close(actual, torch.where(possible[..., None], expected, logits))


@pytest.mark.parametrize("processors", CONTEXTUAL.values(), ids=CONTEXTUAL)
def test_the_last_nodes_of_a_growing_chain(processors):
    """What a drafter asks for, step by step, is what verification asks for at once."""
    sequences, whole = started(), Tree.chain(4)
    tokens, logits = torch.randint(0, V, (3, 5)), torch.randn(3, 5, V)
    sampler = Sampler(LogitsProcessorList(processors), True, sequences)
    steps = [
        sampler.scores(logits[:, [step]], Tree.chain(step), tokens[:, : step + 1], step)
        for step in range(5)
    ]
    expected = node_by_node(LogitsProcessorList(processors), sequences, whole, tokens, logits)
    possible = can_occur(whole, tokens, expected)
    torch.testing.assert_close(torch.cat(steps, 1)[possible], expected[possible])


@pytest.mark.parametrize("processors", CONTEXTUAL.values(), ids=CONTEXTUAL)
def test_chains_of_different_lengths_at_once(processors):
    """Each request is asked about nodes of its own; what is not on their paths is not read."""
    sequences, whole, firsts = started(), Tree.chain(5), torch.tensor([0, 3, 2])
    tokens, logits = torch.randint(0, V, (3, 6)), torch.randn(3, 6, V)
    asked = firsts[:, None] + torch.arange(2)
    rows = torch.arange(3)[:, None]
    expected = node_by_node(LogitsProcessorList(processors), sequences, whole, tokens, logits)
    before, tokens = tokens, tokens.masked_fill(torch.arange(6) > asked[:, -1:], V - 1)
    sampler = Sampler(LogitsProcessorList(processors), True, sequences)
    actual = sampler.scores(logits[rows, asked], whole, tokens, firsts)
    possible = can_occur(whole, before, expected)[rows, asked]
    torch.testing.assert_close(actual[possible], expected[rows, asked][possible])


@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (5, 0, 2, 6)], ids=["whole", "padded"])
@pytest.mark.parametrize("processors", CONTEXTUAL.values(), ids=CONTEXTUAL)
def test_one_node_at_a_time_on_the_host(processors, padding):
    """What `NodeProcessors` makes of a node is what `ContextualProcessors` makes of it."""
    sequences = started(padding=padding)
    processors = LogitsProcessorList(processors)
    if any(type(one) not in CONTEXT_FREE and knows_rows(one) for one in processors):
        assert not Sampler(processors, True, sequences).by_node
        return
    everywhere = ContextualProcessors(processors, sequences)
    assert everywhere.by_node is not None
    for _ in range(2):  # again, with longer texts
        tokens, logits = torch.randint(0, V, (3, 5)), torch.randn(3, 5, V)
        for step in range(5):
            drafted = tokens[:, : step + 1]
            expected = everywhere(logits[:, [step]].clone(), Tree.chain(step), drafted, step)
            for request, row in enumerate(sequences.active):
                path = drafted[request, 1:].tolist()
                actual = everywhere.by_node[row](path, logits[request, step].clone())
                assert actual.tolist() == expected[request, 0].tolist()
        for row in sequences.active:
            sequences.extend(row, [int(torch.randint(0, V, ()))])


@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_drawn_one_by_one_are_those_drawn_together(do_sample):
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)]
    )
    sequences, together = started(), Sampler(processors, do_sample, started(), seed=3)
    together.scores.by_node = None
    single = Sampler(processors, do_sample, sequences, seed=3)
    assert single.by_node
    assert not together.by_node
    logits = torch.randn(3, 4, V)
    logits[0, 3], logits[1, 3] = -torch.inf, torch.nan
    tokens = torch.randint(0, V, (3, 4))
    for step in range(4):
        asked = logits[:, [step]], Tree.chain(step), tokens[:, : step + 1], step
        assert single.draw(*asked).tolist() == together.draw(*asked).tolist()
    assert single.draw(*asked)[:2].tolist() == [[-1], [-1]]


FREE = [
    EpsilonLogitsWarper(0.1),
    EtaLogitsWarper(0.2),
    InfNanRemoveLogitsProcessor(),
    LogitNormalization(),
    MinPLogitsWarper(0.3),
    SuppressTokensLogitsProcessor([1, 2], device="cpu"),
    TemperatureLogitsWarper(0.6),
    TopHLogitsWarper(0.5),
    TopKLogitsWarper(3),
    TopPLogitsWarper(0.6),
    TypicalLogitsWarper(0.5),
]


@pytest.mark.parametrize("processor", FREE, ids=lambda processor: type(processor).__name__)
def test_processors_that_are_asked_about_all_nodes_at_once(processor):
    assert type(processor) in CONTEXT_FREE
    sequences, tree = started(), TREES["branching"]
    tokens, logits = torch.randint(0, V, (3, tree.size)), torch.randn(3, tree.size, V) * 2
    sampler = Sampler(LogitsProcessorList([processor]), True, sequences)
    expected = node_by_node(processor, sequences, tree, tokens, logits)
    torch.testing.assert_close(sampler.scores(logits.clone(), tree, tokens), expected)


def test_every_context_free_processor_is_tested():
    assert {type(processor) for processor in FREE} == set(CONTEXT_FREE)
    assert {type(processor) for processor in LENGTHS} == set(LENGTH_ONLY)


def test_a_processor_of_lengths_is_shown_no_copy_of_a_text(monkeypatch):
    shown = []

    class Length(LogitsProcessor):
        def __call__(self, input_ids, scores):
            shown.append(input_ids)
            return scores

    monkeypatch.setattr(contextual, "LENGTH_ONLY", (Length,))
    sequences, tree = started(), TREES["chain"]
    sampler = Sampler(LogitsProcessorList([Length()]), True, sequences)
    sampler.scores(torch.randn(3, tree.size, V), tree, torch.randint(0, V, (3, tree.size)))
    assert {len(one) for one in shown} == {ROWS}
    assert {one.shape[1] for one in shown} == {8 + n for n in range(5)} | {10 + n for n in range(5)}
    assert {one.data_ptr() for one in shown} == {sequences.padded_rows.data_ptr()}


def test_a_processor_with_a_memory_is_refused():
    processor = SynthIDTextWatermarkLogitsProcessor(5, [1, 2], 10, 10, 0, "cpu")
    with pytest.raises(ValueError, match="SynthID"):
        Sampler(LogitsProcessorList([processor]), True, started())


def test_an_unknown_processor_sees_its_own_context():
    class Unknown(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores - 5 * torch.nn.functional.one_hot(input_ids[:, -2], V)

    sequences, tree = started(), TREES["branching"]
    tokens, logits = torch.randint(0, V, (3, tree.size)), torch.randn(3, tree.size, V)
    processors = LogitsProcessorList([Unknown()])
    expected = node_by_node(processors, sequences, tree, tokens, logits)
    actual = Sampler(processors, False, sequences).scores(logits, tree, tokens)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("window", [1, 4, 50])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_window_shows_the_last_tokens_and_no_padding(tree, window):
    """A processor that declares how far it looks gets just that, whatever else the batch holds."""
    padding = (5, 0, 2, 6)
    sequences, tokens = started(padding=padding), torch.randint(0, V, (3, tree.size))
    logits, shown = torch.randn(3, tree.size, V), []

    class Recorder(LogitsProcessor):
        context_window = window

        def __call__(self, input_ids, scores):
            asked = scores.any(-1).nonzero().flatten().tolist()
            shown.extend((row, scores[row], input_ids[row]) for row in asked)
            return scores

    Sampler(LogitsProcessorList([Recorder()]), True, sequences).scores(logits, tree, tokens)
    paths = tree.paths.expand(3, -1, -1)
    for request, row in enumerate(sequences.active):
        committed = sequences.text(row)
        for node in tree.valid.expand(3, -1)[request].nonzero().flatten().tolist():
            path = [step for step in paths[request, node].tolist() if step > 0]
            text = torch.cat([committed, tokens[request, path]])[-window:]
            (seen,) = [t for r, s, t in shown if r == row and torch.equal(s, logits[request, node])]
            assert seen.tolist() == text.tolist()
