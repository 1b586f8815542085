"""Atomic writes of files and folders, and the folder of caches."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_unwritable = set[Path]()  # caches of which was warned


def cache_folder() -> Path:
    """Return ``SPECATTN_CACHE``, or this package's part of the user's folder for caches."""
    if (named := cache_named()) is not None:
        return named
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specattn"


def cache_named() -> Path | None:
    """Return the folder that ``SPECATTN_CACHE`` names, if it names one."""
    named = os.environ.get("SPECATTN_CACHE")
    return Path(named) if named else None


def keep(cache: Path, path: Path, write: Callable[[Path], object]) -> None:
    """Write a file below a cache as `write_atomically` does, and make the folders that it needs.

    A cache holds only what can be found out again: one that cannot be written ends no run, and one
    warning says so.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
    except (OSError, ValueError) as error:
        if cache not in _unwritable:
            _unwritable.add(cache)
            warnings.warn(
                f"specattn: the cache {cache} cannot be written, so later processes find out again "
                f"what it lacks: {error}",
                stacklevel=2,
            )


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write all of a file, or leave what was there.

    A process may be killed at any time, and several may write to the same folder, which exists.
    ``write(partial)`` makes the file under another name in it; what it raises is raised, and
    nothing is left behind. Of a symbolic link, the file that it leads to is replaced. Raises
    ValueError where `path` is a folder, a device, a pipe or a socket.
    """
    _check_regular(path)
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    except OSError as error:
        if error.filename == str(partial):  # a name that the user has not given
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path`, renamed to it at the end; of a failure nothing stays.

    Raises ValueError where `path` exists, or cannot be written.
    """
    from safetensors import SafetensorError  # not every user of this file has it

    partial = path.with_name(f".{path.name}.partial")
    if path.exists():
        raise ValueError(f"{path} exists, and is not replaced")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.absolute().parent} is not a folder")
    try:
        partial.mkdir()
    except FileExistsError:
        raise ValueError(f"{partial} is of a run that was killed, or goes on: remove it") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
    try:
        yield partial
        partial.rename(path)
    except (OSError, SafetensorError) as error:  # a full disk, most of all
        raise ValueError(f"{path} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Raise ValueError unless `write_atomically` can write to `path`: before hours of work."""
    _check_regular(path)
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise ValueError(f"folder {folder} does not exist")
    _check_folder(folder)


def check_folder_writable(folder: Path) -> None:
    """Raise ValueError unless files can be written into a folder, or where it would be created."""
    existing = Path(os.path.realpath(folder))
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{existing} is not a folder")
    _check_folder(existing)


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ValueError(f"{path} is {kind}, and is not replaced")


def _check_folder(folder: Path) -> None:
    try:  # Permissions alone do not say it, for the superuser least of all.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be written to: {error.strerror}") from None
