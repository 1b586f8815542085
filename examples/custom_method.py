"""A decoding method of one's own, in one file: draft the tokens that last followed each token.

    python examples/custom_method.py

A method is two classes. The description holds the options; the drafter proposes a tree behind the
last committed token and learns from every verification. The loop verifies, accepts and commits, so
whatever the drafter proposes, the text is that of plain decoding.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import Draft, DraftContext, Drafter, Method, Verified, generate
from specattn.tree import Tree

PROMPT = "def first(items):\n    return items[0]\n\n\ndef last(items):\n    return items[-1]\n\n\n"


@dataclass(frozen=True)
class Successors(Method, name="successors"):
    """Draft `gamma` tokens, each the one that followed its predecessor last time."""

    gamma: int = 4

    @property
    def max_nodes(self) -> int:
        """The root and the drafted tokens: room that the cache must have."""
        return 1 + self.gamma

    def start(self, context: DraftContext) -> Drafter:
        """Return the drafter of one run."""
        return SuccessorsDrafter(self.gamma, context)


class SuccessorsDrafter(Drafter):
    """One table for all requests, filled by the prompts and by what is accepted."""

    def __init__(self, gamma: int, context: DraftContext):
        device = context.target.device
        self.tree = Tree.chain(gamma, device=device)
        self.next = torch.zeros(context.target.model.config.vocab_size, dtype=torch.int64)
        self.next = self.next.to(device)
        for prompt in context.sequences.prompts:
            self.next[prompt[:-1]] = prompt[1:].to(device)

    def propose(self, root: torch.Tensor) -> Draft:
        """Follow the table from the last committed token of every request, [B]."""
        tokens = [root]
        for _ in range(self.tree.size - 1):
            tokens.append(self.next[tokens[-1]])
        return Draft(self.tree, torch.stack(tokens, 1))

    def observe(self, verified: Verified) -> None:
        """Learn what the target puts after every verified token, accepted or not."""
        self.next[verified.draft.tokens] = verified.result.logits.argmax(-1)


def main() -> None:
    """Decode with the method by its name, as the command line could, and with none."""
    folder = Path(__file__).parent / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    plain = generate(model, prompt, "plain", temperature=0, max_new_tokens=64)
    own = generate(model, prompt, "successors:gamma=3", temperature=0, max_new_tokens=64)
    print(tokenizer.decode(own.new_tokens[0]))
    print(f"tokens per pass of the target: {own.statistics.total.mean_acceptance_length:.2f}")
    print(f"equals plain greedy: {own.new_tokens == plain.new_tokens}")


if __name__ == "__main__":
    main()
