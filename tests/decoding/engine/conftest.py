"""What is recorded and captured in tests of an engine."""

import pytest

from specattn.blocks.programs import _Captured
from specattn.blocks.recorder import Recorder
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.graphs import GraphRunner
from tests.decoding.tape import TapeGraph


@pytest.fixture
def recordings(monkeypatch):
    """Return a list that every recording, and every capture, adds to."""
    made = []
    for kind in (Recorder, _Captured):

        def record(self, program, inputs, own=kind.record):
            made.append(type(self))
            return own(self, program, inputs)

        monkeypatch.setattr(kind, "record", record)
    return made


@pytest.fixture
def captured(monkeypatch):
    """Let targets capture graphs, as they do on a GPU."""
    monkeypatch.setattr(
        Target, "_runner", lambda self, model: GraphRunner(model.model, lambda: TapeGraph)
    )
