"""Tells drafted tokens from the target's own, in words and colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from specattn.decoding import Round

CORRECTED, OWN = "corrected", "own"
EARLIER = "earlier"  # of a run that went before: who drafted it is not known
TARGET: dict[str, tuple[str, str]] = {
    CORRECTED: ("underline", "the target's, in place of a rejected draft"),
    OWN: ("", "the target's, where no draft went that far"),
    EARLIER: ("dim", "of the run before"),
}
"""How tokens look that nobody drafted in this run, and what that means."""

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")


class Authors:
    """Who drafted the tokens of a run of `method`; each keeps one number, and so one colour."""

    def __init__(self, method: str):
        self.method = method
        self._numbers = {"suffix": 0, "vegas": 1}  # the same in every run of auto

    def number(self, name: str) -> int:
        """Return the number of a drafter, from 0."""
        return self._numbers.setdefault(name, len(self._numbers))

    def style(self, author: str) -> str:
        """Return how the terminal shows tokens of an author, as rich writes styles."""
        if author in TARGET:
            return TARGET[author][0]
        return _COLOURS[self.number(author) % len(_COLOURS)]

    def of_round(self, round: Round) -> list[str]:
        """Return the author of each of a round's tokens: a drafter, or a key of `TARGET`."""
        name = round.named(self.method)
        return [name if source == "drafted" else source for source in round.sources]

    def of_text(self, history: Iterable[Round], resumed_at: int = 0) -> list[str]:
        """Return the authors of a text of which an earlier run has made `resumed_at` tokens."""
        return [EARLIER] * resumed_at + [name for one in history for name in self.of_round(one)]

    @staticmethod
    def counts(authors: Sequence[str]) -> list[tuple[str, str, int]]:
        """Return the authors of a text, what that means, and how many tokens each has."""
        counts = Counter(authors).items()
        return [
            (author, TARGET[author][1] if author in TARGET else f"drafted by {author}", count)
            for author, count in sorted(counts, key=lambda item: (item[0] in TARGET, -item[1]))
        ]

    def legend(self, authors: Sequence[str]) -> Text:
        """Return what the colours of a text mean, and how many of its tokens have them."""
        text = Text()
        for author, meaning, count in self.counts(authors):
            text.append(f"{count:6d} {100 * count / len(authors):3.0f}%  ")
            text.append(meaning, self.style(author)).append("\n")
        text.right_crop(1)
        return text


class Pieces:
    """A text, token by token: what each adds to it, which is nothing inside a character."""

    def __init__(self, tokenizer: Any):
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer._tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def next(self, token: int) -> str:
        """Return what a token adds."""
        return self._stream.step(self._tokenizer, token) or ""
