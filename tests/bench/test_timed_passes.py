"""The passes of a round, timed one by one: what is captured for it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from decoding import passes  # noqa: E402


class GraphWatch:
    """A stopwatch of a GPU, by which a replayed graph takes a tenth of its call."""

    device = torch.device("cuda")

    def __init__(self, refuses=False):
        self.refuses = refuses

    def prepare(self, call):
        if self.refuses:
            raise RuntimeError("not permitted when stream is capturing")
        return lambda: call() / 10

    def alternate(self, calls, *, budget):
        return {name: [call()] for name, call in calls.items()}


def test_of_a_rounds_parts_the_selection_alone_is_captured_by_itself():
    calls = {"verify": lambda: 7.0, "select": lambda: 0.5}
    times, eager = passes._times(calls, GraphWatch(), 1.0)
    assert times == {"verify": [7.0], "select": [0.05]}
    assert eager == {"select": [0.5]}
    times, eager = passes._times(calls, GraphWatch(refuses=True), 1.0)
    assert (times, eager) == ({"verify": [7.0], "select": [0.5]}, {})
