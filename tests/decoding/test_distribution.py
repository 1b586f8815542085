"""Sampled text has the distribution of plain decoding by transformers, whatever was drafted.

The distribution of the first tokens is computed by enumeration: transformers' own forward pass and
logits processors on every possible continuation. Many copies of one prompt are then decoded as one
batch and their continuations counted.
"""

import itertools
import math

import hypothesis
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specattn import acceptance, kv_cache, reference
from specattn.decoding import METHODS as ALL
from specattn.decoding import ContextualPenalty, generate
from specattn.decoding.drafting.gains import NONE, Effort
from specattn.decoding.drafting.pace import FixedSize
from specattn.decoding.methods import longspec_block, triforce
from tests import distributions
from tests.decoding.engine.test_loop import RandomTree
from tests.decoding.models import prompts, tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.decoding.pacing import with_costs
from tests.drafters import dflash_statement, eagle3_statement, poss_statement
from tests.drafters.statement import random_drafter
from tests.drafters.test_heads import random_heads

V = 6
DEPTH = 3  # tokens whose joint distribution is tested
COPIES = 3000
# Where transformers' processors are asked node by node, which took 42 of 69 seconds: so many notice
# a missing penalty (below). A wrong rule of acceptance they would not: TriForce's has p = 0.007.
FEW = COPIES if hypothesis.settings.get_current_profile_name() == "fuzz" else COPIES // 2

SAMPLING = {
    "pure": ({"temperature": 1.0, "top_k": 0}, []),
    "warped": (
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.9)],
    ),
    "penalised": (
        {"temperature": 1.3, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.8},
        [
            RepetitionPenaltyLogitsProcessor(1.8),
            TemperatureLogitsWarper(1.3),
            MinPLogitsWarper(0.05),
        ],
    ),
}
CONTEXTUAL = {  # transformers has no option for the first, so runs are given it as a processor
    "contextual": (
        {"temperature": 1.0, "top_k": 0, "min_p": 0.05},
        [ContextualPenalty(3, 1.8), MinPLogitsWarper(0.05)],
    ),
}
MODEL = tiny_model("qwen3", vocab_size=V, peak=0.7)
DRAFTER = random_drafter(MODEL, window=7, dtype=torch.float32)
SPECIALISTS = poss_statement.random_drafter(MODEL, layers=2, dtype=torch.float32)
EAGLE3 = eagle3_statement.random_drafter(MODEL, tokens=V - 1, dtype=torch.float32)
BLOCKS = dflash_statement.random_drafter(MODEL)
HIERARCHY = {
    "ratio": 0.2,
    "min_tokens": 1,
    "chunk_size": 4,
    "draft": tiny_model("llama", vocab_size=V, peak=0.7, seed=3, num_hidden_layers=1),
    "draft_budget": 20,
}
# Drafts that are sampled by themselves; with shared noise a text is plain decoding's (test_seed).
METHODS = {
    "plain": ALL["plain"](),
    "vegas": ALL["vegas"](gamma=2, ratio=0.2, min_tokens=1, rejection=True, switch=False),
    "vegas-shared-noise": ALL["vegas"](gamma=2, ratio=0.2, min_tokens=1, switch=False),
    "cast": ALL["cast"](gamma=2, rejection=True),
    "cast-shared-noise": ALL["cast"](gamma=2),
    "streaming": ALL["streaming"](gamma=2, ratio=0.2, min_tokens=1, sinks=1, rejection=True),
    "quest": ALL["quest"](gamma=2, ratio=0.2, min_tokens=1, page_size=4, rejection=True),
    "specextend": ALL["specextend"](gamma=2, ratio=0.2, min_tokens=1, chunk_size=4, rejection=True),
    "triforce": ALL["triforce"](gamma=2, ratio=0.2, min_tokens=1, chunk_size=4, rejection=True),
    "triforce-one-guess": ALL["triforce"](gamma=2, **HIERARCHY, draft_gamma=1, rejection=True),
    "triforce-two-guesses": ALL["triforce"](gamma=3, **HIERARCHY, draft_gamma=2, rejection=True),
    "longspec-tree": ALL["longspec"](DRAFTER, widths=(2, 3)),
    "longspec-chain": ALL["longspec"](DRAFTER, gamma=2, rejection=True),
    "poss": ALL["poss"](SPECIALISTS, width=3, depth=2, total_tokens=8),
    "eagle3": ALL["eagle3"](EAGLE3, width=3, depth=2, total_tokens=8),
    "dflash": ALL["dflash"](BLOCKS, width=3, depth=2, total_tokens=8, causal=False),
    "jetflow": ALL["jetflow"](BLOCKS, width=3, depth=2, total_tokens=8),
    "mtp": ALL["mtp"](random_mtp(MODEL), width=3, depth=2, total_tokens=8),
    "prompt_lookup": ALL["prompt_lookup"](gamma=2),
    "medusa": ALL["medusa"](random_heads("medusa", MODEL, dtype=torch.float32), widths=(2, 2)),
    "suffix": ALL["suffix"](nodes=3, k=2),
    "auto": ALL["auto"](trained=ALL["longspec"](DRAFTER, widths=(2, 3))),
    "token_recycling": ALL["token_recycling"](nodes=4, depth=2, k=2),
    "tokenswift": ALL["tokenswift"](
        random_heads("tokenswift", MODEL, dtype=torch.float32),
        widths=(1, 2, 2),
        k=3,
        n=3,
        budget=16,
        sinks=2,
    ),
    "tree": RandomTree(widths=(2, 2), probs=(0.3, 0.1, 0.1, 0.2, 0.05, 0.25)),
}
FROM_THE_TEXT = ("prompt_lookup",)  # random text says little about a random model's next token


@pytest.fixture(scope="module")
def model():
    return MODEL


@pytest.fixture(scope="module")
def prompt():
    (text,) = prompts([14], vocabulary=V - 2)  # two tokens that only the continuation can have
    return text


@pytest.fixture(autouse=True)
def whole_batches(monkeypatch):
    """Compute attention for all copies at once: a CPU is otherwise served request by request.

    Rows of a pass are free, so that what is sized by cost is drafted.
    """
    with_costs(monkeypatch, lambda rows: 1e-3 if rows <= 5 else math.inf)

    def verify_attention(*tensors, collected=None, **options):
        *state, found = reference.verify_attention(*tensors, **options)
        return *state, found if collected is None else collected.copy_(found)

    for op in ("hybrid_tree_attention", "sparse_gather_attention"):
        for module in (kv_cache, longspec_block):
            monkeypatch.setattr(module, op, getattr(reference, op), raising=False)
    monkeypatch.setattr(kv_cache, "verify_attention", verify_attention)


def next_token_tables(model, prompt, processors):
    """Return next-token probabilities after every continuation of 0 to DEPTH - 1 tokens."""
    tables = []
    for depth in range(DEPTH):
        texts = [[*prompt.tolist(), *new] for new in itertools.product(range(V), repeat=depth)]
        ids = torch.tensor(texts)
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        scores = LogitsProcessorList(processors)(ids, logits)
        tables.append(scores.double().softmax(-1))
    return tables


# Accepting is what differs: by a method's own noise, or by the target's; on chains, on trees.
# Texts of shared noise are plain decoding's, for every method (test_seed): two trees are drawn.
ACCEPTING = {
    "pure": {
        *("plain", "vegas", "streaming", "longspec-chain", "triforce-one-guess"),
        *("triforce-two-guesses", "tree", "longspec-tree"),
    },
    "warped": {"plain", "vegas"},
    "penalised": {"plain", "vegas", "tree"},
    "contextual": {"tokenswift"},
}


def pairs():
    """Yield every sampling with every method; what is accepted as another is, is slow."""
    of_processors = itertools.product(CONTEXTUAL, ("plain", "tokenswift"))
    for sampling, method in [*itertools.product(SAMPLING, METHODS), *of_processors]:
        quick = method in ACCEPTING[sampling]
        yield pytest.param(sampling, method, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("sampling", "method"), list(pairs()))
def test_the_joint_distribution_of_the_first_tokens(model, prompt, sampling, method):
    first = check_distribution(model, prompt, sampling, METHODS[method])
    if method != "plain":
        least = 0.05 if method in FROM_THE_TEXT else 0.2
        assert least < first < 0.95, "drafts should be neither perfect nor useless"


def check_distribution(model, prompt, sampling, method):
    """Check many copies' distribution; return the share of rounds that accepted a drafted token."""
    options, processors = (SAMPLING | CONTEXTUAL)[sampling]
    config = GenerationConfig(do_sample=True, **options)
    own = [processor for processor in processors if isinstance(processor, ContextualPenalty)]
    output = generate(
        model,
        prompt.expand(COPIES if sampling == "pure" else FEW, -1),
        method,
        max_new_tokens=DEPTH + 2,  # so that the drafts of those tested are not cut short
        generation_config=config,
        logits_processor=LogitsProcessorList(own),
        seed=1,
    )
    new = torch.tensor(output.new_tokens)[:, :DEPTH]
    number = (new * V ** torch.arange(DEPTH - 1, -1, -1)).sum(-1)
    distribution = distributions.joint(next_token_tables(model, prompt, processors))
    assert distributions.p_value(number, distribution) > distributions.SIGNIFICANCE
    return next(iter(output.statistics.total.position_rates), 0.0)


@pytest.mark.parametrize(
    "sampling",
    ["pure", *(pytest.param(name, marks=pytest.mark.slow) for name in ("warped", "penalised"))],
)
def test_rounds_with_drafts_and_without_may_follow_one_another(
    model, prompt, sampling, monkeypatch
):
    """As Vegas' switch lets them: it decides before a round draws anything."""
    efforts = itertools.cycle([Effort(1, 1), Effort(1, 1), NONE])
    monkeypatch.setattr(FixedSize, "choose", lambda *_: next(efforts))
    method = ALL["vegas"](gamma=1, ratio=0.2, min_tokens=1, rejection=True)
    assert 0.05 < check_distribution(model, prompt, sampling, method) < 0.5


def test_the_test_would_notice_what_the_authors_middle_level_does(model, prompt, monkeypatch):
    """TriForce's program draws from the middle level behind a rejected guess, not the residual."""

    def without_residual(tree, tokens, probs, **options):
        accepted = acceptance.accept(tree, tokens, probs, **options)
        distribution = probs[torch.arange(len(tokens)), accepted.counts]
        return accepted._replace(next_token=acceptance.sample(distribution))

    monkeypatch.setattr(triforce, "accept", without_residual)
    output = generate(
        model,
        prompt.expand(COPIES, -1),
        METHODS["triforce-one-guess"],
        max_new_tokens=DEPTH,
        temperature=1.0,
        top_k=0,
        seed=1,
    )
    new = torch.tensor(output.new_tokens)
    number = (new * V ** torch.arange(DEPTH - 1, -1, -1)).sum(-1)
    distribution = distributions.joint(next_token_tables(model, prompt, []))
    assert distributions.p_value(number, distribution) < 1e-12


def test_the_test_would_notice_a_missing_penalty(model, prompt):
    """The distributions of two samplings differ by far more than the test's threshold."""
    _, processors = SAMPLING["penalised"]
    output = generate(
        model, prompt.expand(FEW, -1), "plain", max_new_tokens=DEPTH, temperature=1.3, top_k=0
    )
    new = torch.tensor(output.new_tokens)
    number = (new * V ** torch.arange(DEPTH - 1, -1, -1)).sum(-1)
    distribution = distributions.joint(next_token_tables(model, prompt, processors))
    assert distributions.p_value(number, distribution) < 1e-12
