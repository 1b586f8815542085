"""A checkpoint as an engine: plain decoding on this machine, and what its logits say."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.conform.endpoint import Answer, Place, Request
from specattn.decoding import generate

_LISTED = 50  # a server's token is seldom further down, and then it is no near-tie


class Local:
    """A loaded model, decoded token by token without drafts."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str):
        self.model, self.tokenizer, self.name = model, tokenizer, name

    def answer(self, prompt: str, request: Request) -> Answer:
        """Continue a prompt greedily; raises ValueError for another temperature."""
        if request.temperature:
            raise ValueError("a checkpoint is held against a server greedily: seeds differ")
        ids = self.tokenizer(prompt).input_ids
        count = request.new_tokens
        found = generate(
            self.model,
            [ids],
            "plain",
            temperature=0.0,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
        )
        new = found.new_tokens[0]
        with torch.no_grad():
            text = torch.tensor([ids + new[:-1]], device=self.model.device)
            logits = self.model(text, use_cache=False, logits_to_keep=len(new)).logits[0]
        likely = logits.float().log_softmax(-1)
        places = [self._place(new, n, row) for n, row in enumerate(likely)]
        return Answer(self.tokenizer.decode(new, skip_special_tokens=True), tuple(places))

    def _place(self, new: list[int], number: int, likely: torch.Tensor) -> Place:
        best = likely.topk(min(_LISTED, len(likely)))
        listed = {
            self._added(new, number, token): value
            for value, token in reversed(list(zip(*map(torch.Tensor.tolist, best), strict=True)))
        }
        token = new[number]
        return Place(self._added(new, number, token), likely[token].item(), listed)

    def _added(self, new: list[int], number: int, token: int) -> str:
        """Return what a token adds to the text: the one before says whether a space begins it."""
        before = new[number - 1 : number]
        start = self.tokenizer.decode(before)
        return self.tokenizer.decode([*before, token])[len(start) :]
