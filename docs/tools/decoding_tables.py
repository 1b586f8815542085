"""Tables of decoding: methods side by side, engines, transformers, ranks."""

from __future__ import annotations

from statistics import geometric_mean, mean
from typing import Any

from records import label, markdown, read, size, spread, table

HEADLINES = (  # file, model, (context, batch, temperature) ...; the hardware and model as shown
    (
        "h100/decoding-widened-8b.jsonl", "wide llama-3.1-8b", "H100",
        "Llama-3.1-8B's sizes (widened, 7.0 B), bf16",
        ((4096, 1, 0), (4096, 1, 1), (4096, 8, 0), (16384, 1, 0)),
    ),
    (
        "h100/decode-qwen3-8b.jsonl", "qwen3-8b", "H100",
        "Qwen3-8B, random weights, bf16, simulated acceptance",
        ((131072, 1, 0),),
    ),
    (
        "epyc-zen5-2core/decoding-wide.jsonl", "wide qwen3-0.6b", "EPYC (Zen 5), 2 cores",
        "Qwen3-0.6B's sizes (widened, 449 M), bf16",
        ((4096, 1, 0),),
    ),
    (
        "epyc-zen5-2core/decoding-wide-pacing.jsonl", "wide06", "EPYC (Zen 5), 2 cores",
        "Qwen3-0.6B's sizes (widened, 449 M), bf16",
        ((4096, 1, 0), (4096, 1, 1)),
    ),
    (
        "epyc-zen3-2core/decoding-peers.jsonl", "tiny", "EPYC (Zen 3), 2 cores",
        "embedded model (7.7 M), fp32",
        ((4096, 1, 0),),
    ),
)  # fmt: skip
ENGINES = ("transformers", "vllm", "llama.cpp")


@table("headline")
def headline() -> str:
    """Return the README's table: plain tokens a second, and times that by everything else."""
    rows = []
    for path, model, hardware, shown, places in HEADLINES:
        for place in places:
            here = [
                row for row in read(path)
                if (row["context"], row["batch"], row["temperature"]) == place
                and row["model"] == model and not row["fault"]
            ]  # fmt: skip
            (plain,) = (row for row in here if row["method"] == "plain")
            gains: dict[str, list[float]] = {}
            for row in here:
                if row is not plain:
                    gains.setdefault(label(row), []).append(row["speedup"]["plain"])
            drafters = [name for name in gains if not name.startswith(("auto", *ENGINES))]
            best = max(drafters, key=lambda name: max(gains[name]))
            cells = {name: ", ".join(f"{x:.2f}" for x in gains[name]) for name in gains}
            context = f"{size(place[0])} + {plain['new_tokens']}"
            context += f", {place[1]} at once" if place[1] > 1 else ""
            speed = f"{plain['tokens_per_second']['median']:.0f}"
            rows.append([hardware, shown, context, f"{place[2]:g}", speed])
            rows[-1] += [cells.get("transformers"), cells.get("vllm")]
            rows[-1] += [f"{cells[best]} `{best}`", cells.get("auto")]
    header = ("hardware", "model, dtype", "prompt + new", "T", "plain, tokens/s", "transformers")
    return markdown((*header, "vLLM", "best drafter", "`auto`"), rows)


@table("h100-widened")
def h100_widened() -> str:
    """Return methods over plain decoding on an 8B body, by prompt, temperature and batch."""
    places = {(4096, 1, 0): "4k", (16384, 1, 0): "16k", (4096, 1, 1): "4k, T=1"}
    places[4096, 8, 0] = "4k, 8 at once"
    cells: dict[str, dict[tuple, list[dict[str, Any]]]] = {}
    for row in read("h100/decoding-widened-8b.jsonl"):
        note = row["details"].get("noted as")
        name = f"`{row['method']}`, {note}" if note else f"`{label(row)}`"
        place = row["context"], row["batch"], row["temperature"]
        cells.setdefault(name, {}).setdefault(place, []).append(row)
    rows = []
    for name, here in cells.items():
        shown = [", ".join(map(_gain_or_speed, here.get(place, []))) or None for place in places]
        taus = ", ".join(f"{one['tau']:.2f}" for one in here.get((4096, 1, 0), []) if one["tau"])
        rows.append([name, shown[0], taus or None, *shown[1:]])
    first, *others = places.values()
    return markdown(("", first, "tokens a pass", *others), rows)


def _gain_or_speed(row: dict[str, Any]) -> str:
    """Return times plain decoding; of plain decoding, tokens per second."""
    gain, timed = row["speedup"].get("plain"), row["tokens_per_second"]
    return f"{timed['median']:.0f} tokens/s" if gain is None else f"{gain:.2f}"


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


@table("eight-bits-decoding")
def eight_bits_decoding() -> str:
    """Return plain decoding over caches of 8 bits, each run by itself."""
    found: dict[tuple, list[str]] = {}
    for row in read("epyc-2core/decoding-eight-bits.jsonl"):
        if row["method"] != "plain":
            continue
        model = row["model"].removeprefix("wide ").replace("tiny", "embedded")
        where = model, size(row["context"]), row.get("kv_dtype", "bfloat16")
        found.setdefault(where, []).append(spread(row["tokens_per_second"], 1))
    rows = [[*where, ", ".join(speeds)] for where, speeds in sorted(found.items())]
    return markdown(("model", "tokens", "cache", "plain, tokens/s, each run"), rows)


@table("cast")
def cast() -> str:
    """Return drafting with rounded weights over plain decoding, on prose."""
    places: dict[tuple, dict[str, Any]] = {}
    for row in read("epyc-2core/decoding-cast.jsonl"):
        places.setdefault((row["context"], row["temperature"]), {})[label(row)] = row
    names = list(dict.fromkeys(name for here in places.values() for name in here))
    names.remove("plain")
    rows = []
    for (context, heat), here in sorted(places.items()):
        gains = [here[name]["speedup"]["plain"] for name in names]
        shown = [f"**{x:.2f}**" if x == max(gains) else f"{x:.2f}" for x in gains]
        rows.append([size(context), f"{heat:g}", *shown])
    return markdown(("tokens", "T", *(f"`{name}`" for name in names)), rows)


@table("auto")
def auto() -> str:
    """Return times plain decoding of all methods on the Zen 5."""
    return _over_plain("epyc-zen5-2core/auto.jsonl")


@table("auto-zen3")
def auto_zen3() -> str:
    """Return times plain decoding of auto and suffix on the Zen 3."""
    return _over_plain("epyc-zen3-2core/auto.jsonl")


def _over_plain(path: str) -> str:
    """Return times plain decoding by length and temperature, geometric means, and over all."""
    cells = read(path, "cell")
    names = [name for name in cells[0]["speed"] if name != "plain"]
    rows = []
    for place in sorted({(cell["context"], cell["temperature"]) for cell in cells}):
        here = [c["speed"] for c in cells if (c["context"], c["temperature"]) == place]
        gains = {n: geometric_mean(one[n] / one["plain"] for one in here) for n in names}
        best = max(gains.values())
        shown = [f"**{x:.2f}**" if x == best else f"{x:.2f}" for x in gains.values()]
        rows.append([size(place[0]), f"{place[1]:g}", *shown])
    greedy, sampled, best = auto_gains(path).values()
    return f"""{markdown(("tokens", "T", *(f"`{name}`" for name in names)), rows)}

Over plain decoding `auto` is {geometric_mean(greedy + sampled):.2f} times as fast in the mean \
({geometric_mean(greedy):.2f} greedily, {geometric_mean(sampled):.2f} sampled), {min(sampled):.2f} \
in the worst cell; over the best of the others in each cell, plain decoding included, \
{geometric_mean(best):.2f} in the mean, {min(best):.2f} in the worst."""


def auto_gains(path: str = "epyc-zen5-2core/auto.jsonl") -> dict[str, list[float]]:
    """Return auto over plain greedily and sampled, and over the best other method, per cell."""
    found: dict[str, list[float]] = {"greedy": [], "sampled": [], "best": []}
    for cell in read(path, "cell"):
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


@table("vllm-auto")
def vllm_auto() -> str:
    """Return how `Auto` in vLLM stands to vLLM as it is and to the best single drafter."""
    rows = []
    for cell in read("epyc-2core/vllm-auto.jsonl", "cell"):
        took = dict(cell["ms_per_token"])
        auto, plain = took.pop("Auto"), took["vLLM"]
        best = min(took, key=lambda name: took[name])
        rows.append([
            size(cell["context"]), cell["text"], f"{cell['temperature']:g}", str(cell["at_once"]),
            f"{plain:.2f}", f"{plain / auto:.2f}",
            f"{took[best] / auto:.2f} ({best})" if len(took) > 1 else "",
        ])  # fmt: skip
    header = ("context", "text", "T", "at once", "vLLM, ms per token")
    return markdown((*header, "`Auto` over it", "over the best other"), rows)


@table("transformers")
def transformers() -> str:
    """Return speeds of transformers' generate over SDPA with the default cache."""
    return _over_sdpa("epyc-2core")


@table("transformers-zen5")
def transformers_zen5() -> str:
    """Return the same of Zen 5, without prompts."""
    return _over_sdpa("epyc-zen5-2core")


def _over_sdpa(folder: str) -> str:
    found = read(f"{folder}/transformers-generate.jsonl")
    ways = [way for way in dict.fromkeys(row["way"] for row in found) if way != "sdpa"]
    contexts = sorted({row["context"] for row in found})
    over = {(row["way"], row["context"]): row["over_sdpa"] for row in found}
    rows = []
    for way in ways:
        decoded = [f"{over[way, context]['decoding']:.2f}" for context in contexts]
        prompt = over[way, contexts[-1]]["prefill"]
        rows.append([way, *decoded, *([f"{prompt:.2f}"] if prompt else [])])
    header = ["times as fast per token as SDPA with the default cache", *map(size, contexts)]
    if len(rows[0]) > len(header):
        header.append(f"prompt of {size(contexts[-1])}")
    return markdown(header, rows)


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
