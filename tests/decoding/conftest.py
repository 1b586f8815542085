"""Models that tests make by the hundred are held against ours once for each kind of them."""

import pytest

from specattn.decoding.passes import proving, replay

CHECKED = set()
OF_THAT = ("passes", "model")  # folders of tests of these comparisons


@pytest.fixture(autouse=True)
def _compared_once(request, monkeypatch, tmp_path_factory):
    """Let a process know what was found of models with the same code, configuration and shapes."""
    if request.path.parent.name in OF_THAT:
        return
    folder, check = tmp_path_factory.getbasetemp() / "proofs", replay._check
    monkeypatch.setattr(proving, "cache_named", lambda: folder)

    def once(target, runner):
        note = None if runner.captures else proving._note(target.model)
        kind = note, runner.how, target.cache.stored
        if kind not in CHECKED:
            check(target, runner)
        if note is not None:
            CHECKED.add(kind)

    monkeypatch.setattr(replay, "_check", once)
