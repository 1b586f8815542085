"""Files appear whole or not at all."""

import os
import subprocess
import sys

import pytest

from specattn.files import write_atomically


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")

    def write(partial):
        partial.write_text("new, ")
        with partial.open("a") as file:
            file.write("whole")
        assert partial.parent == tmp_path  # a name cannot be moved from one file system to another
        assert path.read_text() == "old"

    write_atomically(path, write)
    assert path.read_text() == "new, whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [None, "old"], ids=["new", "replaced"])
def test_a_failed_write_leaves_nothing_behind(tmp_path, before, error):
    path = tmp_path / "out.json"
    if before is not None:
        path.write_text(before)

    def write(partial):
        partial.write_text("half")
        raise error

    with pytest.raises(error):
        write_atomically(path, write)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_write_that_makes_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "out.json", lambda partial: None)


def test_processes_do_not_share_a_partial_file(tmp_path):
    """A second process writes the same path while the first is in the middle of its own."""
    path = tmp_path / "out.json"
    other = (
        "import sys; from pathlib import Path; from specattn.files import write_atomically\n"
        "write_atomically(Path(sys.argv[1]), lambda partial: partial.write_text('theirs'))"
    )

    def write(partial):
        partial.write_text("ours")
        subprocess.run([sys.executable, "-c", other, path], check=True, env=os.environ.copy())
        assert path.read_text() == "theirs"

    write_atomically(path, write)
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]
