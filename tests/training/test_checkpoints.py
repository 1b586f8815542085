"""Which checkpoints a run can be resumed from, whatever moment it was killed in."""

import pytest

from specattn.training.checkpoints import checkpoints, is_complete
from tests.training.test_trainer import corpus, trainer  # noqa: F401 - a fixture


@pytest.fixture
def saved(tmp_path, corpus):  # noqa: F811
    trainer(tmp_path, corpus, max_steps=6).train()
    return tmp_path


def test_the_last_checkpoint_comes_first(saved):
    (saved / "checkpoint-11").mkdir()
    (saved / "checkpoint-notes").mkdir()
    found = checkpoints(saved)
    assert [path.name for path in found] == ["checkpoint-11", "checkpoint-6", "checkpoint-3"]
    assert [is_complete(path) for path in found] == [False, True, True]


def test_a_file_that_is_missing_or_cut_makes_it_incomplete(saved):
    """The very last byte may be the end of a line, which nobody misses."""
    last = checkpoints(saved)[0]
    for file in last.iterdir():
        if file.name in ("config.json", "training_args.bin"):  # read by nobody who resumes
            continue
        content = file.read_bytes()
        for length in (0, 1, len(content) // 2, len(content) - 2):
            file.write_bytes(content[:length])
            assert not is_complete(last), (file.name, length)
        file.unlink()
        assert not is_complete(last), file.name
        file.write_bytes(content)
        assert is_complete(last)
