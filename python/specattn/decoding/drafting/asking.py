"""Whether a text is worth asking: what lookups are expected to save, against what they take.

It changes no text: whether a round looks up is settled before any of its tokens is drawn, by the
clock and by the text so far.
"""

from __future__ import annotations

from typing import Any

from specattn.decoding.drafting.costs import Timings
from specattn.decoding.text.statistics import Clock

_REMEMBERED = 32  # lookups over which savings are averaged
_PATIENCE = 12  # lookups in a row that did not pay: none is left out yet
_STEP = 4  # each so many more leave out one more between two lookups ...
_MOST_LEFT_OUT = 7  # ... up to so many
_TIMED = 4  # one lookup of so many is timed


class Asking:
    """Says before every round whether to look up what followed the text's end before.

    A round calls `skips`; if that is false, `begin`, `found` with what was looked up, and `end`
    when all is done that a round without a lookup does without; the same around what it learns.

    Parameters
    ----------
    clock : Clock
        On CUDA a time is read when it has passed; nothing waits for it.

    Attributes
    ----------
    left_out : int
        Rounds since the last lookup.
    """

    def __init__(self, clock: Clock):
        self.clock, self.left_out = clock, 0
        self._times = Timings(clock)
        self._saved = 0.0  # seconds per lookup
        self._lookups = self._in_vain = 0
        self._worthless = False  # the last one
        self._begun: Any = None

    def skips(self) -> bool:
        """Whether the round that begins does without a lookup, and count it if so."""
        most = min((self._in_vain - _PATIENCE) // _STEP, _MOST_LEFT_OUT)
        if not self._worthless or self.left_out >= most:
            return False
        self.left_out += 1
        return True

    def begin(self) -> None:
        """Note that something begins which only lookups need."""
        self._begun = self.clock.now() if self._lookups % _TIMED == 0 else None

    def end(self, what: str) -> None:
        """Note that `what` is done, be it "asked" or "learned"."""
        if self._begun is not None:
            self._times.note(what, self._begun, self.clock.now())
            self._begun = None

    def found(self, saved: float) -> None:
        """Note what a lookup is expected to save, in seconds: 0 where it drafts nothing."""
        self.left_out = 0
        self._lookups += 1
        seconds = sum(self._times.medians.values())
        self._worthless = saved <= seconds
        self._saved += (saved - self._saved) / min(self._lookups, _REMEMBERED)
        self._in_vain = 0 if self._saved > seconds else self._in_vain + 1
