"""A suffix automaton in Python (Blumer and others, 1985), which grows token by token.

What csrc/cpu/suffix.h has, for where it is not built; the numbers are explained there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ROOT, ORDERED = 0, 16
_MOST_COUNTED = 128


@dataclass
class _State:
    """Substrings that end at the same places, the longest of `length` tokens; newest edge last."""

    length: int = 0
    link: int = -1
    count: int = 0
    edges: dict[int, int] = field(default_factory=dict)


class Automaton:
    """The states of a text."""

    def __init__(self) -> None:
        self.states, self.last = [_State()], ROOT

    def extend(self, token: int) -> list[tuple[int, int, bool]]:
        """Append a token; return of suffixes that occurred length, edges, and whether it followed.

        The longest comes first, the last one is the first that the token followed.
        """
        states, visited = self.states, []
        current, p = len(states), self.last
        states.append(_State(states[p].length + 1))
        while p >= 0 and token not in states[p].edges:
            if p not in (self.last, ROOT):
                visited.append((states[p].length, len(states[p].edges), False))
            states[p].edges[token] = current
            p = states[p].link
        if p < 0:
            states[current].link = ROOT
        else:
            if p != ROOT:
                visited.append((states[p].length, len(states[p].edges), True))
            q = states[p].edges[token]
            direct = states[q].length == states[p].length + 1
            states[current].link = q if direct else self._split(p, token, q)
            for s in self._links(p, -1):
                if len(edges := states[s].edges) > ORDERED:
                    edges[token] = edges.pop(token)
        self.last = current
        for s in self._links(current, ROOT):
            states[s].count += 1
        return visited

    def _links(self, s: int, end: int) -> Iterator[int]:
        for _ in range(_MOST_COUNTED):
            if s <= end:
                return
            yield s
            s = self.states[s].link

    def _split(self, p: int, token: int, q: int) -> int:
        """Give the substrings of q that also end here a state."""
        states, old = self.states, self.states[q]
        copy = len(states)
        states.append(_State(states[p].length + 1, old.link, old.count, dict(old.edges)))
        while p >= 0 and states[p].edges.get(token) == q:
            states[p].edges[token] = copy
            p = states[p].link
        old.link = copy
        return copy

    @property
    def match(self) -> int:
        """The state of the longest end that occurred before."""
        return max(self.states[self.last].link, ROOT)
