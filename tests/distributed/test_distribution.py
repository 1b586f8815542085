"""What several ranks sample has the distribution by enumeration, whatever was drafted.

All continuations of three tokens are enumerated through transformers' own forward pass, on one
rank; many copies of one prompt are then decoded by two ranks that share the cache or the model, and
their continuations counted. Drafts are sampled by themselves (`rejection`) where a method can.
"""

import itertools

import pytest
import torch

from specattn.decoding import METHODS, generate
from specattn.distributed import ContextParallel
from tests import distributions
from tests.decoding.models import prompts, tiny_model
from tests.distributed.decoding import loaded, saved
from tests.drafters.statement import random_drafter

V, DEPTH, BLOCK = 6, 3, 4
MODEL = {"vocab_size": V, "peak": 0.7}
SHARE = {"gamma": 2, "ratio": 0.2, "min_tokens": 1, "rejection": True}
NAMES = ("plain", "vegas", "vegas-own-heads", "triforce", "suffix", "longspec-chain")
PROMPT = 14  # tokens: on both ranks


def method_of(name):
    longspec = random_drafter(tiny_model("qwen3", **MODEL), window=7, dtype=torch.float32)
    return {
        "plain": lambda: METHODS["plain"](),
        "vegas": lambda: METHODS["vegas"](**SHARE, switch=False),
        "vegas-own-heads": lambda: METHODS["vegas"](**SHARE, switch=False, mean_over_ranks=False),
        "triforce": lambda: METHODS["triforce"](**SHARE, chunk_size=4),
        "suffix": lambda: METHODS["suffix"](nodes=3, k=2),
        "longspec-chain": lambda: METHODS["longspec"](longspec, gamma=2, rejection=True),
    }[name]()


def sampled(folder, name, kind, copies, seed):
    """Return the numbers of the continuations of this rank, int64 [copies]."""
    model = loaded(folder, 2 if kind == "tensor" else 1)
    output = generate(
        model,
        prompts([PROMPT], vocabulary=V)[0].expand(copies, -1),
        method_of(name),
        max_new_tokens=DEPTH + 2,
        temperature=1.0,
        top_k=0,
        seed=seed,
        context_parallel=ContextParallel(block_size=BLOCK) if kind == "context" else None,
    )
    places = torch.tensor([V**n for n in reversed(range(DEPTH))])
    return (torch.tensor(output.new_tokens)[:, :DEPTH] * places).sum(-1)


def enumerated(folder):
    """Return the probability of every continuation, float64 [V**DEPTH]."""
    model, (prompt,), tables = loaded(folder), prompts([PROMPT], vocabulary=V), []
    for depth in range(DEPTH):
        new = torch.tensor(list(itertools.product(range(V), repeat=depth))).view(V**depth, depth)
        ids = torch.cat([prompt.expand(len(new), -1), new.long()], 1)
        with torch.no_grad():
            tables.append(model(ids).logits[:, -1].double().softmax(-1))
    return distributions.joint(tables)


def assert_no_bias(ranks, folder, name, kind, copies, seeds=(5,)):
    numbers = []
    for seed in seeds:
        first, second = ranks(sampled, folder, name, kind, copies, seed)
        assert torch.equal(first, second)
        numbers.append(first)
    found = distributions.p_value(torch.cat(numbers), enumerated(folder))
    assert found > distributions.SIGNIFICANCE


@pytest.mark.parametrize("kind", ["context", "tensor"])
def test_what_two_ranks_sample_has_the_targets_distribution(two_ranks, tmp_path, kind):
    assert_no_bias(two_ranks, saved("qwen3", tmp_path, **MODEL), "vegas", kind, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["context", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_thirty_thousand_samples_of_two_ranks_show_no_bias(two_ranks, tmp_path, name, kind):
    folder = saved("qwen3", tmp_path, **MODEL)
    assert_no_bias(two_ranks, folder, name, kind, 3000, seeds=range(10))


@pytest.mark.parametrize(("factor", "samples"), [(1.5, 2000), (1.2, 30_000)])
def test_so_many_samples_show_a_bias(tmp_path, factor, samples):
    """What is a little too likely is found by the two tests above."""
    expected = enumerated(saved("qwen3", tmp_path, **MODEL))
    generator = torch.Generator().manual_seed(0)
    biased = expected.clone()
    biased[: len(biased) // 2] *= factor
    found = torch.multinomial(biased, samples, replacement=True, generator=generator)
    assert distributions.p_value(found, expected) < distributions.SIGNIFICANCE
