"""Where results go: files, and ``-`` for standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specattn.cli.errors import naming
from specattn.cli.terminal import output, write_pieces
from specattn.files import check_writable, write_atomically

STDOUT = Path("-")


def check_outputs(**files: Path | None) -> None:
    """See that all that is given can be written, once; the names are those of the options.

    A command with files to write goes on where the reader of its output has left.
    """
    options = dict[Path, str]()
    for option, file in files.items():
        if file is not None and file != STDOUT:
            with naming(f"--{option}"):
                check_writable(file)
                if (other := options.setdefault(file.resolve(), option)) != option:
                    raise ValueError(f"{file} is the file of --{other} too")
    output.outlives = bool(options)


def write_json(content: dict[str, Any], file: Path) -> None:
    """Write `content` to a file, or to standard output as ``-``."""
    text = json.dumps(content, indent=2, default=str) + "\n"
    if file == STDOUT:
        write_pieces([text])
    else:
        write_atomically(file, lambda partial: partial.write_text(text, encoding="utf-8"))
