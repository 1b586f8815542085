"""Measure decoding methods: tokens per second, what was accepted, where the time goes.

    python bench/run_decoding.py --quick
    python bench/run_decoding.py --method vegas:gamma=6 --context 4k,16k --temperature 0,1
    python bench/run_decoding.py --peer vllm --peer llama.cpp --temperature 0 --context 512,4k
    python bench/run_decoding.py --suite vegas --json vegas.jsonl --pictures out
    python bench/run_decoding.py --wide qwen3-0.6b --dtype bfloat16 --context 1k,4k,16k
    python bench/run_decoding.py --wide qwen3-0.6b --dtype bfloat16 --quantize int8
    python bench/run_decoding.py --shape llama-3.1-8b --random-weights --acceptance vegas-qwen3-8b

`docs/benchmarks.md` says how to read the tables, `bench/README.md` names every JSON field.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import arguments, comparison
from common.machine import disturbed
from decoding import columns, models, pictures
from decoding.cases import PEERS, PLAIN, TRANSFORMERS, Entry, grid
from decoding.measure import MeasurePlan
from decoding.peers.engines import ENGINES
from decoding.peers.process import Peers
from decoding.sections import Section
from decoding.session import Session, begun, verdict
from decoding.texts import Files, RandomTokens, held_out_files
from studies.papers import GROUNDED, SUITES, Scale, suite

from specattn.decoding import METHODS, Vegas
from specattn.decoding.engine.target import KV_DTYPES
from specattn.decoding.model.quantised import QUANTIZE, quantised
from specattn.planning import PROFILES, AcceptanceProfile
from specattn.planning.models import EMBEDDED_TARGET

# What is measured when the command line does not say; thorough and quick.
DEFAULTS: dict[bool, dict[str, Any]] = {
    False: {"context": [4096, 16384], "temperature": [0.0, 1.0], "new_tokens": 128}
    | {"texts": 2, "repeats": 3},
    True: {"context": [1024], "temperature": [0.0], "new_tokens": 32} | {"texts": 1, "repeats": 2},
}
SHORT = 512  # tokens of a paper's short prompts
# Where a suite's long prompts are not the longest of the usual ones.
LONG = {"tokenswift": [4096], "grounded": [4096, 8192, 16384, 31744]}
TRAINED = {"longspec": ("longspec",), "tokenswift": ("tokenswift", "medusa"), "poss": ("poss",)}
_SETUP = ", ".join(f"{name} needs `make {one.target}`" for name, one in ENGINES.items())
# What a widened target is measured with unless methods are named.
ON_WIDE = ("auto", "suffix", "vegas", "longspec", "poss", "eagle3", "tokenswift", "medusa")
DRAFTING = {"vegas": {"gamma": 6}}  # a row is about the method, also where it does not pay


def main(argv: list[str] | None = None) -> int:
    """Measure; return 0 when all is right, 1 for a fault, 2 for bad arguments, 130 cut short."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.compare:
        with parser.refusing("--compare: "):
            return comparison.show(*options.compare)
    device = arguments.device(options.device, parser)
    options.device = device.type
    with parser.refusing():
        _complete(options)
        sections = _sections(options)
        session = _session(options, sections, device)
        session.check_texts(sections)
        file = begun(options.json, session.record(), resume=options.resume)
    note = session.note
    columns.say(session.heading(sections, file.records[-1]), note)
    try:
        with session.peers:
            session.measure(sections, file)
    except KeyboardInterrupt:
        kept = f"interrupted; {len(file.rows)} rows are kept"
        hint = f", go on with --resume --json {file.path}" if file.path else ""
        print(columns.lines(kept + hint, note), file=sys.stderr)
        return 130
    rows = file.rows
    for said, alike in columns.by_note(rows).items():
        for text in (columns.table(alike), columns.acceptance(alike), columns.differences(alike)):
            if text:
                columns.say("\n" + text, said)
    if options.pictures:
        session.draw(sections, file, options.pictures)
    if text := disturbed(rows):
        columns.say("\n" + text, note)
    faults = verdict(rows)
    for text in faults:
        print(columns.lines(text, note), file=sys.stderr)
    return int(bool(faults))


def _parser() -> arguments.Parser:
    """Return the parser; what is left open is None until `_complete`."""
    description = (__doc__ or "").splitlines()[0]
    parser = arguments.Parser(prog="run_decoding.py", description=description)
    add = parser.add_argument
    method, peer = "NAME[:OPTION=VALUE,...]", "NAME[:OPTION=VALUE]"
    known = ", ".join([*METHODS, TRANSFORMERS])
    known = f"of {known}; may be repeated. plain is always measured"
    others = f"of {', '.join(PEERS)}; may be repeated; default: {TRANSFORMERS}. {_SETUP}"
    add("--model", type=Path, metavar="FOLDER", help="checkpoint; default: the embedded target")
    add("--prompt", type=Path, action="append", metavar="FILE", help="UTF-8 text; may be repeated")
    add("--method", action="append", default=[], metavar=method, help=known)
    add("--peer", action="append", metavar=peer, help=others)
    add("--no-peer", dest="peer", action="store_const", const=[], help="leave all peers out")
    add("--context", type=arguments.numbers, metavar="N[,N]", help="prompt tokens, such as 4k,16k")
    add("--batch", type=arguments.numbers, metavar="B[,B]", default=[1], help="requests")
    add("--temperature", type=arguments.temperatures, metavar="T[,T]", help="0 is greedy")
    add("--new-tokens", type=arguments.number, metavar="N", help="per request and run")
    add("--texts", type=arguments.number, metavar="N", help="different texts per row")
    add("--repeats", type=arguments.number, metavar="N", help="timed runs per text")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=models.DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--quantize", choices=QUANTIZE, help="weights of linear layers in fewer bits")
    add("--kv-dtype", choices=KV_DTYPES, help="elements of the cache, else those of --dtype")
    add("--suite", metavar="NAME", help=f"the tables of {', '.join(SUITES)}, papers' beside ours")
    add("--wide", choices=models.WIDE_SHAPES, help="the embedded target in a real model's sizes")
    add("--shape", choices=models.SHAPES, help="a real model's shape, without its weights")
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


def _complete(options: argparse.Namespace) -> None:
    """Fill what was left open; raises ValueError for options that do not fit together."""
    for name, value in DEFAULTS[options.quick].items():
        if getattr(options, name) is None:
            if options.suite is not None and name == "context" and not options.quick:
                value = LONG.get(options.suite, value[-1:])
            setattr(options, name, value)
    shape = options.shape is not None
    for wrong, message in (
        (
            shape != options.random_weights or shape != (options.acceptance is not None),
            "--shape, --random-weights and --acceptance belong together",
        ),
        (options.layers and not shape, "--layers needs --shape"),
        (
            shape and (options.prompt or options.model),
            "--shape has random weights and reads no --model and no --prompt",
        ),
        (options.wide and (shape or options.model), "--wide is a model: no --model, no --shape"),
        (shape and (options.quantize or options.kv_dtype), "--shape: no --quantize, no --kv-dtype"),
        (options.new_tokens < 2, f"--new-tokens: expected 2 or more, got {options.new_tokens}"),
    ):
        if wrong:
            raise ValueError(message)
    if options.wide:
        options.model = models.widened(options.wide)
    options.model = options.model or EMBEDDED_TARGET


def _sections(options: argparse.Namespace) -> list[Section]:
    """Return a paper's tables or one of all that is asked; raises ValueError for what is not."""
    given = [Entry.parse(text) for text in options.method]
    peers = [Entry.parse_peer(text) for text in _peers(options)]
    names = [entry.name for entry in given]
    if options.suite:
        if len(options.context) > 1 and options.suite != GROUNDED:
            raise ValueError("--suite takes one --context, that of its long prompts")
        if options.suite == GROUNDED and options.shape:
            raise ValueError("--suite grounded needs a model that reads its texts, no --shape")
        for method in () if options.shape else TRAINED.get(options.suite, ()):
            if not (method in names or (options.model / method).is_dir()):
                raise ValueError(
                    f"--suite {options.suite}: {options.model} has no drafter in a folder "
                    f"'{method}'; train one, or name one with --method {method}:drafter=FOLDER"
                )
        long = options.context[0]
        scale = Scale(min(SHORT, long), long, tuple(given), tuple(options.context))
        return suite(options.suite, scale)
    if not set(names) - {PLAIN, TRANSFORMERS} and options.wide:
        given += [Entry(name) for name in ON_WIDE if _has_what_it_needs(name, options.model)]
    elif not set(names) - {PLAIN, TRANSFORMERS}:
        given.append(Entry("vegas"))
        if options.shape is None and (options.model / "longspec").is_dir():
            given.append(Entry("longspec"))
    given = [entry for entry in (Entry(PLAIN), *peers) if entry.name not in names] + given
    for entry in given:
        if entry.is_ours:
            entry.build({})
    groups = grid(given, options.context, options.temperature, options.batch)
    gamma = next((e.options.get("gamma") for e in given if e.name == "vegas"), None)
    timed = (gamma or Vegas.most_gamma) if options.passes else 0
    return [Section("", "", groups, passes=timed, pictures=pictures.KINDS)]


def _has_what_it_needs(method: str, folder: Path) -> bool:
    """Return whether a drafter lies in the model's folder, where a method needs one."""
    return method not in models.DRAFTERS or (folder / method).is_dir()


def _peers(options: argparse.Namespace) -> list[str]:
    """Return the peers asked for, once each; raises ValueError where one cannot take part."""
    usual = [] if options.kv_dtype else [TRANSFORMERS]
    asked = usual if options.peer is None else list(dict.fromkeys(options.peer))
    if options.kv_dtype and TRANSFORMERS in asked:
        raise ValueError(f"--peer {TRANSFORMERS}: expected no --kv-dtype: it takes our cache over")
    for name in {text.partition(":")[0] for text in asked} & ENGINES.keys():
        dtypes = ENGINES[name].dtypes
        for wrong, expected in (
            (options.suite or options.shape, "no --suite and no --shape"),
            (options.temperature != [0], "--temperature 0: it decodes greedily here"),
            (options.batch != [1], "--batch 1"),
            (options.device != "cpu", "--device cpu"),
            ((options.dtype or "float32") not in dtypes, f"--dtype {' or '.join(dtypes)}"),
        ):
            if wrong:
                raise ValueError(f"--peer {name}: expected {expected}")
    return asked


def _session(
    options: argparse.Namespace, sections: Sequence[Section], device: torch.device
) -> Session:
    """Build the model and what is read with it."""
    plan = MeasurePlan(options.new_tokens, options.texts, options.repeats, options.seed)
    dtype = models.DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    torch.manual_seed(options.seed)
    longest = max((g.context for s in sections for g in s.groups), default=0) + plan.new_tokens
    name = str(dtype).removeprefix("torch.")
    peers = Peers(options.model, name, torch.get_num_threads(), longest)
    rest = (options.budget, options.suite, peers)
    if options.shape is None:
        model, tokenizer = models.checkpoint(options.model, dtype, device)
        files = Files(tokenizer, options.prompt or held_out_files())
        name = f"wide {options.wide}" if options.wide else options.model.name
        if options.quantize:
            model = quantised(model, options.quantize)
        rest = (*rest, options.quantize, options.kv_dtype)
        return Session(model, name, files, plan, None, DRAFTING, *rest)
    profile = AcceptanceProfile.parse(options.acceptance)
    model = models.random_weights(options.shape, options.layers, dtype, device)
    asked = {e.name for s in sections for g in s.groups for e in g.entries}
    defaults = DRAFTING | {
        method: {"drafter": models.random_drafter(method, model, options.shape)}
        for method in asked & models.DRAFTERS.keys()
    }
    name = options.shape + (f" cut to {options.layers} layers" if options.layers else "")
    texts = RandomTokens(model.config.vocab_size)
    return Session(model, name, texts, plan, profile, defaults, *rest)


if __name__ == "__main__":
    sys.exit(main())
