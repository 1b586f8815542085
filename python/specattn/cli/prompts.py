"""The texts that a command continues: from files or standard input, whole or cut, plain or chat."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specattn.cli.options import DecodingOptions

STDIN = Path("-")


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes
    ----------
    file : str
        Where it comes from.
    tokens : list of int
        What is read of it.
    dropped : int
        Tokens that are not read.
    """

    file: str
    tokens: list[int]
    dropped: int = 0


def read_texts(options: DecodingOptions) -> dict[str, str]:
    """Return the texts by the names of their files; check what needs no tokenizer."""
    if options.prompt_tokens is not None and options.last_tokens is not None:
        raise ValueError("give --prompt-tokens or --last-tokens, not both")
    if options.system is not None and not options.chat:
        raise ValueError("--system is part of a chat: give --chat too")
    if options.chat and (options.prompt_tokens or options.last_tokens):
        raise ValueError("--chat reads whole messages: leave out --prompt-tokens and --last-tokens")
    files = options.prompt_file
    for file in files:
        if files.count(file) > 1:
            raise ValueError(f"--prompt-file: {file} is given twice")
    return {
        "standard input" if file == STDIN else str(file): read_text(file, "--prompt-file")
        for file in files
    }


def read_text(path: Path, option: str) -> str:
    """Return the text of the file that `option` names; ``-`` is standard input."""
    if path == STDIN:
        content = sys.stdin.buffer.read()
    elif path.is_file():
        content = path.read_bytes()
    else:
        raise ValueError(f"{option}: {path} is not a file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option}: {path} is not UTF-8 text") from None
    if not text:
        raise ValueError(f"{option}: {path} is empty")
    return text


def tokenize(texts: dict[str, str], tokenizer: Any, options: DecodingOptions) -> list[Prompt]:
    """Return the prompts in the order of their files.

    Raises
    ------
    ValueError
        A chat is asked for that the tokenizer has no template of, or a text has no token.
    """
    prompts = []
    for file, text in texts.items():
        if options.chat:
            # The template writes the special tokens itself.
            ids = tokenizer(_chat(text, tokenizer, options), add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(text)["input_ids"]
        if not ids:
            raise ValueError(f"--prompt-file: {file} gives no token")
        read = ids[: options.prompt_tokens]
        if options.last_tokens is not None:
            read = ids[-options.last_tokens :]
        prompts.append(Prompt(file, read, len(ids) - len(read)))
    return prompts


def _chat(text: str, tokenizer: Any, options: DecodingOptions) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the model's tokenizer has no chat template")
    messages = [{"role": "user", "content": text}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    chat: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return chat
