"""The text that the embedded target reads: the standard library's own source.

Every Python installation carries it, so the model can be rebuilt, and prompts that it has never
seen can be chosen, without downloading anything. A file is held out by a hash of its path alone:
the split needs no list, and it stays the same when files are added or removed.
"""

import hashlib
import json
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

STDLIB = Path(sysconfig.get_path("stdlib"))
HELD_OUT_ONE_IN = 32

# Not the library's source (installed packages, this build's settings), or tables and fixtures that
# teach a small model nothing about code. They are in neither half of the split.
EXCLUDED = (
    "site-packages/*",
    "dist-packages/*",
    "ensurepip/_bundled/*",
    "_sysconfigdata*",
    "config-*",
    "pydoc_data/*",
    "encodings/cp*",
    "encodings/iso8859*",
    "encodings/koi8*",
    "encodings/mac_*",
    "html/entities.py",
    "lib2to3/tests/data/*",
)


def source_files(root=STDLIB):
    """List the corpus: every Python file under ``root`` but the excluded ones, sorted by path.

    Parameters
    ----------
    root : Path
        Folder of the standard library.

    Returns
    -------
    list of Path
    """
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return [root / name for name in names if not any(fnmatch(name, bad) for bad in EXCLUDED)]


def is_held_out(path, root=STDLIB):
    """Tell whether the model must never see ``path``: one file in 32, by the hash of its name."""
    name = path.relative_to(root).as_posix()
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def held_out_files(root=STDLIB, min_bytes=0, tests=True):
    """List files that neither the tokenizer nor the model has seen, longest first.

    Parameters
    ----------
    root : Path
        Folder of the standard library.
    min_bytes : int
        Leave out shorter files; the tokenizer makes about one token of 3.5 bytes.
    tests : bool
        Also list the library's own tests, which are its longest files.

    Returns
    -------
    list of Path
    """
    files = [path for path in source_files(root) if is_held_out(path, root)]
    files = [path for path in files if tests or "test" not in path.relative_to(root).as_posix()]
    files = [path for path in files if path.stat().st_size >= min_bytes]
    return sorted(files, key=lambda path: (-path.stat().st_size, path))


def training_files(root=STDLIB):
    """List the rest of the corpus."""
    return [path for path in source_files(root) if not is_held_out(path, root)]


def read_texts(files):
    """Read each file's text once; empty, repeated and non-UTF-8 ones are skipped."""
    texts = {}
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.setdefault(text, None)
    return list(texts)


def print_jsonl(files):
    """Print a JSON object for each text, as ``specattn train`` reads it."""
    for text in read_texts(files):
        print(json.dumps({"text": text}))


if __name__ == "__main__":
    if sys.argv[1:] == ["--jsonl", "training"]:
        print_jsonl(training_files())
    elif sys.argv[1:] == ["--jsonl", "held-out"]:
        print_jsonl(held_out_files())
    else:
        for held_out in held_out_files():
            print(f"{held_out.stat().st_size:8d}  {held_out.relative_to(STDLIB).as_posix()}")
