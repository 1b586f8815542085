"""The smallest trained drafter: its one block makes the next feature of a token and the last one.

All that a drafter takes: a configuration, the weights, the block as a function of `ops`, and a
method that drafts with it.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from specattn.blocks import TORCH, norm_of, projection, swiglu
from specattn.decoding.drafting.trained import fitting_drafter
from specattn.decoding.engine.contract import Draft, Drafter
from specattn.decoding.engine.method import Method
from specattn.drafters.drafter import DrafterConfig, TrainedDrafter
from specattn.tree import Tree


class ToyConfig(DrafterConfig):
    """What the weights fit."""

    model_type = "toy"
    shared = ("hidden_size", "vocab_size")

    hidden_size: int = 32
    vocab_size: int = 96


class ToyDrafter(TrainedDrafter):
    """The weights; `forward` is for whole texts, as training sees them."""

    config_class = ToyConfig
    title = "Toy"

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.RMSNorm(width, 1e-6)
        self.gate_up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.post_init()

    def forward(self, inputs_embeds, features):
        """Return the feature of every token, from those of the token before: all [B, L, H]."""
        return block(TORCH, self, inputs_embeds, features)


def block(ops, drafter, embeds, features):
    """Return the drafter's equations: ``x = fc([embed; feature])``, ``x + mlp(norm(x))``."""
    x = ops.linear(ops.beside(embeds, features), projection(drafter.fc), keep=True)
    return swiglu(ops, x, norm_of(drafter.norm), drafter.gate_up_proj, drafter.down_proj)


@dataclass(frozen=True)
class Toy(Method):
    """Drafts a chain of `gamma` tokens, each the most probable one."""

    drafter: ToyDrafter | None = None
    gamma: int = 3

    name = "toy"
    reads_features = True

    @property
    def max_nodes(self):
        """The root and the chain."""
        return 1 + self.gamma

    def prepared(self, model):
        """Return this method with its drafter found to fit."""
        return replace(self, drafter=fitting_drafter(ToyDrafter, self.drafter, model))

    def start(self, context):
        """Return a drafter for one run."""
        return _ToyDrafting(self.prepared(context.target.model), context)


class _ToyDrafting(Drafter):
    def __init__(self, method, context):
        self.weights, self.gamma = method.drafter, method.gamma
        self.target, self.sequences = context.target, context.sequences
        self.programs = self.target.programs()
        shape = (self.target.cache.batch_size, self.weights.config.hidden_size)
        self.features = torch.zeros(shape, dtype=self.target.model.dtype)

    def on_prefill(self, start, features):
        before = zip(features, self.features, strict=True)
        self.features = torch.stack([own[-1] if len(own) else last for own, last in before])

    def propose(self, root):
        depth = min(self.gamma, self.sequences.draft_depth)
        inputs = {"root": root[:, None], "features": self.features[:, None]}
        chain = self.programs.run(depth, partial(self._chain, depth), inputs)
        return Draft(Tree.chain(depth), torch.cat(chain, 1))

    def _chain(self, depth, ops, root, features):
        chain, nothing = [root], torch.zeros(root.shape)
        for _ in range(depth):
            embeds = ops.embed(chain[-1], self.target.embed)
            features = block(ops, self.weights, embeds, features)
            best, _ = ops.children(ops.head(features, self.target.head), nothing, 1)
            chain.append(best[..., 0])
        return chain

    def observe(self, verified):
        rows = torch.arange(len(self.features))
        self.features = verified.result.features[rows, verified.accepted.last]

    def compact(self, rows):
        self.features = self.features[rows]
