"""Write the pages' tables from bench/results: ``python docs/tools/tables.py``.

A page has a table between ``<!-- table NAME -->`` and ``<!-- end -->``; NAME is a function of this
file. What stands between is replaced. ``tests/test_tables.py`` says where a page is not up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from statistics import geometric_mean, mean, stdev
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {}


def main() -> None:
    """Rewrite every page that holds a table."""
    for page in pages():
        page.write_text(written(page.read_text()))


def pages() -> list[Path]:
    """Return all pages that may hold tables."""
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def written(text: str) -> str:
    """Return a page's text with every table as the records have it."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + "\n" + found[3], text)


def read(path: str, *kinds: str) -> list[dict[str, Any]]:
    """Return a file's records of these kinds (``row``), each with the heading of its run."""
    run: dict[str, Any] = {}
    found = []
    for line in (RESULTS / path).read_text().splitlines():
        record = json.loads(line)
        if record.get("kind") == "run":
            run = record
        elif record.get("kind") in (kinds or ("row",)):
            found.append(record | {"run": run})
    return found


def origin(path: str) -> str:
    """Return a file's dates and commits."""
    records = map(json.loads, (RESULTS / path).read_text().splitlines())
    runs = [record for record in records if record.get("kind") == "run"]
    days, commits = ({run[name] for run in runs} for name in ("time", "commit"))
    commits = ", ".join(f"`{name[:7]}`" for name in sorted(commits))
    return f"{' to '.join(sorted({day[:10] for day in days}))}, commit {commits}"


def table(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register the function that writes this table."""

    def register(write: Callable[[], str]) -> Callable[[], str]:
        TABLES[name] = write
        return write

    return register


def markdown(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table; ``None`` is a dash."""
    lines = [list(header), ["---"] * len(list(header))]
    lines += [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size(tokens: int) -> str:
    """Return a number of tokens as people write it."""
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens or "-")


def spread(timed: dict[str, float], digits: int = 0) -> str:
    """Return a median with the distance between its quartiles."""
    return f"{timed['median']:.{digits}f} ±{timed['spread']:.0%}"


# GPU kernels in the emulator

BARS = {  # of (primitive, keys, T): what may be moved at most, and the least share of the bandwidth
    ("hybrid", 8192, 1): (None, 0.60),
    ("hybrid", 8192, 16): (None, 0.55),
    ("hybrid", 32768, 1): (1.03, 0.80),
    ("hybrid", 32768, 16): (1.05, 0.75),
    ("hybrid", 131072, 1): (None, 0.90),
    ("hybrid", 131072, 16): (None, 0.88),
    ("gather", 32768, 1): (1.1, None),
    ("importance", 32768, 1): (1.02, None),
    ("select", 32768, 1): (1.2, None),
}


@table("emulated")
def emulated() -> str:
    """Return what the kernels of both languages move and execute, and what that predicts."""
    found, cuda = (
        {(one["op"], one["context"], one["rows"]): one for one in read(name, "emulated")}
        for name in ("epyc-2core/emulated-sm90.jsonl", "epyc-2core/emulated-sm90-cuda.jsonl")
    )
    ops = list(dict.fromkeys(op for op, _, _ in found))
    rows = []
    for place in sorted(found, key=lambda place: (ops.index(place[0]), *place[1:])):
        both = [found[place], cuda.get(place)]
        most, least = BARS.get(place, (None, None))
        moved = [one and one["moved_over_needed"] for one in both]
        shares = [one and one["predicted_share"]["h200"] for one in both]
        steps = [one and sum(x["instructions_per_key"] for x in one["launches"]) for one in both]
        host = [one and one["host_microseconds"] for one in both]
        row = [f"{place[0]}, {size(place[1])}, {place[2]}", pair(moved, "{:.3f}", most=most)]
        row += ["" if most is None else f"{most:g}", pair(steps, "{:.1f}")]
        row += [pair(shares, "{:.0%}", least=least), "" if least is None else f"{least:.0%}"]
        rows.append([*row, pair(host, "{:.0f}")])
    header = ("primitive, keys, T", "moved over needed", "bar", "instructions a key")
    return markdown((*header, "predicted share of an H200", "bar", "host, us"), rows)


def pair(
    values: list[Any], form: str, *, most: float | None = None, least: float | None = None
) -> str:
    """Return two figures, what misses its bar in bold."""
    cells = []
    for value in values:
        if value is None:
            cells.append("-")
            continue
        missed = (most is not None and value > most) or (least is not None and value < least)
        cells.append(f"**{form.format(value)}**" if missed else form.format(value))
    return " / ".join(cells)


# The kernels on CPUs


@table("bars")
def bars() -> str:
    """Return every bar on both machines."""
    files = ("epyc-2core/bars.jsonl", "xeon-2core/bars.jsonl")
    machines = [{bar["name"]: bar for bar in read(name, "bar")} for name in files]
    rows = []
    for name, bar in machines[0].items():
        target = amount(bar["target"], bar["unit"])
        row = [name, f"at most {target}" if bar["at_most"] else target]
        for found in machines:
            one = found[name]
            value = f"{amount(one['measured'], one['unit'], sign=True)} ±{one['spread']:.0%}"
            row.append(value if one["met"] else f"**{value}**")
        time = bar["note"].split(";")[0].split(" against ")[0]
        other = machines[1][name]["note"].split(";")[0].split(" against ")[0]
        rows.append([*row, f"{time} / {other}" if time else ""])
    met = [sum(bar["met"] for bar in found.values()) for found in machines]
    header = ("bar; **missed**", "to reach", "EPYC", "Xeon", "time, EPYC / Xeon")
    counts = ["", "", f"{met[0]} of {len(rows)} met", f"{met[1]} of {len(rows)} met", ""]
    return markdown(header, [*rows, counts])


def amount(value: float, unit: str, *, sign: bool = False) -> str:
    """Return a bar's figure in its unit."""
    forms = {"share": "{:.0%}", "times": "{:.2f}x", "over": "{:+.1%}", "us": "{:.0f} us"}
    text = forms[unit].format(value)
    return text if sign else text.removeprefix("+")


@table("sweep")
def sweep() -> str:
    """Return the sweep of every primitive on the Xeon."""
    rows = []
    for one in read("xeon-2core/quick.jsonl"):
        peer, timed = min(one["peers"].items(), key=lambda item: item[1]["ratio"])
        time = one["time"]["median"]
        shown = f"{time * 1e3:.2f} ms" if time >= 1e-3 else f"{time * 1e6:.0f} us"
        rows.append(
            (
                f"`{one['op']}`, {one['variant']}", size(one["context"]), one["rows"], shown,
                f"{one['share']:.0%}", one["bound"], peer, f"{timed['ratio']:.2f}x",
            )
        )  # fmt: skip
    header = ("primitive", "context", "T", "time", "of ceiling", "bound by", "best peer")
    return markdown((*header, "speed-up"), rows)


# Decoding


def label(row: dict[str, Any]) -> str:
    """Return a method with its options."""
    options = ",".join(f"{name}={value}" for name, value in row["settings"].items())
    return row["method"] + (f":{options}" if options else "")


@table("grounded")
def grounded() -> str:
    """Return tokens per pass on grounded requests, means over lengths."""
    found = read("epyc-2core/decoding-grounded.jsonl")
    methods = list(dict.fromkeys(label(row) for row in found))
    rows = []
    for section in dict.fromkeys(row["section"] for row in found):
        here = [row for row in found if row["section"] == section]
        tau = {name: mean(r["tau"] for r in here if label(r) == name) for name in methods}
        lead = tau["suffix:nodes=64"] / tau["prompt_lookup"]
        simulated = "simulated" if "SIMULATED" in here[0]["acceptance"] else "measured"
        rows.append([section, simulated, *(f"{tau[name]:.2f}" for name in methods), f"{lead:.2f}"])
    names = [f"`{name}`" for name in methods]
    return markdown(("kind", "acceptance", *names, "suffix over lookup"), rows)


@table("decoding")
def decoding() -> str:
    """Return plain decoding, transformers, Vegas and LongSpec with fixed sizes, on the Xeon."""
    found = read("xeon-2core/decoding.jsonl") + read("xeon-2core/decoding-31k.jsonl")
    places = dict.fromkeys((r["context"], r["batch"], r["temperature"]) for r in found)
    rows = []
    for place in sorted(places):
        here = {
            r["method"]: r
            for r in found
            if (r["context"], r["batch"], r["temperature"]) == place and not r["fault"]
        }
        row = [size(place[0]), place[1], f"{place[2]:g}"]
        row += [spread(here[name]["tokens_per_second"]) for name in ("plain", "transformers")]
        for name in ("vegas", "longspec"):
            one = here.get(name)
            row += [one and spread(one["tokens_per_second"])]
            row += [one and f"{one['speedup']['plain']:.2f}", one and f"{one['tau']:.2f}"]
            if name == "vegas":
                row.append(one and f"{one['speedup']['transformers']:.2f}")
        rows.append(row)
    header = ("context", "B", "T", "plain, tokens/s", "transformers")
    vegas, longspec = ("Vegas", "x plain", "tau", "x hf"), ("LongSpec", "x plain", "tau")
    return markdown((*header, *vegas, *longspec), rows)


@table("peers")
def peers() -> str:
    """Return whole engines side by side on the EPYC."""
    found = {}
    for row in read("epyc-2core/decoding-peers.jsonl"):
        found.setdefault(row["context"], {})[label(row)] = row
    names = list(dict.fromkeys(name for here in found.values() for name in here))
    rows = []
    for context, here in found.items():
        row = [size(context)]
        for name in names:
            one = here.get(name)
            if one is None:
                row.append(None)
                continue
            over = one["speedup"].get("vllm")
            shown = spread(one["tokens_per_second"])
            row.append(shown if over is None else f"{shown} ({over:.2f}x)")
        rows.append(row)
    return markdown(("context", *(f"`{name}`" for name in names)), rows)


@table("auto")
def auto() -> str:
    """Return times plain decoding by length and temperature, geometric means, and over all."""
    cells = read("epyc-2core/auto.jsonl", "cell")
    names = [name for name in cells[0]["speed"] if name != "plain"]
    rows = []
    for place in sorted({(cell["context"], cell["temperature"]) for cell in cells}):
        here = [c["speed"] for c in cells if (c["context"], c["temperature"]) == place]
        gains = {n: geometric_mean(one[n] / one["plain"] for one in here) for n in names}
        best = max(gains.values())
        shown = [f"**{x:.2f}**" if x == best else f"{x:.2f}" for x in gains.values()]
        rows.append([size(place[0]), f"{place[1]:g}", *shown])
    greedy, sampled, best = auto_gains().values()
    return f"""{markdown(("tokens", "T", *(f"`{name}`" for name in names)), rows)}

Over plain decoding `auto` is {geometric_mean(greedy + sampled):.2f} times as fast in the mean \
({geometric_mean(greedy):.2f} greedily, {geometric_mean(sampled):.2f} sampled), {min(sampled):.2f} \
in the worst cell; over the best other method of each cell {geometric_mean(best):.2f} in the mean, \
{min(best):.2f} in the worst."""


def auto_gains() -> dict[str, list[float]]:
    """Return auto over plain greedily and sampled, and over the best other method, per cell."""
    found: dict[str, list[float]] = {"greedy": [], "sampled": [], "best": []}
    for cell in read("epyc-2core/auto.jsonl", "cell"):
        speed = cell["speed"]
        kind = "sampled" if cell["temperature"] else "greedy"
        found[kind].append(speed["auto"] / speed["plain"])
        found["best"].append(speed["auto"] / max(speed[n] for n in speed if n != "auto"))
    return found


@table("vllm")
def vllm() -> str:
    """Return speeds inside vLLM over vLLM as it is."""
    names = {
        ("plain", "specattn"): "plain decoding",
        ("ngram", "specattn"): "vLLM's own n-gram drafting of 7, in both",
        ("drafter", "Suffix"): "`Suffix`, 15 tokens, over plain",
        ("drafter", "PromptLookup"): "`PromptLookup`, 7 tokens, over plain",
        ("drafter", "Vegas"): "`Vegas`, 6 tokens, over plain",
        ("first token", "specattn"): "time to the first token",
    }
    found = {
        (row["check"], row["variant"], row["context"]): row["ratio"]
        for row in read("epyc-2core/engines.jsonl")
        if "ratio" in row
    }
    contexts = sorted({context for _, _, context in found})
    rows = []
    for place, name in names.items():
        values = [found.get((*place, context)) for context in contexts]
        rows.append([name, *("" if value is None else f"{value:.2f}" for value in values)])
    return markdown(("times vLLM as it is", *map(size, contexts)), rows)


@table("transformers")
def transformers() -> str:
    """Return speeds of transformers' generate over SDPA with the default cache."""
    found = read("epyc-2core/transformers-generate.jsonl")
    ways = [way for way in dict.fromkeys(row["way"] for row in found) if way != "sdpa"]
    contexts = sorted({row["context"] for row in found})
    over = {(row["way"], row["context"]): row["over_sdpa"] for row in found}
    rows = []
    for way in ways:
        decoded = [f"{over[way, context]['decoding']:.2f}" for context in contexts]
        rows.append([way, *decoded, f"{over[way, contexts[-1]]['prefill']:.2f}"])
    header = ("times as fast per token as SDPA with the default cache", *map(size, contexts))
    return markdown((*header, f"prompt of {size(contexts[-1])}"), rows)


# Pages of methods


@table("vegas-bars")
def vegas_bars() -> str:
    """Return what Vegas costs and gains by length and batch, switch off."""
    runs: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in read("xeon-2core/vegas-bars.jsonl"):
        place = row["context"], row["batch"], row["new_tokens"], row["run"]["plan"]["texts"]
        runs.setdefault(place, {})[row["method"]] = row
    rows = []
    for place in sorted(runs):
        plain, own = runs[place]["plain"], runs[place]["vegas"]
        seconds = own["round_seconds"]
        parts = [f"{seconds[n] / seconds['total']:.0%}" for n in ("draft", "target", "accept")]
        peaks = [runs[place][n]["peak_bytes"] / 2**30 for n in ("plain", "vegas", "transformers")]
        over = [f"{own['speedup'][name]:.2f}" for name in ("plain", "transformers")]
        row = [f"{place[0]:,}", *map(str, place[1:]), spread(plain["tokens_per_second"])]
        row += [spread(own["tokens_per_second"]), *over, f"{own['tau']:.2f}"]
        rows.append([*row, " / ".join(parts), " / ".join(f"{peak:.2f}" for peak in peaks)])
    header = ("context", "B", "new", "texts", "plain, tokens/s", "Vegas", "x plain")
    last = ("x transformers", "tau", "draft / target / accept", "GiB: plain / Vegas / transformers")
    return markdown((*header, *last), rows)


@table("vegas-switch")
def vegas_switch() -> str:
    """Return Vegas with the clock of two kinds of rounds, and always drafting."""
    gains = {
        (row["context"], row["temperature"], bool(row["settings"].get("switch"))): row["speedup"]
        for row in read("xeon-2core/vegas-switch.jsonl")
        if row["method"] == "vegas"
    }
    rows = [
        [size(context), *(f"{gains[context, t, on]['plain']:.2f}" for t in (0, 1) for on in (0, 1))]
        for context in sorted({context for context, _, _ in gains})
    ]
    kinds = [f"T={t}: {kind}" for t in (0, 1) for kind in ("always drafting", "with the switch")]
    return markdown(("tokens", *kinds), rows)


@table("sparse")
def sparse() -> str:
    """Return tokens per round of the self-drafting methods, and their gain at temperature 0."""
    found = {
        (row["method"], row["context"], row["temperature"]): row
        for row in read("xeon-2core/decoding-sparse.jsonl")
    }
    contexts = sorted({context for _, context, _ in found})
    rows = []
    for name in ("vegas", "streaming", "quest", "specextend", "triforce"):
        row = [f"`{name}`"]
        for context in contexts:
            one = found[name, context, 0]
            row.append(f"{one['tau']:.2f} ({one['speedup']['plain']:.2f})")
        rows.append(row + [f"{found[name, context, 1]['tau']:.2f}" for context in contexts])
    header = [f"{size(context)}, T=0: tau (x plain)" for context in contexts]
    return markdown(("", *header, *(f"{size(n)}, T=1: tau" for n in contexts)), rows)


@table("spread")
def acceptance_spread() -> str:
    """Return tau of the rounds that drafted, as differences from Vegas text by text."""
    lines = (RESULTS / "xeon-2core/acceptance-spread.jsonl").read_text().splitlines()
    taus: dict[tuple[Any, ...], dict[int, float]] = {}
    read_tokens: dict[tuple[str, int], list[float]] = {}
    for one in map(json.loads, lines):
        place = one["method"].replace(":gamma=6,", ":").removesuffix(":gamma=6"), one["context"]
        taus.setdefault((*place, one["temperature"]), {})[one["text"]] = one["drafting"]
        read_tokens.setdefault(place, []).append(one["read"])
    contexts = sorted({context for _, context, _ in taus})
    rows = []
    for name in dict.fromkeys(name for name, _, _ in taus):
        row = [f"`{name}`"]
        for context, temperature in product(contexts, (0, 1)):
            if temperature == 0:
                known = read_tokens.get((name, context))
                row.append(f"{mean(known):.0f}" if known else "")
            own, base = taus.get((name, context, temperature)), taus["vegas", context, temperature]
            if own is None:
                row.append("")
                continue
            differs = [tau - (0 if name == "vegas" else base[text]) for text, tau in own.items()]
            error = stdev(differs) / len(differs) ** 0.5
            row.append(f"{mean(differs):{'.2f' if name == 'vegas' else '+.2f'}} ±{error:.2f}")
        rows.append(row)
    header = [head for n in contexts for head in (f"{size(n)}: read", "T=0", "T=1")]
    return markdown(("", *header), rows)


@table("ranks")
def ranks() -> str:
    """Return passes of one rank, of two that share a cache, and of two parts of a model."""
    found = {
        (row["pass"], row["shape"]): row["wall_s"] * 1e3
        for row in read("epyc-2core/distributed-31k-shared.jsonl")
    }
    names = {
        "plain": "pass of 1 row",
        "verify": "verification of 7 rows, collecting",
        "select": "selection of 4,096 tokens",
        "draft": "sparse draft of 1 row",
    }
    rows = []
    for kind, name in names.items():
        one, two, shared, parts = (found[kind, shape] for shape in ("1x1", "1x2", "2x1", "2x1t"))
        over = [f"{ms:.1f} ms ({ms / two - 1:+.0%})" for ms in (shared, parts)]
        rows.append([name, f"{one:.1f} ms", f"{two:.1f} ms", *over])
    header = ("", "1 rank, 1 thread", "1 rank, 2 threads", "2 ranks (over 2 threads)")
    return markdown((*header, "2 parts (over 2 threads)"), rows)


if __name__ == "__main__":
    main()
