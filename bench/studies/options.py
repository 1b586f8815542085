"""The command line of `run_decoding.py`, and what it asks to be measured."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from common import arguments
from decoding import models, pictures
from decoding.cases import PLAIN, TRANSFORMERS, Entry, grid

from specattn.decoding import METHODS, Vegas

from .papers import PROFILES
from .sections import Scale, Section
from .suites import SUITES, suite

DEFAULTS: dict[bool, dict[str, Any]] = {
    False: {"context": [4096, 16384], "temperature": [0.0, 1.0], "new_tokens": 128}
    | {"texts": 2, "repeats": 3},
    True: {"context": [1024], "temperature": [0.0], "new_tokens": 32} | {"texts": 1, "repeats": 2},
}
SHORT = 512  # tokens of a paper's short prompts
LONG = {"tokenswift": 4096}  # where a suite's long prompts are not the longest of the usual ones
TRAINED = {
    "longspec": ("longspec",),
    "tokenswift": ("tokenswift", "medusa"),
    "poss": ("poss",),
}


def parser(description: str) -> arguments.Parser:
    """Return the parser; what is left open is None until `complete`."""
    parser = arguments.Parser(prog="run_decoding.py", description=description)
    add = parser.add_argument
    known = ", ".join([*METHODS, TRANSFORMERS])
    add("--model", type=Path, metavar="FOLDER", help="checkpoint; default: the embedded target")
    add("--prompt", type=Path, action="append", metavar="FILE", help="UTF-8 text; may be repeated")
    add(
        "--method",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"of {known}; may be repeated. plain and {TRANSFORMERS} are always measured",
    )
    add("--no-peer", dest="peer", action="store_false", help=f"leave {TRANSFORMERS} out")
    add("--context", type=arguments.numbers, metavar="N[,N]", help="prompt tokens, such as 4k,16k")
    add("--batch", type=arguments.numbers, metavar="B[,B]", default=[1], help="requests")
    add("--temperature", type=temperatures, metavar="T[,T]", help="0 is greedy")
    add("--new-tokens", type=arguments.number, metavar="N", help="per request and run")
    add("--texts", type=arguments.number, metavar="N", help="different texts per row")
    add("--repeats", type=arguments.number, metavar="N", help="timed runs per text")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=models.DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--suite", metavar="PAPER", help=f"the tables of {', '.join(SUITES)}, theirs beside ours")
    add("--shape", choices=models.CONFIGS, help="a real model's shape, without its weights")
    add("--random-weights", action="store_true", help="needed with --shape: says what it is")
    add("--acceptance", metavar="PROFILE", help=f"{', '.join(PROFILES)}, or rates such as 0.9,0.8")
    add("--layers", type=arguments.number, metavar="N", help="fewer layers than the shape has")
    add("--passes", action="store_true", help="also time the passes of a round one by one")
    add("--budget", type=arguments.positive, default=2.0, metavar="S", help="seconds for passes")
    add("--quick", action="store_true", help="one short greedy row per method")
    add("--json", type=Path, metavar="FILE", help="write JSON Lines")
    add("--resume", action="store_true", help="keep the rows that --json FILE has")
    add("--compare", type=Path, nargs=2, metavar="FILE", help="what became slower from A to B")
    add("--pictures", type=Path, metavar="FOLDER", help="draw the rows as PNG")
    return parser


def complete(options: argparse.Namespace) -> None:
    """Fill what was left open.

    Raises
    ------
    ValueError
        Options that do not fit together.
    """
    for name, value in DEFAULTS[options.quick].items():
        if getattr(options, name) is None:
            if options.suite is not None and name == "context":
                value = [min(LONG.get(options.suite, value[-1]), value[-1])]
            setattr(options, name, value)
    shape = options.shape is not None
    if shape != options.random_weights or shape != (options.acceptance is not None):
        raise ValueError("--shape, --random-weights and --acceptance belong together")
    if options.layers and not shape:
        raise ValueError("--layers needs --shape")
    if shape and (options.prompt or options.model):
        raise ValueError("--shape has random weights and reads no --model and no --prompt")
    if options.new_tokens < 2:
        raise ValueError(f"--new-tokens: expected 2 or more, got {options.new_tokens}")
    options.model = options.model or models.EMBEDDED_TARGET


def sections(options: argparse.Namespace) -> list[Section]:
    """Return what is to be measured: a paper's tables, or one table of everything asked for.

    Raises
    ------
    ValueError
        A method, an option of it, or a suite that does not exist here.
    """
    given = [Entry.parse(text) for text in options.method]
    names = [entry.name for entry in given]
    if options.suite:
        if len(options.context) > 1:
            raise ValueError("--suite takes one --context, that of its long prompts")
        for method in () if options.shape else TRAINED.get(options.suite, ()):
            if not (method in names or models.has_drafter(options.model, method)):
                raise ValueError(
                    f"--suite {options.suite}: {options.model} has no drafter in a folder "
                    f"'{method}'; train one, or name one with --method {method}:drafter=FOLDER"
                )
        long = options.context[0]
        return suite(options.suite, Scale(min(SHORT, long), long, tuple(given)))
    if not set(names) - {PLAIN, TRANSFORMERS}:
        given.append(Entry("vegas"))
        if options.shape is None and models.has_drafter(options.model, "longspec"):
            given.append(Entry("longspec"))
    baselines = [Entry(PLAIN)] + [Entry(TRANSFORMERS)] * options.peer
    given = [entry for entry in baselines if entry.name not in names] + given
    for entry in given:
        if entry.name != TRANSFORMERS:
            entry.build({})
    groups = grid(given, options.context, options.batch, options.temperature)
    gamma = next((e.options.get("gamma") for e in given if e.name == "vegas"), None) or Vegas.gamma
    timed = gamma if options.passes else 0
    return [Section("", "", groups, passes=timed, pictures=pictures.KINDS)]


def temperatures(text: str) -> list[float]:
    """Parse ``0,1``: finite numbers from 0."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value < math.inf for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 such as 0,1, got '{text}'")
    return values
