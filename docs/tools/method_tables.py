"""Tables of the methods' own pages."""

from __future__ import annotations

import json
from itertools import product, zip_longest
from statistics import mean, stdev
from typing import Any

from records import RESULTS, label, markdown, read, size, spread, table


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


@table("eight-bits")
def eight_bits() -> str:
    """Return how far logits over caches of 8 bits are from those over the model's own type."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read("epyc-zen3-2core/eight-bits.jsonl"):
        found.setdefault(row["kv_dtype"], []).append(row)
    rows = []
    for kv_dtype, texts in found.items():
        cosine, kl, same = (mean(row[name] for row in texts) for name in ("cosine", "kl", "same"))
        rows.append([f"`{kv_dtype}`", f"{cosine:.6f}", f"{kl:.1e}", f"{same:.1%}"])
    return markdown(("cache", "cosine of logits", "KL, nats", "same next token"), rows)


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


@table("poss-window")
def poss_window() -> str:
    """Return PosS-2's tokens per pass by length, with all of the text and the last 512 tokens."""
    found = {
        (r["context"], r["temperature"], r["settings"].get("window")): r["tau"]
        for r in read("xeon-2core/decoding-poss.jsonl")
        if r["section"] == "Long context" and r["method"] == "poss"
    }
    rows = [
        [size(n), *(f"{found[n, t, window]:.2f}" for t in (0, 1) for window in (None, 512))]
        for n in sorted({context for context, _, _ in found})
    ]
    return markdown(("context", "temperature 0", "window 512", "temperature 1", "window 512"), rows)


@table("poss-norms")
def poss_norms() -> str:
    """Return tokens per pass without and with EAGLE 3.1's norms, and the gain text by text."""
    taus: dict[tuple[int, float], dict[int, dict[bool, float]]] = {}
    for one in map(json.loads, (RESULTS / "epyc-2core/poss-norms.jsonl").read_text().splitlines()):
        texts = taus.setdefault((one["context"], one["temperature"]), {})
        texts.setdefault(one["text"], {})["norms" in one["method"]] = one["tau"]
    rows = []
    for place in sorted(taus, key=lambda place: place[::-1]):
        texts = taus[place]
        gains = [both[True] / both[False] - 1 for both in texts.values()]
        ahead = [sum(gain > 0 for gain in gains), gains.count(0), sum(gain < 0 for gain in gains)]
        row = [size(place[0]), f"{place[1]:g}", len(gains)]
        row += [f"{mean(both[kind] for both in texts.values()):.2f}" for kind in (False, True)]
        row.append(f"{mean(gains):+.1%} ±{stdev(gains) / len(gains) ** 0.5 * 100:.1f}")
        rows.append([*row, f"{min(gains):+.1%}, {max(gains):+.1%}", ", ".join(map(str, ahead))])
    header = ("context", "temperature", "texts", "without", "with", "gain")
    return markdown((*header, "worst and best text", "ahead, equal, behind"), rows)


@table("jetflow")
def jetflow() -> str:
    """Return tokens per pass of trees of 64 and 256 nodes beside EAGLE-3's, and rates by depth."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for one in map(json.loads, (RESULTS / "epyc-2core/jetflow.jsonl").read_text().splitlines()):
        if "tau" in one:
            found.setdefault((one["method"], one["temperature"]), []).append(one)
    rows = []
    for (method, heat), texts in sorted(found.items(), key=lambda pair: pair[0][::-1]):
        taus = [one["tau"] for one in texts]
        base = mean(one["tau"] for one in found["eagle3:total_tokens=64", heat])
        offered, accepted = (
            [sum(counts) for counts in zip_longest(*(one[name] for one in texts), fillvalue=0)]
            for name in ("offered_at", "accepted_at")
        )
        rates = (f"{n / of:.0%}" for n, of in zip(accepted, offered, strict=True) if of)
        row = [f"`{method}`", f"{heat:g}", len(texts)]
        row += [
            f"{mean(taus):.2f} ±{stdev(taus) / len(taus) ** 0.5:.2f}",
            f"{mean(taus) / base:.2f}",
        ]
        rows.append([*row, " ".join(rates)])
    header = ("method", "temperature", "texts", "tokens per pass", "of EAGLE-3's")
    return markdown((*header, "accepted at each depth, of what came so far"), rows)


@table("tokenswift")
def tokenswift() -> str:
    """Return alpha and times plain decoding up to each length, behind 4096 tokens."""
    names = {  # section and method: shown, levels of a draft, the paper's
        ("Figure 3", "tokenswift:budget=4096"): ("TokenSwift", 4, "0.68, 2.02 and 0.90, 3.23"),
        ("Figure 3", "tokenswift:budget=4096,k=0"): (
            "without n-grams (k = 0)", 4, "0.45, 1.56 and 0.40, 1.96",
        ),
        ("Table 5", "tokenswift:budget=131072,k=0"): (
            "k = 0, the full cache", 4, "0.42, 1.36 and 0.42, 1.47",
        ),
        ("Table 5", "tokenswift:budget=4096,k=0,dynamic=False"): (
            "k = 0, `dynamic=False`", 4, "0.19, 0.94 and 0.21, 1.44",
        ),
        ("Table 3", "medusa"): ("Medusa", 3, "0.39, 0.85 and 0.52, 0.99"),
        ("Table 3", "triforce:gamma=4,budget=4096"): (
            "TriForce, gamma 4, no small model", 4, "0.89, 1.51 and 0.96, 2.14",
        ),
        ("Table 3", "prompt_lookup"): ("prompt lookup", 10, ""),
        ("Table 3", "token_recycling"): ("Token Recycling", 6, ""),
    }  # fmt: skip
    found = {
        (row["section"], label(row)): row["lengths"]
        for row in read("xeon-2core/decoding-tokenswift.jsonl")
        if row["context"] == 4096
    }
    rows = []
    for place, (name, levels, paper) in names.items():
        cells = [
            f"{one['tau_without_bonus'] / levels:.2f}, {one['speedup']['plain']:.2f}"
            for one in found[place]
        ]
        rows.append([name, *cells, paper])
    lengths = [f"{one['new_tokens'] / 1024:.1f}k" for one in found["Table 3", "medusa"]]
    return markdown(("", *lengths, "paper, 20K and 100K"), rows)


@table("wide-pacing")
def wide_pacing() -> str:
    """Return times plain decoding with a given size, and with sizes that a run chooses."""
    found: dict[str, dict[tuple[float, bool], str]] = {}
    given = {}
    for row in read("epyc-zen5-2core/decoding-wide-pacing.jsonl"):
        if row["method"] != "plain":
            place = row["temperature"], bool(row["settings"])
            found.setdefault(row["method"], {})[place] = f"{row['speedup']['plain']:.2f}"
            if row["settings"]:
                given[row["method"]] = f"`{label(row)}`"
    places = list(product((0, 1), (True, False)))
    rows = [
        [f"`{name}`", given.get(name), *(cells.get(place) for place in places)]
        for name, cells in found.items()
    ]
    kinds = {True: "given", False: "by itself"}
    header = [f"T={heat}, {kinds[kind]}" for heat, kind in places]
    return markdown(("", "given size", *header), rows)
