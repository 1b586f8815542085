"""Every way decodes the text of SDPA from a filled cache, and ratios are over SDPA."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from studies import transformers_generate as study  # noqa: E402
from tests.decoding.models import prompts, tiny_model  # noqa: E402


@pytest.mark.parametrize("prefill", [False, True])
def test_rows(monkeypatch, prefill):
    monkeypatch.setattr(study, "CHUNK", 16)
    model, (prompt,) = tiny_model(), prompts([40])
    options = argparse.Namespace(new_tokens=4, repeats=2, prefill=prefill)
    rows = study.measure(model, prompt, options)
    assert [row["way"] for row in rows] == list(study.WAYS)
    assert all(row["same_text_as_sdpa"] for row in rows)
    assert all(row["seconds_per_token"]["median"] > 0 for row in rows)
    assert rows[0]["over_sdpa"] == {"decoding": 1, "prefill": 1 if prefill else None}
    assert len(study.table(rows).splitlines()) == 1 + len(rows)
