"""Tables of the widened target: methods, engines, prompts, weights of 8 and 4 bits."""

from __future__ import annotations

from typing import Any

from records import markdown, read, size, spread, table


@table("wide")
def wide() -> str:
    """Return methods and engines on the widened target: tokens a second, times plain decoding."""
    found = [row for row in read("epyc-2core/decoding-wide.jsonl") if not row["fault"]]
    places: dict[tuple, dict[str, Any]] = {}
    for row in found:
        where = row["model"], row["context"], row["batch"], row["temperature"]
        places.setdefault(where, {})[row["method"]] = row
    names = list(dict.fromkeys(row["method"] for row in found if row["method"] != "plain"))
    rows = []
    for (model, context, batch, heat), here in sorted(places.items()):
        row = [model.removeprefix("wide "), size(context), batch, f"{heat:g}"]
        row.append(spread(here["plain"]["tokens_per_second"], 1))
        gains = {name: here[name]["speedup"]["plain"] for name in names if name in here}
        best = max(gains.values())
        shown = {n: f"**{x:.2f}**" if x == best else f"{x:.2f}" for n, x in gains.items()}
        rows.append([*row, *map(shown.get, names)])
    header = ("shape", "context", "B", "T", "plain, tokens/s")
    return markdown((*header, *(f"`{name}`" for name in names)), rows)


@table("wide-heads")
def wide_heads() -> str:
    """Return drafters of several kinds on the widened target."""
    rows = []
    for row in read("epyc-2core/decoding-wide-heads.jsonl"):
        gain, speed = row["speedup"].get("plain"), spread(row["tokens_per_second"], 1)
        shown = None if gain is None else f"{gain:.2f}"
        rows.append(
            [f"`{row['method']}`", f"{row['temperature']:g}", speed, shown, f"{row['tau']:.2f}"]
        )
    return markdown(("", "T", "tokens/s", "times plain", "tokens a pass"), rows)


@table("wide-hybrid")
def wide_hybrid() -> str:
    """Return methods on the widened hybrid beside transformers' generate."""
    rows = []
    for row in read("epyc-2core/decoding-wide-hybrid.jsonl"):
        gains = (row["speedup"].get(peer) for peer in ("plain", "transformers"))
        shown = [None if gain is None else f"{gain:.2f}" for gain in gains]
        speed = spread(row["tokens_per_second"], 1)
        rows.append([f"`{row['method']}`", size(row["context"]), speed, *shown])
    return markdown(("", "context", "tokens/s", "times plain", "times transformers"), rows)


@table("wide-prefill")
def wide_prefill() -> str:
    """Return the prefill of the widened target beside the engines'."""
    cells = {}
    for row in read("epyc-2core/decoding-wide.jsonl"):
        if row["method"] in ("plain", "vllm", "llama.cpp") and row["prefill_seconds"]:
            where = row["model"].removeprefix("wide "), row["context"], row["batch"]
            cells.setdefault(where, {}).setdefault(row["method"], row["prefill_seconds"])
    names = ("plain", "vllm", "llama.cpp")
    rows = [
        [model, size(context), *(f"{here[n]:.2f}" if n in here else None for n in names)]
        for (model, context, batch), here in sorted(cells.items())
        if batch == 1
    ]
    return markdown(("shape", "context", "specattn, s", "vLLM", "llama.cpp"), rows)


@table("wide-zen5")
def wide_zen5() -> str:
    """Return plain decoding and the prompt of the widened target over vLLM's, on Zen 5."""
    cells: dict[int, dict[str, Any]] = {}
    for row in read("epyc-zen5-2core/decoding-wide.jsonl"):
        cells.setdefault(row["context"], {})[row["method"]] = row
    rows = []
    for context, here in sorted(cells.items()):
        plain, vllm = here["plain"], here["vllm"]
        rates = [one["tokens_per_second"]["median"] for one in (plain, vllm)]
        seconds = [one["prefill_seconds"] for one in (plain, vllm)]
        cell = [f"{rate:.1f}" for rate in rates], [f"{second:.2f}" for second in seconds]
        over = f"**{rates[0] / rates[1]:.2f}**", f"**{seconds[1] / seconds[0]:.2f}**"
        rows.append([size(context), *cell[0], over[0], *cell[1], over[1]])
    header = ("context", "plain, tokens/s", "vLLM", "over", "prompt, s", "vLLM", "over")
    return markdown(header, rows)


@table("wide-quantised")
def wide_quantised() -> str:
    """Return tokens per second of the widened target by the bits of its weights, and llama.cpp."""
    header, rows = _by_bits("epyc-2core")
    return markdown(header, rows)


@table("wide-quantised-zen5")
def wide_quantised_zen5() -> str:
    """Return the same of Zen 5, where no llama.cpp was measured."""
    header, rows = _by_bits("epyc-zen5-2core")
    ours = [i for i, name in enumerate(header) if "llama.cpp" not in name and "lookup" not in name]
    return markdown([header[i] for i in ours], [[row[i] for i in ours] for row in rows])


def _by_bits(machine: str) -> tuple[tuple[str, ...], list[list[Any]]]:
    places: dict[tuple, dict[str, Any]] = {}
    for row in read(f"{machine}/decoding-wide-quantised.jsonl"):
        bits = row.get("quantize", "bfloat16")
        name = row["method"] + (", lookup" if "ngram" in row["settings"] else "")
        places.setdefault((row["context"], bits), {})[name] = row
    names = "plain", "suffix", "auto", "llama.cpp", "llama.cpp, lookup"
    rows = []
    for (context, bits), here in sorted(places.items(), key=lambda one: (one[0][0], -_order(one))):
        speeds = {n: here[n]["tokens_per_second"]["median"] for n in names if n in here}
        base = places[context, "bfloat16"]["plain"]["tokens_per_second"]["median"]
        shown = [f"{speeds[name]:.1f}" if name in speeds else None for name in names]
        read_in = [f"{here[n]['prefill_seconds']:.2f}" if n in here else None for n in names[::3]]
        rows.append([size(context), bits, shown[0], f"{speeds['plain'] / base:.2f}", *shown[1:]])
        rows[-1] += read_in
    header = ("context", "weights", "plain, tokens/s", "over bfloat16", "`suffix`", "`auto`")
    return (*header, "llama.cpp", "with its lookup", "prompt, s", "llama.cpp's"), rows


def _order(place: tuple) -> int:
    """Return the bits of a place's weights."""
    return {"bfloat16": 16, "int8": 8, "int4": 4}[place[0][1]]
