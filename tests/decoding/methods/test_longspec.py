"""LongSpec: what its drafter computes while decoding, what it remembers, and what comes out."""

import pytest
import torch
from transformers import StoppingCriteriaList

from specattn import use_backend
from specattn.decoding import DraftContext, LongSpec, Sampler, Target, generate
from specattn.decoding.methods import longspec
from specattn.decoding.methods.longspec_block import DraftBlock
from specattn.decoding.text.sequences import Sequences
from specattn.drafters import LongSpecDrafter
from tests.decoding.engine.test_loop import StopAt
from tests.decoding.models import (
    CONFIGS,
    greedy_by_transformers,
    prompts,
    tiny_model,
)
from tests.drafters.statement import Statement, random_drafter

# What caches and rings hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

NEW_TOKENS = 24
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
SMALL_VOCABULARY = 6  # of which a tree holds so much that even random drafters are often right


@pytest.mark.parametrize("lengths", [[31], [5, 23, 1]], ids=["batch-1", "batch-3"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_text_is_that_of_plain_decoding(family, lengths):
    """The full tree of 69 nodes, whose masks need two words."""
    model, texts = tiny_model(family), prompts(lengths)
    widths = (4, 16, 16, 16, 16)
    method = LongSpec(random_drafter(model, window=9, dtype=torch.float32), widths=widths)
    assert method.max_nodes == 69
    output = generate(model, texts, method, max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == [greedy_by_transformers(model, p, NEW_TOKENS) for p in texts]
    total, cut = output.statistics.total, 5 * len(texts)  # the last rounds need fewer levels
    assert 68 * (total.rounds - cut) <= total.drafted < 68 * total.rounds


@pytest.mark.parametrize("options", [{"widths": (5, 16, 16)}, {"gamma": 3}], ids=["tree", "chain"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-sliding", "gpt_oss"])
def test_the_text_stays_right_where_much_is_accepted(family, options):
    model, texts = (
        tiny_model(family, vocab_size=SMALL_VOCABULARY),
        prompts([2, 17, 33], vocabulary=6),
    )
    method = LongSpec(random_drafter(model, window=9, seed=3, dtype=torch.float32), **options)
    output = generate(model, texts, method, max_new_tokens=40)
    assert output.new_tokens == [greedy_by_transformers(model, p, 40) for p in texts]
    rate = output.statistics.total.mean_acceptance_length
    assert rate > (1.8 if "widths" in options else 1.05)


class Witness(DraftBlock):
    """Checks every level of every round against the statement of the equations."""

    levels = 0
    deepest = 0

    def begin(self):
        super().begin()
        cache, sequences = self.target.cache, self.sequences
        self.paths = []  # per request and node: the (position, embedding) of its ancestors
        self.statement = Statement(self.drafter, self.target.model.base_model.rotary_emb)
        keys, values = cache.layer(-1)
        self.seen = [(k[:n], v[:n]) for k, v, n in zip(keys, values, cache.seqlens, strict=True)]
        self.texts = []
        for row, length in zip(sequences.active, cache.seqlens.tolist(), strict=True):
            text = sequences.text(row)[:length]
            self.texts.append(list(enumerate(self.embed(text))))
        type(self).deepest = max(type(self).deepest, *cache.seqlens.tolist())

    def logits(self, tokens, depth, mask):
        logits = super().logits(tokens, depth, mask)
        embeddings = self.embed(tokens)
        for request, (text, seen) in enumerate(zip(self.texts, self.seen, strict=True)):
            for node, embedding in enumerate(embeddings[request]):
                path = self.ancestors(request, node, depth, mask)
                hidden = self.statement.token(embedding, len(text) + depth, text + path, *seen)
                expected = self.head(hidden)
                torch.testing.assert_close(logits[request, node], expected, rtol=1e-8, atol=1e-8)
        self.paths.append(embeddings)
        type(self).levels += 1
        return logits

    def ancestors(self, request, node, depth, mask):
        """Return the (position, embedding) of a node's ancestors, one for each level above it."""
        above = torch.cat(self.paths, 1)[request] if self.paths else ()
        number = [n for n in range(len(above)) if mask is None or mask[request, node, 0] >> n & 1]
        start = len(self.texts[request])
        assert len(number) == depth
        return [(start + level, above[n]) for level, n in enumerate(number)]


@pytest.fixture
def witness(monkeypatch):
    """Let every drafter be watched."""
    monkeypatch.setattr(longspec, "DraftBlock", Witness)
    monkeypatch.setattr(Witness, "levels", 0)
    monkeypatch.setattr(Witness, "deepest", 0)
    return Witness


@pytest.mark.parametrize("options", [{"widths": (3, 5, 4)}, {"gamma": 3}], ids=["tree", "chain"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_decoding_mode_is_the_statement(witness, family, options):
    """In float64, over rounds that accept and reject, in a ring that is filled several times."""
    rope = {"rope_parameters": YARN} if family == "llama" else {}
    model = tiny_model(family, vocab_size=SMALL_VOCABULARY, peak=0.7, **rope).double()
    method = LongSpec(random_drafter(model, window=5), **options)
    output = generate(
        model,
        prompts([1, 9, 17], vocabulary=6),
        method,
        max_new_tokens=40,  # drafts know this end, and become shorter before it
        stopping_criteria=[StopAt(dict.fromkeys(range(6), 33))],
        temperature=1.0,
        top_k=0,
        seed=0,
    )
    assert witness.levels == 3 * output.statistics.passes
    assert witness.deepest > 3 * (5 + 3)
    assert 5 < output.statistics.total.accepted < output.statistics.total.drafted


class Recorder(DraftBlock):
    """Keeps what was said of the nodes that were accepted: (position, depth, logits)."""

    said: list

    def begin(self):
        super().begin()
        self.round = []

    def logits(self, tokens, depth, mask):
        self.round.append(super().logits(tokens, depth, mask)[0])
        return self.round[-1][None]

    def accept(self, prefix, nodes, kept=None):
        super().accept(prefix, nodes, kept)
        said = torch.cat(self.round) if self.round else []
        for depth, node in enumerate([0, *nodes[0].tolist()]):
            if 0 <= node < len(said):  # nobody asks what follows a leaf
                self.said.append((int(prefix[0]) + depth, depth, said[node]))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_training_mode_agrees_on_accepted_paths(monkeypatch, family):
    """What a round says at depth d is what training says of the same token with shift d + 1."""
    monkeypatch.setattr(Recorder, "said", [], raising=False)
    monkeypatch.setattr(longspec, "DraftBlock", Recorder)
    model = tiny_model(family, vocab_size=SMALL_VOCABULARY).double()
    drafter = random_drafter(model, window=6)
    (text,) = prompts([12], vocabulary=6)
    output = generate(model, text, LongSpec(drafter, widths=(4, 8, 8)), max_new_tokens=30)
    ids = output.sequences[0][None]
    with torch.no_grad():
        last = model(ids, use_cache=True).past_key_values.layers[-1]
        keys, values = last.keys.transpose(1, 2), last.values.transpose(1, 2)
        embeddings, positions = model.get_input_embeddings()(ids), torch.arange(ids.shape[1])[None]
        trained = [
            model.lm_head(drafter(embeddings, positions, keys, values, depth + 1))[0]
            for depth in range(3)
        ]
    deep = 0
    for position, depth, logits in Recorder.said:
        if position < ids.shape[1]:  # the last round may have gone beyond the end
            torch.testing.assert_close(logits, trained[depth][position], rtol=1e-8, atol=1e-8)
            deep += depth > 0
    assert deep > 5


class Unbounded(DraftBlock):
    """A drafter that forgets nothing: its ring is longer than the text."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        nodes = self.storage.shape[2] - self.ring
        self.ring = 1000
        self.storage = self.storage.new_empty(
            *self.storage.shape[:2], self.ring + nodes, *self.storage.shape[3:]
        )


def heard(block, said):
    """Return the class with what it says of every level appended to a list."""

    class Heard(block):
        def logits(self, *arguments):
            said.append(super().logits(*arguments))
            return said[-1]

    return Heard


@pytest.mark.parametrize("options", [{"widths": (3, 8, 8)}, {"gamma": 4}], ids=["tree", "chain"])
def test_the_ring_equals_an_unbounded_cache(monkeypatch, options):
    """The same drafts to the last bit, though the ring is written over many times."""
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY)
    method = LongSpec(random_drafter(model, window=6, dtype=torch.float32), **options)
    texts, runs = prompts([3, 40, 21], vocabulary=6), []
    for block in (DraftBlock, Unbounded):
        runs.append([])
        monkeypatch.setattr(longspec, "DraftBlock", heard(block, runs[-1]))
        generate(model, texts, method, max_new_tokens=60, compile="off")
    assert len(runs[0]) == len(runs[1]) > 30
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def resident_bytes(run):
    """Return the bytes of all tensors that a drafter holds, its module and the target's apart."""
    memories = [memory for memory, _ in run.static._trees.values()] if run.static else []
    values = [value for owner in (run.block, *memories) for value in vars(owner).values()]
    held = [value for value in values if isinstance(value, torch.Tensor)]
    held += [x for value in values if isinstance(value, (list, tuple)) for x in value]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values()
    )


@pytest.mark.parametrize("compile", ["on", "off"])
def test_memory_does_not_grow_with_the_context(compile):
    """A few rounds at 1k, 8k and 64k tokens of context; the target's cache is only pretended."""
    model, method, held = tiny_model("qwen3"), None, []
    drafter = random_drafter(model, window=512, dtype=torch.float32)
    method = LongSpec(drafter, widths=(4, 16, 16, 16, 16))
    for context in (1024, 8192, 65536):
        room = context + 200
        ids = torch.randint(0, 96, (1, context + 1))
        sequences = Sequences(ids, [0], room, StoppingCriteriaList(), model.device)
        target = Target(model, 1, room, compile)
        target.cache.storage.zero_()
        target.cache.seqlens = target.cache.seqlens + context
        sampler = Sampler([], do_sample=False, sequences=sequences)
        run = method.start(DraftContext(target, sampler, sequences))
        with torch.no_grad():
            for _ in range(2):
                draft = run.propose(ids[:, -1])
                prefix = target.cache.seqlens
                run.block.accept(prefix, draft.tree.paths[0, -1:, 1:])
                target.cache.seqlens = prefix + 6
        held.append(resident_bytes(run))
    assert held[0] == held[1] == held[2]
    row = 2 * 2 * 16 * 4  # keys and values, KV heads, head_dim, float32
    assert run.block.storage.nbytes == (512 + 5 + 69) * row
    if compile == "off":  # what kernels compute in is kept, of the largest level alone
        assert held[0] < 1.1 * run.block.storage.nbytes


def test_the_window_counts_depth_and_not_the_order_of_nodes():
    """Two orders of the same nodes see the same tokens: each level says the same of them."""
    model = tiny_model("llama").double()
    drafter = random_drafter(model, window=6)
    ids = prompts([30])[0][None]
    answers = []
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1])):
        sequences = Sequences(ids, [0], 60, StoppingCriteriaList(), model.device)
        target = Target(model, 1, 60)
        target.cache.storage.copy_(
            torch.randn(target.cache.storage.shape, generator=torch.Generator().manual_seed(0))
        )
        target.cache.seqlens = target.cache.seqlens + 29
        context = DraftContext(target, Sampler([], False, sequences), sequences)
        block = DraftBlock(drafter, context, 9, 2)
        children = torch.tensor([[5, 6, 7, 8]])[:, order]
        with torch.no_grad():
            block.begin()
            block.logits(ids[:, -1:], 0, torch.tensor([[[1]]]))
            said = block.logits(children, 1, torch.tensor([[[3], [5], [9], [17]]]))
        answers.append(said[:, order.argsort()])
    torch.testing.assert_close(*answers, rtol=1e-12, atol=1e-12)


def test_the_best_children_are_those_of_the_whole_table():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 40, generator=generator) * 3
    scores = torch.randn(3, 5, generator=generator)
    for width in (1, 7, 16, 200):
        tokens, best, parents = longspec.best_children(logits, scores, width)
        table = (logits.log_softmax(-1) + scores[..., None]).flatten(1)
        expected, where = table.topk(width)
        torch.testing.assert_close(best, expected)
        assert torch.equal(parents, where // 40)
        assert torch.equal(tokens, where % 40)


def test_the_folder_within_the_target_is_the_default(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    (text,) = prompts([9])
    with pytest.raises(ValueError, match="none was given, and .*longspec is not a folder"):
        generate(model, text, "longspec", max_new_tokens=4)
    drafter = random_drafter(model, window=9, dtype=torch.float32)
    drafter.save_pretrained(tmp_path / "longspec")
    given = [
        generate(model, text, method, max_new_tokens=8)
        for method in (
            "longspec:widths=[4,16]",
            LongSpec(drafter, widths=(4, 16)),
            LongSpec(tmp_path / "longspec", widths=(4, 16)),
        )
    ]
    assert all(output.new_tokens == given[0].new_tokens for output in given)
    assert all(
        output.statistics.total.accepted_at == given[0].statistics.total.accepted_at
        for output in given
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": ()}, "widths must be one or more positive numbers"),
        ({"widths": (4, 0)}, "widths must be one or more positive numbers"),
        ({"gamma": 0}, "gamma must be at least 1, got 0"),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"nodes": 4, "gamma": 2}, "nodes=4 are of a tree, gamma=2 is of a chain"),
    ],
)
def test_parameters_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        LongSpec(**options)


@pytest.mark.parametrize(
    ("family", "window", "options", "message"),
    [
        (
            "llama",
            5,
            {"widths": (2,) * 5},
            "window of 5 must be greater than the depth of the draft, 5",
        ),
        ("llama", 3, {"gamma": 3}, "window of 3 must be greater"),
        ("llama", 9, {"widths": (97,)}, "1 nodes have 96 children.*not the 97 of level 1"),
        ("gpt_oss", 9, {}, "does not fit the target: its rope_parameters"),
    ],
)
def test_drafters_that_do_not_fit(family, window, options, message):
    drafter = random_drafter(tiny_model(family), window=window, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        generate(tiny_model("llama"), [[1, 2]], LongSpec(drafter, **options), max_new_tokens=9)


def test_a_drafter_of_another_dtype_is_refused():
    drafter = LongSpecDrafter.for_target(tiny_model("llama"), target="x", window=9).bfloat16()
    with pytest.raises(ValueError, match="drafter is torch.bfloat16.*target torch.float32"):
        generate(tiny_model("llama"), [[1, 2]], LongSpec(drafter), max_new_tokens=4)


def test_bfloat16_runs():
    model = tiny_model("qwen3").bfloat16()
    method = LongSpec(random_drafter(model, window=9, dtype=torch.bfloat16))
    output = generate(model, prompts([9, 30]), method, max_new_tokens=6)
    assert [len(new) for new in output.new_tokens] == [6, 6]


def test_on_triton_kernels():
    model, texts = tiny_model("qwen3", num_hidden_layers=1), prompts([1, 8])
    method = LongSpec(random_drafter(model, window=6, dtype=torch.float32), widths=(2, 3))
    with use_backend("triton"):
        output = generate(model, texts, method, max_new_tokens=3)
    assert output.new_tokens == [greedy_by_transformers(model, p, 3) for p in texts]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", [{}, {"gamma": 4}], ids=["tree", "chain"])
@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gpt_oss"])
def test_on_a_gpu(family, options):
    model, texts = tiny_model(family).cuda(), prompts([9, 300, 170])
    drafter = random_drafter(model, window=64, dtype=torch.float32).cuda()
    output = generate(model, texts, LongSpec(drafter, **options), max_new_tokens=32)
    assert output.new_tokens == [greedy_by_transformers(model, p.cuda(), 32) for p in texts]
