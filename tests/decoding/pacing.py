"""What a pacer is told in tests, in place of what a clock says."""

import numpy as np

from specattn.decoding.drafting import pacer
from specattn.decoding.drafting.costs import Costs
from specattn.decoding.drafting.gains import NONE
from specattn.decoding.drafting.pacer import Choice, Pacer


def with_costs(monkeypatch, seconds):
    """Let passes of so many rows of a request take `seconds(rows)`, and drafts nothing."""

    def passes(self, kind, sizes):
        return np.array([seconds(rows) for rows in sizes.tolist()], dtype=float)

    def rounds(self, share):
        return np.tile(self.passes(share.kind, share.sizes), (len(share.efforts), 1))

    monkeypatch.setattr(Pacer, "passes", passes)
    monkeypatch.setattr(Costs, "plain", lambda self, requests: seconds(1))
    monkeypatch.setattr(Pacer, "seconds", rounds)
    monkeypatch.setattr(pacer, "AGAIN", 0.0)


def with_free_rows(monkeypatch):
    """Let all that may be drafted cost nothing."""
    with_costs(monkeypatch, lambda rows: 1.0)


def with_whims(monkeypatch, state):
    """Let anybody draft anything, as a random generator says; what is looked up, too."""
    with_costs(monkeypatch, lambda rows: 10 ** state.uniform(-3, 0) if rows <= 13 else np.inf)

    def choose(self, depth, rows=1, promised=()):
        share = None if self.resting else state.choice([None, *self.shares])
        efforts = [] if share is None else [e for e in share.efforts if e.depth <= depth]
        if not efforts:
            return Choice(None, NONE, rows, 1.0, 1.0)
        alone = state.choice([1.5, np.inf])
        return Choice(share.title, state.choice(efforts), 1, 1.0, 1.0, alone)

    def prepare(self, root, real=Pacer.prepare):
        real(self, root)
        self.resting = state.random() < 0.2

    monkeypatch.setattr(Costs, "plain", lambda self, requests: 1.0)
    monkeypatch.setattr(Pacer, "choose", choose)
    monkeypatch.setattr(Pacer, "_known", lambda self: object())  # costs hold for no round
    monkeypatch.setattr(Pacer, "prepare", prepare)
