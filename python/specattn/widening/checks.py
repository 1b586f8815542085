"""Whether a widened model is the source: the same logits, the same drafted trees."""

from __future__ import annotations

import inspect
from concurrent.futures import _base  # a real text, on every machine the same kind of
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.decoding import METHODS, Method, generate
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter
from specattn.widening.multiples import Multiples
from specattn.widening.source import Source

_TOKENS = 512  # whose logits are compared
_PROMPT, _NEW_TOKENS = 256, 32  # of what drafters continue
_TOLERANCE = 1e-4  # of the largest logit, in float32
# Trees of fixed sizes: others follow from how long rounds take.
_TREES: dict[str, dict[str, Any]] = {
    "longspec": {"widths": (3, 3, 3)},
    "poss": {"width": 3, "depth": 4, "total_tokens": 16},
    "eagle3": {"width": 3, "depth": 4, "total_tokens": 16},
    "dflash": {"width": 3, "depth": 4, "total_tokens": 16},
    "mtp": {"width": 3, "depth": 4, "total_tokens": 16},
    "tokenswift": {"widths": (1, 2)},
    "medusa": {"widths": (2,)},
}


@dataclass(frozen=True)
class Exactness:
    """How far a widened model is the source.

    Attributes
    ----------
    tokens : int
        Of the text whose logits were compared.
    difference, largest : float
        The largest difference of a logit in float32, and the largest logit.
    trees : dict of str to int
        Drafted trees that were compared, all the same, by drafter.
    same_tokens : float
        Share of the tokens behind which the stored weights have the source's next token.
    """

    tokens: int
    difference: float
    largest: float
    trees: dict[str, int]
    same_tokens: float = 0.0


def text_of(source: Source) -> torch.Tensor:
    """Return the tokens [1, L] of a real text."""
    tokens = source.tokenizer(inspect.getsource(_base))["input_ids"][:_TOKENS]
    return torch.tensor([tokens])


@torch.no_grad()
def exactness(source: Source, times: Multiples) -> Exactness:
    """Compare before anything is stored, in float32; ValueError where something differs.

    All layers are the source's: those that write zeros would not change a bit.
    """
    wide = source.empty(times := replace(times, layers=source.model.config.num_hidden_layers))
    for part in source.parts(times):
        wide.load_state_dict(part, strict=False, assign=True)
    wide.tie_weights()
    ids = text_of(source)
    expected, actual = source.model(ids).logits, wide(ids).logits
    difference, largest = float((actual - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE * largest:
        raise ValueError(f"its logits would differ by {difference:.2g}, of up to {largest:.2g}")
    trees = {}
    for name, drafter in source.drafters.items():
        drafted = _trees(source.model, name, drafter, ids)
        if _trees(wide, name, source.wide_drafter(name, times, ""), ids) != drafted:
            raise ValueError(f"its {name} would draft otherwise")
        trees[name] = len(drafted)
    return Exactness(ids.shape[1], difference, largest, trees)


@torch.no_grad()
def same_tokens(source: Source, stored: PreTrainedModel) -> float:
    """Return how often the stored model has the source's next token, the source in its dtype."""
    ids = text_of(source)
    model: Any = deepcopy(source.model)
    before = model.to(stored.dtype)(ids).logits.argmax(-1)
    return float((stored(ids).logits.argmax(-1) == before).float().mean())


def _trees(model: PreTrainedModel, name: str, drafter: Any, ids: torch.Tensor) -> list[Any]:
    """Return parents and tokens of all trees that are drafted in continuing a text."""
    given: dict[str, Any] = {"drafter": drafter, **_TREES[name]}
    method = _Recorded(METHODS[name](**given), [])
    options: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS, "temperature": 0, "compile": "off"}
    generate(model, ids[:, :_PROMPT], method, **options)
    return method.drafted


@dataclass(frozen=True)
class _Recorded(Method):
    """A method whose drafts are kept."""

    method: Method
    drafted: list[Any]
    reads_features = True

    @property
    def max_nodes(self) -> int:
        return self.method.max_nodes

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.method.feature_layers(model)

    def start(self, context: DraftContext) -> Drafter:
        drafter: Any = self.method.start(context)
        propose = drafter.propose

        def record(root: torch.Tensor) -> Draft:
            draft = propose(root)
            self.drafted.append((draft.tree.parents.tolist(), draft.tokens.tolist()))
            return draft

        drafter.propose = record
        return drafter
