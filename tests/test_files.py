"""Files appear whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from specattn.files import check_folder_writable, check_writable, keep, write_atomically
from tests.forks import fork


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


def test_a_cache_that_cannot_be_written_is_named_once(tmp_path):
    path = tmp_path / "kind" / "name"
    keep(tmp_path, path, lambda partial: partial.write_text("kept"))

    def full_disk(partial):
        partial.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def put():
        for kind in ("kind", "other"):
            keep(tmp_path, tmp_path / kind / "name", full_disk)
        keep(path, path / "kind" / "name", full_disk)  # below a file

    with pytest.warns(UserWarning, match="cannot be written") as said:
        put()
    assert len(said) == 2
    for cache, one in zip((tmp_path, path), said, strict=True):
        assert f"the cache {cache} cannot be written" in str(one.message)
    assert "No space left on device" in str(said[0].message)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    assert path.read_text() == "kept"


def test_a_write_that_makes_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "out.json", lambda partial: None)


def test_processes_do_not_share_a_partial_file(tmp_path):
    """A second process writes the same path while the first is in the middle of its own."""
    path = tmp_path / "out.json"

    def write(partial):
        partial.write_text("ours")
        fork(lambda: write_atomically(path, lambda partial: partial.write_text("theirs")))
        assert path.read_text() == "theirs"

    write_atomically(path, write)
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "out.json", tmp_path / "link.json"
    link.symlink_to("there/out.json")
    for text in ("first", "second"):  # the first makes what the link leads to
        write_atomically(link, lambda partial, text=text: partial.write_text(text))
        assert link.is_symlink()
        assert target.read_text() == text
        assert not target.is_symlink()
    assert {path.name for path in tmp_path.rglob("*")} == {"there", "out.json", "link.json"}


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "private"
    path.write_text("old")
    path.chmod(0o600)
    write_atomically(path, lambda partial: partial.write_text("new"))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture(params=["pipe", "device", "folder", "link to a pipe"])
def irregular(request, tmp_path):
    """Return a path at which there is something, but no file."""
    if request.param == "device":
        return Path(os.devnull)
    path = tmp_path / "there"
    path.mkdir() if request.param == "folder" else os.mkfifo(path)
    if request.param == "link to a pipe":
        (tmp_path / "link").symlink_to(path)
        return tmp_path / "link"
    return path


def test_what_is_no_file_is_not_replaced(irregular):
    before = irregular.lstat()
    for refuse in (
        lambda: write_atomically(irregular, lambda partial: partial.write_text("new")),
        lambda: check_writable(irregular),
    ):
        with pytest.raises(ValueError, match=f"{irregular} is .* and is not replaced"):
            refuse()
    assert (irregular.lstat().st_mode, irregular.lstat().st_ino) == (before.st_mode, before.st_ino)


def test_whether_a_path_can_be_written_is_known_before(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    check_folder_writable(tmp_path / "new" / "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="folder .*none does not exist"):
        check_writable(tmp_path / "none" / "new")
    with pytest.raises(ValueError, match="file is not a folder"):
        check_folder_writable(tmp_path / "file" / "new")
    for check in (check_writable, check_folder_writable):
        with pytest.raises(ValueError, match="folder /proc cannot be written to"):
            check(Path("/proc/new"))
