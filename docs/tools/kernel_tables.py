"""Tables of kernels: on a GPU, in the emulator, bars and sweep on CPUs."""

from __future__ import annotations

import itertools
from typing import Any

from records import markdown, read, size, table

from specattn import attention_plans
from specattn.gpu_record import Shape

BARS = {  # of (primitive, keys, rows): most that may be moved, least share of the bandwidth
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
    header = ("primitive, keys, rows", "moved over needed", "bar", "instructions a key")
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


@table("h100")
def h100() -> str:
    """Return times on an H100, the share of its bandwidth, and how often the best peer's."""
    places = list(itertools.product((1, 8), (32768, 131072)))
    found: dict[tuple, dict[tuple, str]] = {}
    for one in read("h100/kernels.jsonl"):
        if one["context"]:
            times = one["time"]["median"], one["bounds"]["memory"]
            cell = f"{duration(times[0])}, {times[1] / times[0]:.0%}"
            if peers := {k: x for k, x in one["peers"].items() if not k.startswith("bf16")}:
                best = min(peers, key=lambda name: peers[name]["ratio"])
                cell += f", {peers[best]['ratio']:.2f}x"
            elif one["peers"]:
                cell += f", {one['peers']['bf16 cache']['ratio']:.2f}x bf16"
            row = f"`{one['op']}`, {one['variant']}", one["rows"]
            found.setdefault(row, {})[one["batch"], one["context"]] = cell
    header = [f"B={batch}, {size(context)}" for batch, context in places]
    rows = [[*row, *(cells.get(place) for place in places)] for row, cells in found.items()]
    return markdown(("primitive", "rows", *header), rows)


@table("h100-chains")
def h100_chains() -> str:
    """Return times of chains on an H100, beside the best of FlashAttention 3 and of SDPA."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for one in read("h100/chains.jsonl"):
        own, times = one["time"]["median"], {}
        for name, peer in one["peers"].items():
            family = name.split(",")[0].split(" gqa")[0]
            times[family] = min(peer["median"], times.get(family, peer["median"]))
        cell = " / ".join(f"{time * 1e6:.3g}" for time in (own, times["flash-attn 3"]))
        cell = f"**{cell}**" if own > times["flash-attn 3"] else cell
        cell += f" ({times['sdpa'] * 1e6:.3g})" if "sdpa" in times else ""
        found.setdefault((one["batch"], one["context"]), {})[one["rows"]] = cell
    rows = sorted({count for cells in found.values() for count in cells})
    header = ("requests, keys", *map(in_rows, rows))
    lines = [[f"{B}, {size(keys)}", *map(cells.get, rows)] for (B, keys), cells in found.items()]
    return markdown(header, lines)


@table("h100-predicted")
def h100_predicted() -> str:
    """Return what the model makes of those chains today, and FlashAttention 3's times over it."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for one in read("h100/chains.jsonl"):
        of = Shape(
            "hybrid_tree_attention", "bf16", 128, 4 * one["rows"], one["context"], one["batch"]
        )
        kernels = ("gluon", "triton", "cuda")[: 3 if of.rows <= 64 else 2]
        time = min(attention_plans.microseconds(kernel, of, 8, 132) for kernel in kernels)
        flash, sdpa = (
            min(
                (x["median"] * 1e6 / time for name, x in one["peers"].items() if kind in name),
                default=0,
            )
            for kind in ("flash", "sdpa")
        )
        cell = f"{time:.3g}, {flash:.2f}"
        cell = f"**{cell}**" if flash < 1 else cell
        if sdpa:
            cell += f" (**{sdpa:.2f}**)" if sdpa < 1 else f" ({sdpa:.2f})"
        found.setdefault((one["batch"], one["context"]), {})[one["rows"]] = cell
    rows = sorted({count for cells in found.values() for count in cells})
    header = ("requests, keys", *map(in_rows, rows))
    lines = [[f"{B}, {size(keys)}", *map(cells.get, rows)] for (B, keys), cells in found.items()]
    return markdown(header, lines)


@table("h100-passes")
def h100_passes() -> str:
    """Return what passes of two models cost on an H100."""
    rows: dict[str, list[str]] = {}
    header = ["pass"]
    for model in ("llama-3.1-8b", "qwen3-8b"):
        for one in read(f"h100/decode-{model}.jsonl", "pass"):
            name = f"{model}, {size(one['context'])}"
            if name not in header:
                header.append(name)
            rate = f", {one['bandwidth'] / 1e9:.0f} GB/s" if one["rows"] else ""
            cell = f"{one['time']['median'] * 1e3:.2f} ms{rate}"
            rows.setdefault(one["name"], []).append(cell)
    return markdown(header, ([name, *cells] for name, cells in rows.items()))


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


@table("bars-zen5")
def bars_zen5() -> str:
    """Return the shares of attention and states on Zen 5, beside slow memory and beside fast."""
    folder = "epyc-zen5-2core"
    slow = {bar["name"]: bar for bar in read(f"{folder}/bars.jsonl", "bar")}
    fast = [*read(f"{folder}/bars-attention.jsonl", "bar")]
    fast += read(f"{folder}/bars-states.jsonl", "bar")

    def cell(bar: dict) -> str:
        if (bar["others"] or 0) > 0.1:
            return "disturbed"
        share = f"{bar['measured']:.0%} ({bar['bound']}), {bar['note'].split(';')[0]}"
        return share if bar["met"] else f"**{share}**"

    rows = [
        [bar["name"], amount(bar["target"], "share"), cell(slow[bar["name"]]), cell(bar)]
        for bar in fast
        if bar["unit"] == "share"
    ]
    return markdown(("bar; **missed**", "to reach", "all bars", "alone"), rows)


@table("weights-zen5")
def weights_zen5() -> str:
    """Return the bars of weights of 8 and 4 bits on Zen 5."""
    rows = []
    for bar in read("epyc-zen5-2core/bars-weights.jsonl", "bar"):
        ratio = bar["unit"] == "over"  # kept as what it takes beyond one
        unit = "times" if ratio else bar["unit"]
        target, found = (amount(bar[name] + ratio, unit) for name in ("target", "measured"))
        found = f"{found} ±{bar['spread']:.0%}"
        found = found if bar["met"] else f"**{found}**"
        most = "at most " if bar["at_most"] else ""
        rows.append([bar["name"], most + target, found, bar["note"].split(": ")[0]])
    return markdown(("bar; **missed**", "to reach", "found", "time"), rows)


@table("bytes")
def bytes_avx512() -> str:
    """Return what caches of 8 bits gain with AVX-512-BF16."""
    return of_8_bits("epyc-2core/bars-bytes.jsonl")


@table("bytes-avx2")
def bytes_avx2() -> str:
    """Return what caches of 8 bits gain with AVX2 alone."""
    return of_8_bits("epyc-zen3-2core/bars-bytes.jsonl")


@table("bytes-zen5")
def bytes_zen5() -> str:
    """Return what caches of 8 bits gain on Zen 5, where no vLLM was installed."""
    return of_8_bits("epyc-zen5-2core/bars-bytes.jsonl", peers=False)


def of_8_bits(record: str, *, peers: bool = True) -> str:
    """Return how many times as fast caches of 8 bits are, by rows and type."""
    places = ("int8", "e4m3", "e5m2", *(["against vllm"] if peers else []))
    found: dict[str, dict[str, Any]] = {}
    for bar in read(record, "bar"):
        _, rows, stored, _, held = bar["name"].split(", ")
        place = stored if held == "over bf16" else held
        found.setdefault(rows.split()[-2], {})[place] = bar
    lines = []
    for rows, bars in found.items():
        line = [rows]
        for place in places:
            bar = bars.get(place)
            value = bar and f"{bar['measured']:.2f} of {bar['target']:g}"
            line.append(f"**{value}**" if bar and not bar["met"] else value)
        time = bars["e4m3"]["note"].replace("; bf16", " /")
        lines.append([*line, time])
    types = [place.replace("against vllm", "e4m3 over vLLM's") for place in places]
    return markdown(("rows", *types, "time, e4m3 / bf16"), lines)


@table("latents")
def latents() -> str:
    """Return the bars of attention over latents, and a token of a whole model."""
    rows = []
    for machine, vectors in (("epyc-2core", "AVX512-BF16"), ("epyc-zen3-2core", "AVX2")):
        for bar in read(f"{machine}/bars-latents.jsonl", "bar"):
            target, found = (amount(bar[key], bar["unit"]) for key in ("target", "measured"))
            value = f"{found} ±{bar['spread']:.0%}"
            name = f"{vectors}: {bar['name']}"
            rows.append([name, target, value if bar["met"] else f"**{value}**", bar["note"]])
    for one in read("epyc-zen3-2core/latents.jsonl"):
        name = f"a token at {size(one['context'])} of a model of DeepSeek-V2-Lite's sizes"
        times = [f"{one[key] * 1e3:.0f} ms" for key in ("plain", "transformers")]
        name += f", {one['layers']} layers, {one['dtype']}, over transformers"
        rows.append([name, "5x", f"{one['times']:.2f}x", f"{times[0]}; transformers {times[1]}"])
    return markdown(("bar; **missed**", "to reach", "found", "times"), rows)


def in_rows(count: int) -> str:
    """Return a column's number of rows."""
    return f"{count} row{'s' if count > 1 else ''}"


def duration(seconds: float) -> str:
    """Return a time as people write it."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


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
        rows.append(
            (
                f"`{one['op']}`, {one['variant']}", size(one["context"]), one["rows"],
                duration(one["time"]["median"]),
                f"{one['share']:.0%}", one["bound"], peer, f"{timed['ratio']:.2f}x",
            )
        )  # fmt: skip
    header = ("primitive", "context", "rows", "time", "of ceiling", "bound by", "best peer")
    return markdown((*header, "speed-up"), rows)
