"""Draw the pictures of docs/results.md from bench/results: ``python docs/tools/results.py``."""

from __future__ import annotations

from statistics import geometric_mean

from figures import BLUE, GREEN, GREY, ORANGE, pyplot, save
from records import read, size

PEERS = {  # what the rows call it: what the picture does
    "transformers": ("transformers, SDPA", GREY),
    "vllm": ("vLLM", "#b9bec7"),
    "plain": ("specattn, plain", BLUE),
    "vegas": ("specattn, Vegas", ORANGE),
    "prompt_lookup": ("specattn, prompt lookup", GREEN),
}
WIDE = {
    "llama.cpp": ("llama.cpp", GREY),
    "vllm": ("vLLM", "#b9bec7"),
    "plain": ("specattn, plain", BLUE),
    "longspec": ("LongSpec", "#a9c2e3"),
    "poss": ("PosS", ORANGE),
    "suffix": ("suffix", GREEN),
    "auto": ("auto", "black"),
}
STYLES = {
    "auto": {"color": "black", "linewidth": 2.5, "zorder": 3},
    "plain": {"color": "black", "linestyle": "--"},
}
WAYS = {
    "sdpa, static cache": ("SDPA, static cache", GREY),
    "specattn": ("specattn, default cache", "#a9c2e3"),
    "specattn, its cache": ("specattn, its cache", ORANGE),
    "specattn, static cache": ("specattn, static cache", BLUE),
}


def main():
    """Draw all pictures into docs/figures."""
    pyplot.rcParams |= {"font.size": 10, "svg.hashsalt": "specattn"}
    draw_peers()
    draw_transformers()
    draw_vllm()
    draw_auto()
    draw_wide()


def bars(rows, names, value, title, label):
    """Return a figure with a group of bars for each context, a bar for each name."""
    figure, axes = pyplot.subplots(figsize=(8, 3.8), layout="constrained")
    contexts = sorted({row["context"] for row in rows})
    width = 0.8 / len(names)
    for number, (name, (shown, color)) in enumerate(names.items()):
        found = {row["context"]: value(row) for row in rows if row["name"] == name}
        places = [contexts.index(n) + (number - (len(names) - 1) / 2) * width for n in found]
        drawn = axes.bar(places, found.values(), width * 0.92, label=shown, color=color)
        axes.bar_label(drawn, fmt=lambda x: f"{x:.0f}" if x > 20 else f"{x:.2f}", fontsize=7)
    axes.set_xticks(range(len(contexts)), [size(n) for n in contexts])
    axes.set(xlabel="tokens of the prompt", ylabel=label)
    axes.set_title(f"{title}\n{origin(rows)}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def origin(rows):
    """Return machine, commits and dates of the rows."""
    runs = [row["run"] for row in rows]
    commits = sorted({run["commit"][:7] for run in runs})
    days = sorted({run["time"][:10] for run in runs})
    return f"{runs[0]['machine']['name']}, {' to '.join(days)}, commit {', '.join(commits)}"


def draw_peers():
    """Draw whole engines side by side."""
    rows = [row | {"name": row["method"]} for row in read("epyc-2core/decoding-peers.jsonl")]
    rows = [row for row in rows if row["name"] in PEERS and not row["settings"].get("ngram")]
    figure = bars(
        rows,
        PEERS,
        lambda row: row["tokens_per_second"]["median"],
        "New tokens per second, embedded target, float32, greedy, every text the same",
        "tokens per second",
    )
    figure.axes[0].set_yscale("log")
    figure.axes[0].set_yticks([50, 100, 200, 500, 1000, 2000], [50, 100, 200, 500, 1000, 2000])
    figure.axes[0].minorticks_off()
    save(figure, "results-engines")


def draw_wide():
    """Draw methods and engines on the widened target."""
    rows = [row | {"name": row["method"]} for row in read("epyc-2core/decoding-wide.jsonl")]
    rows = [r for r in rows if r["model"] == "wide qwen3-0.6b" and r["batch"] == 1]
    rows = [r for r in rows if not r["temperature"] and not r["fault"] and r["name"] in WIDE]
    figure = bars(
        rows,
        WIDE,
        lambda row: row["tokens_per_second"]["median"],
        "New tokens per second, Qwen3-0.6B's sizes (widened), EPYC, bfloat16, greedy",
        "tokens per second",
    )
    save(figure, "results-wide")


def draw_transformers():
    """Draw transformers' own generate with our attention and caches."""
    rows = [row | {"name": row["way"]} for row in read("epyc-2core/transformers-generate.jsonl")]
    figure = bars(
        [row for row in rows if row["name"] in WAYS],
        WAYS,
        lambda row: row["over_sdpa"]["decoding"],
        "transformers' generate: times as fast per token as SDPA with the default cache",
        "times SDPA",
    )
    figure.axes[0].axhline(1, color="black", linewidth=0.8)
    save(figure, "results-transformers")


def draw_vllm():
    """Draw vLLM with the plugin over vLLM as it is."""
    rows = [row for row in read("epyc-2core/engines.jsonl") if row["check"] in ("plain", "drafter")]
    rows = [row | {"name": row["variant"]} for row in rows]
    names = {
        "specattn": ("our attention, plain", BLUE),
        "Vegas": ("Vegas", ORANGE),
        "PromptLookup": ("PromptLookup", GREEN),
        "Suffix": ("Suffix", "#7d5ba6"),
    }
    figure = bars(
        rows,
        names,
        lambda row: row["ratio"],
        "Inside vLLM: speed over vLLM's own plain decoding, one request",
        "times vLLM as it is",
    )
    figure.axes[0].axhline(1, color="black", linewidth=0.8)
    save(figure, "results-vllm")


def draw_auto():
    """Draw tokens per second of `auto` and of every method against the prompt's length."""
    cells = read("epyc-zen5-2core/auto.jsonl", "cell")
    contexts = sorted({cell["context"] for cell in cells})
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    for axes, heat in zip(both, sorted({cell["temperature"] for cell in cells}), strict=True):
        for name in cells[0]["speed"]:
            speeds = {
                (cell["context"], cell["text"]): cell["speed"][name]
                for cell in cells
                if cell["temperature"] == heat
            }
            means = [geometric_mean(x for (n, _), x in speeds.items() if n == m) for m in contexts]
            axes.plot(contexts, means, label=name, **STYLES.get(name, {"marker": "."}))
        axes.set(xscale="log", yscale="log", xlabel="tokens of prompt")
        axes.set_xticks(contexts, [size(n) for n in contexts])
        axes.set_yticks(ticks := [100, 200, 500, 1000, 2000], ticks)
        axes.set(ylabel="new tokens per second", title=f"temperature {heat:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    both[1].legend(fontsize=8, frameon=False)
    save(figure, "results-auto")


if __name__ == "__main__":
    main()
