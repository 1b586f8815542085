"""docs/cli.md lists every option of the code; `python -m tests.cli.test_reference` writes it."""

import re
import textwrap
from pathlib import Path

import typer.main

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BLOCK = re.compile(r"(?<=```\n)specattn demo.*?\n(?=```)", re.DOTALL)


def commands(group, name):
    """Yield the words and the command of all below a group."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def spelled(parameter):
    """Return an argument or an option as a synopsis has it."""
    letter = parameter.metavar
    if parameter.param_type_name == "argument":
        word = letter
    else:
        options = "|".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.is_flag:
            letter = ""
        elif letter is None:  # one of some words
            letter = "|".join(parameter.type_descriptor.choices)
        word = f"{options} {letter}".rstrip()
    more = " ..." * bool(getattr(parameter, "multiple", False))
    return (word if parameter.required else f"[{word}]") + more


def synopsis():
    """Return a line, as long as it must be, for each command."""
    from specattn.cli import app

    lines = []
    for words, command in commands(typer.main.get_command(app), "specattn"):
        parts = [spelled(one) for one in command.params if one.name != "help"]
        whole = " ".join([words, *(part.replace(" ", "\0") for part in parts)])
        wrapped = textwrap.wrap(
            whole, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        lines += [line.replace("\0", " ") for line in wrapped]
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_option():
    (block,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert block == synopsis()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: synopsis(), text), encoding="utf-8")
