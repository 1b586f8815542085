"""Distributions over token sequences: what tests of exactness compare against.

A *table* is what a language model is to these tests: `tables[d]`, float64 [V**d, V], holds the
probabilities of the next token after each prefix of d tokens. A prefix is numbered by its digits in
base V.
Nothing here uses `specattn`.
"""

import itertools

import torch
from scipy import stats

# Seeds are fixed, so a test passes always or never. The threshold is the chance that a seed had to
# be changed when the test was written; wrong rules land many orders of magnitude below it.
SIGNIFICANCE = 1e-4


def random_tables(vocab, depth, seed, spread=1.0):
    """Return random tables for prefixes of 0 to `depth` tokens; larger `spread`, sharper peaks."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(vocab**d, vocab, dtype=torch.float64, generator=generator)
        .mul(spread)
        .softmax(-1)
        for d in range(depth + 1)
    ]


def one_hot(tables):
    """Return what greedy decoding makes of the distributions."""
    vocab = tables[0].shape[-1]
    return [torch.nn.functional.one_hot(table.argmax(-1), vocab).double() for table in tables]


def prefix_numbers(parents, tokens, vocab):
    """Return the number of each node's prefix (the tokens from below the root), int64 [B, T]."""
    number = torch.zeros_like(tokens)
    for node, parent in enumerate(parents):
        if parent >= 0:
            number[:, node] = number[:, parent] * vocab + tokens[:, node]
    return number


def depths(parents):
    """Return the depth of each node as a list."""
    depth = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return depth


def at_nodes(tables, parents, tokens):
    """Return the distribution after each node's own path, float64 [B, T, V]."""
    number = prefix_numbers(parents, tokens, tables[0].shape[-1])
    rows = [tables[d][number[:, node]] for node, d in enumerate(depths(parents))]
    return torch.stack(rows, dim=1)


def joint(tables):
    """Return the probabilities of sequences of len(tables) tokens, float64 [V**len(tables)]."""
    distribution = torch.ones(1, dtype=torch.float64)
    for table in tables:
        distribution = (distribution[:, None] * table).flatten()
    return distribution


def emitted(tokens, accepted):
    """Return the emitted tokens [B, max_depth + 1] and how many they are [B]."""
    path = tokens.gather(-1, accepted.nodes.clamp_min(0))
    path = torch.cat([path, torch.zeros_like(accepted.next_token)[:, None]], dim=-1)
    path = path.scatter(-1, accepted.counts[:, None], accepted.next_token[:, None])
    return path, accepted.counts + 1


def completed_law(tables, sequences, lengths, weights):
    """Return the distribution of sequences that start as emitted and go on as the target would.

    Row i says `sequences[i, :lengths[i]]` with probability `weights[i]`. The result equals
    `joint(tables)` exactly when what is emitted, and where it ends, preserves the distribution.
    """
    vocab = tables[0].shape[-1]
    number = torch.zeros(len(sequences), dtype=torch.int64)
    distribution = torch.zeros(1, dtype=torch.float64)
    for step, table in enumerate(tables):
        number = number * vocab + sequences[:, step] if step < sequences.shape[1] else number
        ends = (lengths == step + 1) * weights
        distribution = (distribution[:, None] * table).flatten()
        distribution = distribution.scatter_add(0, torch.where(ends > 0, number, 0), ends)
    return distribution


def complete(tables, sequences, lengths, generator):
    """Return each row's sequence number after drawing what was not emitted from the target."""
    vocab = tables[0].shape[-1]
    number = torch.zeros(len(sequences), dtype=torch.int64)
    for step, table in enumerate(tables):
        token = torch.multinomial(table[number], 1, generator=generator)[:, 0]
        if step < sequences.shape[1]:
            token = torch.where(step < lengths, sequences[:, step], token)
        number = number * vocab + token
    return number


def p_value(samples, distribution):
    """Return the chi-square probability that cell numbers `samples` [B] follow `distribution`.

    Cells too rare for the chi-square approximation are counted together as one.
    """
    count = torch.bincount(samples, minlength=len(distribution)).double()
    expected = distribution * len(samples)
    if (count[distribution == 0] > 0).any():
        return 0.0
    rare = expected < 10
    cells = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (count, expected)]
    used = cells[1] > 0
    if used.sum() < 2:
        return 1.0
    observed, wanted = (x[used].numpy() for x in cells)
    return float(stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


class Script:
    """A source of draws that says a written list of outcomes and keeps their probability.

    Called with weights [B, n], row i draws what its row of `outcomes` [B, draws] says next.
    """

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.probability = torch.ones(len(outcomes), dtype=torch.float64)
        self.arities = []

    def __call__(self, weights, *, generator=None):
        step = len(self.arities)
        self.arities.append(weights.shape[-1])
        chosen = self.outcomes[:, step] if step < self.outcomes.shape[1] else self.outcomes[:, 0]
        total = weights.double().sum(-1)
        mass = weights.double().gather(-1, chosen[:, None])[:, 0] / total
        # Draws that decide nothing (no mass at all) must still be said once.
        self.probability = self.probability * torch.where(total > 0, mass, (chosen == 0).double())
        return chosen


def all_outcomes(arities):
    """Return every combination of outcomes of draws with these numbers of outcomes."""
    return torch.cartesian_prod(*map(torch.arange, arities)).reshape(-1, len(arities))


def all_drafts(parents, q_tables, *, replacement=False):
    """Return every draft that sampling from `q_tables` can give, with its probability.

    Siblings are drawn in order, from what the earlier ones left (unless `replacement`); once the
    distribution is used up, from the unused tokens evenly. Returns tokens [n, T] and weights [n].
    """
    vocab = q_tables[0].shape[-1]
    tokens = torch.tensor(
        [(0, *t) for t in itertools.product(range(vocab), repeat=len(parents) - 1)]
    )
    distribution = at_nodes(q_tables, parents, tokens)
    weight = torch.ones(len(tokens), dtype=torch.float64)
    rows = torch.arange(len(tokens))
    free = torch.ones(distribution.shape, dtype=torch.float64)
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        left = distribution[:, parent] * free[:, parent]
        exhausted = left.sum(-1, keepdim=True) == 0
        left = torch.where(exhausted, free[:, parent], left)
        weight *= left[rows, tokens[:, node]] / left.sum(-1)
        if not replacement:
            free[rows, parent, tokens[:, node]] = 0
    return tokens[weight > 0], weight[weight > 0]
