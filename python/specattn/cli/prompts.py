"""The texts that options name, read before anything is imported that takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specattn.cli.options import DecodingOptions

STDIN = Path("-")


def read_texts(options: DecodingOptions) -> dict[str, str]:
    """Return the texts by the names of their files; check what needs no tokenizer."""
    if options.prompt_tokens is not None and options.last_tokens is not None:
        raise ValueError("give --prompt-tokens or --last-tokens, not both")
    if options.system is not None and not options.chat:
        raise ValueError("--system is part of a chat: give --chat too")
    if options.chat and (options.prompt_tokens or options.last_tokens):
        raise ValueError("--chat reads whole messages: leave out --prompt-tokens and --last-tokens")
    if not options.prompt and not options.prompt_file:
        raise ValueError("what to continue is missing: give --prompt TEXT or --prompt-file FILE")
    for option in ("prompt", "system", "stop"):
        _check_utf8(f"--{option}", getattr(options, option))
    texts = dict[str, str]()
    for number, text in enumerate(options.prompt or (), start=1):
        if not text:
            raise ValueError("--prompt: expected text, got none")
        texts["--prompt" if len(options.prompt or ()) == 1 else f"--prompt {number}"] = text
    for file in options.prompt_file or ():
        name = _name(file)
        if name in texts:
            raise ValueError(f"--prompt-file: {file} is given twice")
        texts[name] = read_text(file, "--prompt-file")
    return texts


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


def read_text(path: Path, option: str) -> str:
    """Return the text of the file that `option` names; ``-`` is standard input."""
    if path != STDIN and not path.is_file():
        raise ValueError(f"{option}: {path} is not a file")
    name = _name(path)
    content = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option}: {name} is not UTF-8 text") from None
    if not text:
        raise ValueError(f"{option}: {name} is empty")
    return text


def _check_utf8(option: str, given: list[str] | str | None) -> None:
    """Refuse arguments with bytes that are no UTF-8, which Python hands on as surrogates."""
    for text in [given] if isinstance(given, str) else given or ():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{option}: expected UTF-8 text, got {text!r}") from None
