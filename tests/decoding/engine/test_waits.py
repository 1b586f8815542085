"""How often a round on a GPU makes the host wait: once, for what was emitted."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import specattn
from specattn.blocks import Direct
from specattn.blocks.results import note_pool
from specattn.decoding import (
    METHODS,
    Medusa,
    PosS,
    PromptLookup,
    Sampler,
    Suffix,
    TokenRecycling,
)
from specattn.decoding.engine.contract import Draft, Drafter
from specattn.decoding.engine.loop import run_rounds
from specattn.decoding.passes.attention import HEAD
from specattn.decoding.passes.cached_model import CachedModel
from specattn.decoding.text.sequences import Sequences
from specattn.decoding.text.statistics import Clock, Stopwatch
from specattn.kv_cache import KVCache
from specattn.tree import Tree
from tests.decoding.fake_gpu import FakeGPU
from tests.decoding.models import tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.drafters import dflash_statement, eagle3_statement, poss_statement
from tests.drafters.test_heads import random_heads

V, CUDA = 7, torch.device("cuda", 0)


class Counting:
    """A model that says every token's successor, round and round."""

    device = CUDA
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=V))

    def __init__(self, batch):
        self.cache = KVCache(2, batch, 64, 2, 8, device=CUDA)
        self.cache.storage.zero_()
        self.cache.seqlens = self.cache.seqlens + 4

    def verify(self, tree, tokens, **options):
        logits = 12.0 * torch.nn.functional.one_hot((tokens + 1) % V, V)
        return SimpleNamespace(logits=logits)

    def check_read(self, length, who=None):
        pass


class Serving(Counting):
    """Such a model for trained drafters, which read what its tokens are embedded as."""

    model = tiny_model("llama", vocab_size=V, num_hidden_layers=1)
    feature_layers, longest = (HEAD,), 64
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    programs = Direct
    runner = SimpleNamespace(captures=True, most_rows=64, how="in graphs")

    def recall(self, kind, owner, make):
        return make()

    def verify(self, tree, tokens, **options):
        found = super().verify(tree, tokens, **options)
        return SimpleNamespace(logits=found.logits, features=self.embed(tokens))


class Paced(Serving):
    """Such a model, whose passes are timed."""

    lockstep = None

    def __init__(self, batch):
        super().__init__(batch)
        self.workspace = SimpleNamespace(met=set())

    def clock(self):
        return Clock(CUDA)

    def captured_rows(self, rows, capture):
        return None


class Guesses(Drafter):
    """Drafts the same tree in every round; notes what had been waited for before."""

    def __init__(self, parents, gpu, context):
        self.tree, self.gpu, self.sequences = Tree(parents).to(CUDA), gpu, context.sequences
        self.offsets = torch.tensor([0, 1, 2, 2][: len(parents)]).to(CUDA)
        self.noted, self.counts = [], []

    def propose(self, root):
        self.noted.append((list(self.sequences.active), self.gpu.waits.copy()))
        return Draft(self.tree, (root[:, None] + self.offsets) % V)

    def observe(self, verified):
        self.counts.append(list(verified.counts))


class Noted(Drafter):
    """A method's drafter, of which is noted what `Guesses` notes."""

    def __init__(self, method, gpu, context):
        self.drafter, self.gpu, self.sequences = method.start(context), gpu, context.sequences
        self.noted, self.counts = [], []

    def propose(self, root):
        self.noted.append((list(self.sequences.active), self.gpu.waits.copy()))
        return self.drafter.propose(root)

    def on_accepted(self, draft, accepted, result):
        self.drafter.on_accepted(draft, accepted, result)

    def observe(self, verified):
        self.counts.append(list(verified.counts))
        self.drafter.observe(verified)

    def compact(self, rows):
        self.drafter.compact(rows)


def waits_of_rounds(drafter_of, processors=(), do_sample=False, kind=Counting):
    """Return what each round has waited for that no request ended, and the drafter."""
    gpu = FakeGPU()
    with gpu.serving(), specattn.use_backend("reference"):
        rows = [torch.arange(5), (torch.arange(5) + 3) % V]
        criteria = StoppingCriteriaList([MaxLengthCriteria(20)])
        sequences = Sequences(rows, [0, 0], 40, criteria, CUDA)
        target = kind(len(rows))
        sampler = Sampler(LogitsProcessorList(processors), do_sample, sequences, 3)
        names = {"target": target, "sequences": sequences, "sampler": sampler, "generator": None}
        names["calibrates"] = False
        context = SimpleNamespace(**names)
        drafter = drafter_of(gpu, context)
        with mock.patch.dict("specattn.blocks.results._graphs", clear=True):
            note_pool(gpu, (0, 2))
            assert run_rounds(context, drafter, Stopwatch(CUDA)).graph_bytes == 300
    waits = [
        after[len(before) :]
        for (active, before), (still, after) in zip(drafter.noted, drafter.noted[1:], strict=False)
        if active == still
    ]
    assert len(waits) > 2
    return waits, drafter


TREES = {"root": [-1], "chain": [-1, 0, 1], "tree": [-1, 0, 0, 1]}
PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.8)],
    "filter": [TemperatureLogitsWarper(0.8), TopKLogitsWarper(5)],
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_a_round_waits_once(parents, processors, do_sample):
    waits, drafter = waits_of_rounds(partial(Guesses, parents), processors, do_sample)
    assert waits == [["event"]] * len(waits)
    assert max(map(max, drafter.counts)) == min(2, len(parents) - 1)


def test_processors_of_texts_wait_more_often():
    """They are asked level by level, on the host."""
    processors = [RepetitionPenaltyLogitsProcessor(1.1)]
    waits, _ = waits_of_rounds(partial(Guesses, TREES["tree"]), processors, do_sample=True)
    assert min(map(len, waits)) > 1


LOOKUPS = {
    "suffix": Suffix(nodes=6, k=2),
    "suffix without recycling": Suffix(nodes=6, recycling=False),
    "prompt_lookup": PromptLookup(gamma=3),
    "token_recycling": TokenRecycling(nodes=6, depth=2, k=2),
}


@pytest.mark.parametrize("method", LOOKUPS.values(), ids=LOOKUPS)
def test_who_learns_what_followed_waits_for_nothing_else(method):
    """Shapes of trees that were never met included."""
    waits, drafter = waits_of_rounds(partial(Noted, method))
    assert waits == [["event"]] * len(waits)
    assert max(map(max, drafter.counts)) > 0


SIZE = {"width": 2, "depth": 2, "total_tokens": 5}


def eagle3():
    own = {"layers": (1,), "tokens": 6, "dtype": torch.float32}
    return METHODS["eagle3"](eagle3_statement.random_drafter(Serving.model, **own), **SIZE)


def block(name):
    own = {"causal": name == "jetflow", "feature_layers": [1], "layers": 1}
    return METHODS[name](dflash_statement.random_drafter(Serving.model, **own), **SIZE)


TRAINED = {
    "medusa": Medusa(random_heads("medusa", Serving.model, dtype=torch.float32), (2, 2)),
    "poss": PosS(
        poss_statement.random_drafter(Serving.model, layers=2, dtype=torch.float32),
        **SIZE,
    ),
    "eagle3": eagle3(),
    "mtp": METHODS["mtp"](random_mtp(Serving.model), **SIZE),
    "dflash": block("dflash"),
    "jetflow": block("jetflow"),
}


@pytest.mark.parametrize("method", TRAINED.values(), ids=TRAINED)
def test_a_draft_of_a_given_size_waits_for_nothing(method):
    """But for tables of its shapes, which a process makes once."""
    waits_of_rounds(partial(Noted, method), kind=Serving)
    waits, drafter = waits_of_rounds(partial(Noted, method), kind=Serving)
    assert waits == [["event"]] * len(waits)
    assert max(map(len, drafter.counts)) == 2


PACED = {"suffix": Suffix(), "medusa": Medusa(TRAINED["medusa"].drafter)}


@pytest.mark.parametrize("method", PACED.values(), ids=PACED)
def test_what_rounds_took_is_read_when_it_has_passed(method):
    """An event that has not is an error of CUDA's, and to wait for one a wait more."""
    waits, drafter = waits_of_rounds(partial(Noted, method), kind=Paced)
    assert waits == [["event"]] * len(waits)
    assert drafter.drafter.details()["ms of a pass"]


def test_successors_that_a_gpu_ranked_come_with_the_report():
    _, drafter = waits_of_rounds(partial(Noted, LOOKUPS["suffix"]))
    best = drafter.drafter.successors[:, 0]
    assert best.tolist() == [(token + 1) % V for token in range(V)]


class Reading(Counting):
    """Such a model that reads prompts, and notes which tokens it was given on the GPU."""

    prefill, _reporting = CachedModel.prefill, CachedModel._reporting

    def __init__(self, batch):
        super().__init__(batch)
        self.given = []

    def prefill_chunk(self, tokens, counts, start, wanted):
        assert tokens.device == CUDA
        self.given.append((tokens, counts, start))


@pytest.mark.parametrize("lengths", [(9,), (9, 2, 6), (0, 0)])
def test_reading_prompts_waits_for_nothing(lengths):
    """All of them are copied at once, before the first chunk; lengths are those read so far."""
    prompts, gpu = [torch.arange(10 * n, 10 * n + n) for n in lengths], FakeGPU()
    with gpu.serving():
        target = Reading(len(lengths))
        before = gpu.waits.copy()
        seqlens, chunk = [], target.prefill_chunk
        target.prefill_chunk = lambda *given: (seqlens.append(target.cache.seqlens), chunk(*given))
        target.prefill(prompts, chunk_size=4)
        assert gpu.waits == before
        seqlens = [own.tolist() for own in (*seqlens[1:], target.cache.seqlens)]
        starts = [0, 4, 8] if any(lengths) else []
        assert seqlens[: len(starts)] == [[min(n, at + 4) for n in lengths] for at in starts]
        assert [start for *_, start in target.given] == starts
        for tokens, counts, start in target.given:
            parts = [prompt[start : start + 4] for prompt in prompts]
            assert counts == [len(part) for part in parts]
            assert tokens.tolist() == torch.cat(parts).tolist()
