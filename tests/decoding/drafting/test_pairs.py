"""What a drafter keeps of rounds that it does not draft, until it reads all of it in parts."""

from types import SimpleNamespace

import pytest
import torch

from specattn.acceptance import Accepted
from specattn.decoding.engine.contract import Draft, Verified
from specattn.decoding.methods.poss import SpecialistBlock
from specattn.tree import Tree
from tests.decoding.methods.test_poss import started
from tests.decoding.models import prompts, tiny_model
from tests.drafters.poss_statement import random_drafter

# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

PROMPT, WIDTH = 9, 32
PATHS = ((), (1,), (2,), (1, 3))  # down this tree, from the root's child on
TREE = Tree([-1, 0, 0, 1])


def rounds_of(batch, tokens, generator):
    """Yield each round's paths, until the batch as a whole may have been given so many tokens."""
    most = 0
    while most < tokens:
        paths = [PATHS[n] for n in torch.randint(0, 4, (batch,), generator=generator).tolist()]
        paths[0] = paths[0] if batch == 1 else ()  # far behind the others
        most += 1 + max(map(len, paths))
        yield paths


@pytest.mark.parametrize("native", [True, False], ids=["one call", "operators"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 3), (1, 400), (1, 700), (2, 250), (3, 300)])
def test_what_many_rounds_gave_is_read_as_a_prompt_is(batch, tokens, native):
    """400 tokens are kept and read in four parts; of 700, and of three requests, some earlier."""
    generator = torch.Generator().manual_seed(tokens)
    model = tiny_model("qwen3").double()
    drafter = random_drafter(model, layers=2)
    rounds = list(rounds_of(batch, tokens, generator))
    texts = torch.stack(prompts([PROMPT + 3 * len(rounds) + 1] * batch))
    context = started(model, texts[:, :PROMPT], 3 * len(rounds))
    features = torch.randn(batch, PROMPT - 1, WIDTH, generator=generator).double()
    block = SpecialistBlock(drafter, context, 4, 2)
    if not native:
        block.native = None
    with torch.no_grad():
        block.on_prefill(0, features)
        came = [list(own) for own in features]
        for paths in rounds:
            rows = torch.randn(batch, TREE.size, WIDTH, generator=generator).double()
            nodes = torch.tensor([[*path, -1, -1][:2] for path in paths])
            counts = [len(path) for path in paths]
            accepted = Accepted(nodes, torch.tensor(counts), nodes[:, 0])
            draft = Draft(TREE, torch.zeros(batch, TREE.size, dtype=torch.int64))
            result = SimpleNamespace(features=rows)
            for row, path in enumerate(paths):
                came[row] += [rows[row, node] for node in (0, *path)]
                end = context.sequences.ends[row]
                context.sequences.extend(row, texts[row, end : end + 1 + len(path)].tolist())
            block.accept(Verified(draft, accepted, None, result, counts))
        block.catch_up()
        lengths = context.sequences.lengths
        for row, own in enumerate(came):
            whole = started(model, texts[row : row + 1, : lengths[row]], 9)
            expected = SpecialistBlock(drafter, whole, 4, 2)
            expected.on_prefill(0, torch.stack(own)[None])
            assert len(own) == lengths[row] - 1
            found = block.text[:, :, row, : len(own)], block.root[row]
            given = expected.text[:, :, 0, : len(own)], expected.root[0]
            torch.testing.assert_close(found, given, rtol=1e-9, atol=1e-9)
