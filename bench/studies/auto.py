"""What `auto` gains and loses: every cell of text, context and temperature, all methods in turn.

    python bench/studies/auto.py --context 1k,4k,16k --texts 5 --json cells.jsonl
    python bench/studies/auto.py --draw docs/auto.png --json cells.jsonl

A cell is one text; its figures are medians of the repeats, after one run to warm up. Files of the
standard library that the embedded target was not trained on are continued.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments
from common.machine import Others, describe
from common.records import RecordFile
from common.tables import aligned, size
from decoding import models
from decoding.cases import Entry
from decoding.runs import run
from decoding.texts import Files, held_out_files

from specattn.decoding import Method, Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.planning.models import EMBEDDED_TARGET

SCHEMA = "specattn.auto/1"
METHODS = ("plain", "auto", "suffix", "prompt_lookup", "vegas", "longspec", "poss", "medusa")


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw what was measured; print a line per cell, and what they come to."""
    options = _options(argv)
    found = _read(options.json)
    if options.draw is None:
        found += _measure(options)
    cells = [record for record in found if record["kind"] == "cell"]
    print(table(cells))
    if options.draw is not None:
        draw(cells, options.draw)
    return 0


def _options(argv: list[str] | None) -> Any:
    parser = arguments.Parser(prog="auto.py", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--method", action="append", metavar="NAME[:OPTION=VALUE,...]")
    add("--context", type=arguments.numbers, default=[1024, 4096, 16384], metavar="N[,N]")
    add("--temperature", type=arguments.temperatures, default=[0.0, 1.0], metavar="T[,T]")
    add("--texts", type=arguments.number, default=5, metavar="N")
    add("--new-tokens", type=arguments.number, default=192, metavar="N")
    add("--repeats", type=arguments.number, default=3, metavar="N")
    add("--threads", type=arguments.number, default=2, metavar="N")
    add("--json", type=Path, metavar="FILE", help="JSON Lines; cells are added to it")
    add("--draw", type=Path, metavar="FILE", help="draw what --json has, and measure nothing")
    options = parser.parse_args(argv)
    if options.draw is not None and options.json is None:
        parser.error("--draw needs --json, with cells that were measured")
    options.methods = {}
    try:
        for text in options.method or METHODS:
            options.methods[text] = Entry.parse(text).build({})
    except ValueError as error:
        parser.error(str(error))
    if not {"plain", "auto"} <= set(options.methods):
        parser.error("--method: plain and auto must be among them")
    return options


def _read(path: Path | None) -> list[dict[str, Any]]:
    """Return what was measured before."""
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    return [json.loads(line) for line in lines]


def _measure(options: Any) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    model, tokenizer = models.checkpoint(EMBEDDED_TARGET, torch.float32, torch.device("cpu"))
    texts = Files(tokenizer, held_out_files())
    run_record = {"kind": "run", "schema": SCHEMA, **describe(torch.device("cpu"))}
    names = ("new_tokens", "repeats", "threads")
    known = _read(options.json)
    file = RecordFile(options.json, [*known, run_record | {n: vars(options)[n] for n in names}])
    for context, number in product(options.context, range(options.texts)):
        room = options.new_tokens + max(one.max_nodes for one in options.methods.values())
        target = Target(model, 1, context + room)
        prompts = texts.prompts(number, context, 1)
        snapshot = PromptSnapshot(target, prompts, keep_features=True)
        for temperature in options.temperature:
            others = Others()
            place = {"context": context, "text": number, "temperature": temperature}
            cell = _cell(snapshot, options.methods, options, temperature)
            file.add({"kind": "cell", **place, **cell, "others": others.cores()})
            print(_line(file.records[-1]), flush=True)
    return list(file.records[len(known) :])


def _cell(
    snapshot: PromptSnapshot, methods: dict[str, Method], options: Any, temperature: float
) -> dict[str, Any]:
    """Return tokens per second of every method, and what auto did."""
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    shares = ""
    for repeat in range(options.repeats + 1):
        order = list(methods)[:: 1 if repeat % 2 else -1]
        for name in order:
            one = run(snapshot, methods[name], options.new_tokens, temperature, seed=repeat)
            assert one.statistics is not None
            speeds[name] += [one.tokens_per_second] * (repeat > 0)
            shares = one.statistics.details.get("rounds by drafter", shares)
    return {"speed": {name: median(found) for name, found in speeds.items()}, "auto": shares}


def ratios(cell: dict[str, Any]) -> tuple[float, float, str]:
    """Return auto over plain, auto over the best other method, and which that is."""
    speed = dict(cell["speed"])
    own = speed.pop("auto")
    best = max(speed, key=lambda name: speed[name])
    return own / speed["plain"], own / speed[best], best


def _line(cell: dict[str, Any]) -> str:
    over_plain, over_best, best = ratios(cell)
    place = f"{size(cell['context'])} text {cell['text']} T={cell['temperature']:g}"
    return f"{place}: {over_plain:.2f} plain, {over_best:.2f} {best} ({cell['auto']})"


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Return a line per context and temperature, then what the bars ask for."""
    if not cells:
        return "no cells"
    names = list(dict.fromkeys(name for cell in cells for name in cell["speed"]))
    header = [("context", ">"), ("T", ">"), ("plain, tokens/s", ">")]
    header += [(name, ">") for name in names if name != "plain"]
    lines = []
    for context, heat in dict.fromkeys((c["context"], c["temperature"]) for c in cells):
        alike = [c for c in cells if (c["context"], c["temperature"]) == (context, heat)]
        line = [size(context), f"{heat:g}", f"{_mean(alike, 'plain'):.0f}"]
        gain = {name: _mean(alike, name) / _mean(alike, "plain") for name in names}
        lines.append(line + [f"{gain[name]:.2f}" for name in names if name != "plain"])
    found = [ratios(cell) for cell in cells]
    over_plain, over_best = ([one[n] for one in found] for n in (0, 1))
    return (
        aligned(header, lines)
        + f"\n\nauto over plain: worst of {len(cells)} cells {min(over_plain):.2f}, mean "
        + f"{geometric_mean(over_plain):.2f}; over the best other method of the cell: mean "
        + f"{geometric_mean(over_best):.2f}, worst {min(over_best):.2f}"
    )


def _mean(cells: Sequence[dict[str, Any]], name: str) -> float:
    return geometric_mean([cell["speed"][name] for cell in cells])


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens per second against the context, a line per method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    heats = sorted({cell["temperature"] for cell in cells})
    figure, axes = pyplot.subplots(1, len(heats), figsize=(5 * len(heats), 4), squeeze=False)
    for axis, heat in zip(axes[0], heats, strict=True):
        here = [cell for cell in cells if cell["temperature"] == heat]
        contexts = sorted({cell["context"] for cell in here})
        for name in here[0]["speed"]:
            means = [_mean([c for c in here if c["context"] == n], name) for n in contexts]
            style = {"auto": {"color": "black", "linewidth": 2.5, "zorder": 3}}
            style["plain"] = {"color": "black", "linestyle": "--"}
            axis.plot(contexts, means, marker="o", markersize=3, label=name, **style.get(name, {}))
        axis.set(
            xscale="log", yscale="log", title=f"temperature {heat:g}", xlabel="tokens of prompt"
        )
        axis.set_xticks(contexts, [size(n) for n in contexts])
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("new tokens per second")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
