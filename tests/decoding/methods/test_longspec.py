"""LongSpec: what its drafter computes while decoding, what it remembers, and what comes out."""

from itertools import count
from typing import NamedTuple

import pytest
import torch
from specattn.reference.tree_mask import pack_tree_mask
from transformers import StoppingCriteriaList

from specattn import use_backend
from specattn.blocks import TORCH, Ops
from specattn.blocks.programs import Direct, Replayed
from specattn.blocks.recorder import Memory
from specattn.blocks.recorder import Recorder as Recording
from specattn.decoding import DraftContext, LongSpec, Sampler, Target, generate
from specattn.decoding.drafting.gains import NONE
from specattn.decoding.drafting.pace import FixedSize
from specattn.decoding.methods import longspec
from specattn.decoding.methods.longspec_block import DraftBlock
from specattn.decoding.text.sequences import Sequences
from specattn.drafters import LongSpecDrafter
from tests.decoding.engine.test_loop import StopAt
from tests.decoding.models import (
    BATCHES,
    greedy_by_transformers,
    known,
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


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_the_text_is_that_of_plain_decoding(family, lengths):
    """The full tree of 69 nodes, whose masks need two words."""
    model, texts, expected = known(family, lengths, NEW_TOKENS)
    widths = (4, 16, 16, 16, 16)
    method = LongSpec(random_drafter(model, window=9, dtype=torch.float32), widths=widths)
    assert method.max_nodes == 69
    output = generate(model, texts, method, max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == expected
    total, cut = output.statistics.total, 5 * len(texts)  # the last rounds need fewer levels
    assert 68 * (total.rounds - cut) <= total.drafted < 68 * total.rounds


@pytest.mark.parametrize("options", [{"widths": (5, 16, 16)}, {"gamma": 3}], ids=["tree", "chain"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-sliding", "gpt_oss"])
def test_the_text_stays_right_where_much_is_accepted(family, options):
    model, texts, expected = known(family, (2, 17, 33), 40, vocabulary=SMALL_VOCABULARY)
    method = LongSpec(random_drafter(model, window=9, seed=3, dtype=torch.float32), **options)
    output = generate(model, texts, method, max_new_tokens=40)
    assert output.new_tokens == expected
    rate = output.statistics.total.mean_acceptance_length
    assert rate > (1.8 if "widths" in options else 1.05)


class Level(NamedTuple):
    """One level of a tree: its nodes' tokens, what they see, and what the head said of them."""

    tokens: torch.Tensor
    mask: torch.Tensor
    logits: torch.Tensor


class Listening(Ops):
    """Torch's operators, which keep the levels of a round."""

    def __init__(self):
        self.levels = []

    def embed(self, tokens, module):
        self.tokens = tokens
        return super().embed(tokens, module)

    def sparse_gather_attention(self, q, *read, **options):
        self.mask = read[-1]
        return super().sparse_gather_attention(q, *read, **options)

    def head(self, x, module):
        logits = super().head(x, module)
        self.levels.append(Level(self.tokens, self.mask, logits))
        return logits


class Heard(DraftBlock):
    """A block of which `hear` is given the levels of every round."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.programs = self

    in_python, depth_for = True, Direct.depth_for

    def run(self, key, program, inputs, batch=None):
        ops = Listening()
        results = program(ops, **inputs)
        self.hear(ops.levels)
        return results


class Witness(Heard):
    """Checks every level of every round against the statement of the equations."""

    levels = 0
    deepest = 0

    def hear(self, levels):
        target, sequences = self.target, self.sequences
        statement = Statement(self.drafter, target.model.base_model.rotary_emb)
        cache = target.cache
        type(self).deepest = max(type(self).deepest, *cache.seqlens.tolist())
        type(self).levels += len(levels)
        keys, values = cache.layer(-1)
        for request, n in enumerate(cache.seqlens.tolist()):
            text = list(enumerate(target.embed(sequences.text(sequences.active[request])[:n])))
            seen, above = (keys[request, :n], values[request, :n]), []
            for depth, level in enumerate(levels):
                embeddings = target.embed(level.tokens[request])
                for embedding, bits, logits in zip(
                    embeddings, level.mask[request, :, 0], level.logits[request], strict=True
                ):
                    path = [x for node, x in enumerate(above) if bits >> node & 1]
                    assert len(path) == depth
                    path = [(n + step, x) for step, x in enumerate(path)]
                    hidden = statement.token(embedding, n + depth, text + path, *seen)
                    expected = target.head(hidden)
                    torch.testing.assert_close(logits, expected, rtol=1e-8, atol=1e-8)
                above += list(embeddings)


@pytest.fixture
def witness(monkeypatch):
    """Let every drafter be watched."""
    monkeypatch.setattr(longspec, "DraftBlock", Witness)
    monkeypatch.setattr(Witness, "levels", 0)
    monkeypatch.setattr(Witness, "deepest", 0)
    return Witness


def drafts():
    """Yield every family with a tree and with a chain; each once is quick."""
    tree, chain = {"widths": (3, 5, 4)}, {"gamma": 3}
    for family, quick, slow in (
        ("qwen2", chain, tree),
        ("qwen3", tree, chain),
        ("llama", chain, tree),
    ):
        yield family, quick
        yield pytest.param(family, slow, marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "options"), list(drafts()))
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


@pytest.mark.parametrize("options", [{"widths": (3, 5, 4)}, {"gamma": 3}], ids=["tree", "chain"])
def test_what_rounds_without_a_draft_wrote_is_read_before_the_next(witness, monkeypatch, options):
    """Such rounds run nothing: one to five in a row, as many as the window is long."""
    real, rounds = FixedSize.choose, count()
    drafts = {0, 2, 5, 9, 14, 20}  # and all behind these

    def choose(arm, root, depth):
        at = next(rounds)
        return real(arm, root, depth) if at in drafts or at > max(drafts) else NONE

    monkeypatch.setattr(FixedSize, "choose", choose)
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY, peak=0.7).double()
    method = LongSpec(random_drafter(model, window=5), **options)
    output = generate(model, prompts([1, 9, 17], vocabulary=6), method, max_new_tokens=40, seed=0)
    empty = max(drafts) + 1 - len(drafts)
    assert witness.levels <= 3 * (output.statistics.passes - empty)
    assert witness.levels > 3 * len(drafts)


class Recorder(Heard):
    """Keeps what was said of the nodes that were accepted: (position, depth, logits)."""

    said: list

    def hear(self, levels):
        self.round = [logits for level in levels for logits in level.logits[0]]

    def accept(self, prefix, nodes, kept=None):
        super().accept(prefix, nodes, kept)
        for depth, node in enumerate([0, *nodes[0].tolist()]):
            if 0 <= node < len(self.round):  # nobody asks what follows a leaf
                self.said.append((int(prefix[0]) + depth, depth, self.round[node]))


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


class Kept(Heard):
    """Keeps all that it says."""

    said: list

    def hear(self, levels):
        self.said += [level.logits for level in levels]


class Unbounded(Kept):
    """A drafter that forgets nothing: its ring is longer than the text."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        nodes = self.storage.shape[2] - self.ring
        self.ring = 1000
        self.storage = self.storage.new_empty(
            *self.storage.shape[:2], self.ring + nodes, *self.storage.shape[3:]
        )


@pytest.mark.parametrize("options", [{"widths": (3, 8, 8)}, {"gamma": 4}], ids=["tree", "chain"])
def test_the_ring_equals_an_unbounded_cache(monkeypatch, options):
    """The same drafts to the last bit, though the ring is written over many times."""
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY)
    method = LongSpec(random_drafter(model, window=6, dtype=torch.float32), **options)
    texts, runs = prompts([3, 40, 21], vocabulary=6), []
    for block in (Kept, Unbounded):
        runs.append([])
        monkeypatch.setattr(Kept, "said", runs[-1], raising=False)
        monkeypatch.setattr(longspec, "DraftBlock", block)
        generate(model, texts, method, max_new_tokens=60, compile="off")
    assert len(runs[0]) == len(runs[1]) > 30
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def held_bytes(block):
    """Return the bytes that a block holds beside its weights, the target and the tables of angles.

    Recordings and what they compute in are among them.
    """
    others = [*block.drafter.parameters(), *block.target.model.parameters(), *block.angles]
    others += [block.target.cache.storage, block.target.cache.seqlens]
    found, seen = {}, {x.untyped_storage().data_ptr() for x in others}
    todo = [value for name, value in vars(block).items() if name not in ("drafter", "target")]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (Replayed, Recording, Memory)):
            todo += vars(value).values()
    return sum(found.values())


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
        held.append(held_bytes(run.block))
    assert held[0] == held[1] == held[2]
    row = 2 * 2 * 16 * 4  # keys and values, KV heads, head_dim, float32
    assert run.block.storage.nbytes == (512 + 5 + 69) * row
    if compile == "off":  # what kernels compute in is kept, of the largest level alone
        assert held[0] < 1.1 * run.block.storage.nbytes


def test_the_window_counts_depth_and_not_the_order_of_nodes(monkeypatch):
    """Two orders of the same nodes see the same tokens: each level says the same of them."""
    model = tiny_model("llama").double()
    drafter = random_drafter(model, window=6)
    ids = prompts([30])[0][None]
    answers = []
    monkeypatch.setattr(Kept, "said", answers, raising=False)
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1])):
        sequences = Sequences(ids, [0], 60, StoppingCriteriaList(), model.device)
        target = Target(model, 1, 60)
        target.cache.storage.copy_(
            torch.randn(target.cache.storage.shape, generator=torch.Generator().manual_seed(0))
        )
        target.cache.seqlens = target.cache.seqlens + 29
        context = DraftContext(target, Sampler([], False, sequences), sequences)

        def best_children(self, logits, scores, masks, first, width, order=order):
            tokens = torch.tensor([[5, 6, 7, 8]])[:, order]
            seen = torch.tensor([[[3], [5], [9], [17]]])
            return tokens, scores.expand(1, 4), torch.zeros(1, 4, dtype=torch.int64), seen

        monkeypatch.setattr(Listening, "best_children", best_children)
        with torch.no_grad():
            Kept(drafter, context, 9, 2).grow(ids[:, -1], (4, 4))
        answers[-1] = answers[-1][:, order.argsort()]
    assert len(answers) == 4
    torch.testing.assert_close(answers[1], answers[3], rtol=1e-12, atol=1e-12)


def test_the_best_children_are_those_of_the_whole_table():
    """And a child sees what its parent sees, and itself."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 40, generator=generator) * 3
    scores = torch.randn(3, 5, generator=generator)
    masks = torch.randint(0, 2**6, (3, 5, 4), generator=generator)
    for width in (1, 7, 16, 200):
        tokens, best, parents, below = TORCH.best_children(logits, scores, masks, 6, width)
        table = (logits.log_softmax(-1) + scores[..., None]).flatten(1)
        expected = table.topk(width).values
        torch.testing.assert_close(best, expected)
        # What rounding leaves equal may change places: each is there once, with its own value.
        found = (parents - 6) * 40 + tokens
        assert all(len(row.unique()) == width for row in found)
        torch.testing.assert_close(table.gather(1, found), expected)
        seen = masks.gather(1, (parents - 6)[..., None].expand(-1, -1, 4))
        added = pack_tree_mask(torch.eye(256, dtype=torch.bool))[11 : 11 + width]
        assert torch.equal(below, seen | added)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU")
@pytest.mark.slow
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
