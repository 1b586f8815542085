"""Time the passes that decoding is made of, at a real model's shape with random weights.

    python bench/decode_shapes.py --shape llama-3.1-8b --context 32k

Random weights accept no drafts that mean anything, so no speed-up is claimed here. What a pass
costs does not depend on the weights: plain step, verification, selection, sparse draft step, and
from them the acceptance length at which a Vegas round is worth more than plain decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from roofline import arguments, report
from roofline.ceilings import Ceilings
from roofline.ceilings import measure as measure_ceilings
from roofline.machine import describe, serving
from roofline.timing import Stopwatch, Timing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import specattn
from specattn.decoding import Plain, Target, Vegas, generate
from specattn.decoding.target import Selection

MODELS = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    },
    "tiny": {
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    },
}
SMOKE = {"shape": "tiny", "layers": 2, "context": 1024, "prompt": 512, "new_tokens": 8}


@dataclass(frozen=True)
class Pass:
    """One kind of pass: its time, as replayed from a CUDA graph where there is one, and eagerly."""

    name: str
    rows: int
    bytes: int
    time: Timing
    eager: Timing | None


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and return 0; bad arguments exit with status 2."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.smoke:
        vars(options).update(SMOKE)
    device = arguments.device(options.device, parser)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        try:
            method = Vegas(gamma=options.gamma, ratio=options.ratio)
            file = stack.enter_context(open(options.json, "w")) if options.json else None
        except (ValueError, OSError) as failure:
            parser.error(str(failure))
        torch.manual_seed(0)
        model = _model(options.shape, options.layers, device)
        machine, ceilings = describe(device), measure_ceilings(device, seconds=0.5)
        setting = {
            "shape": options.shape,
            "layers": model.config.num_hidden_layers,
            "context": options.context,
            "gamma": method.gamma,
            "ratio": method.ratio,
            "weights": "random",
        }
        report.write_line(file, report.run_record(machine, serving(device), ceilings) | setting)
        print(
            f"{machine['machine']['name']} | " + ", ".join(f"{k} {v}" for k, v in setting.items())
        )
        passes = _passes(model, method, options.context, options.budget)
        for one in passes:
            report.write_line(file, _record(one, ceilings))
        _print_passes(passes, ceilings, method)
        for one_method in (Plain(), method):
            statistics = _generate(model, one_method, options.prompt, options.new_tokens)
            name = type(one_method).__name__.lower()
            report.write_line(file, {"kind": "generate", "method": name, **statistics})
            _print_split(name, statistics)
    return 0


def _passes(model: PreTrainedModel, method: Vegas, context: int, budget: float) -> list[Pass]:
    """Time every kind of pass behind a cache of ``context`` random tokens."""
    device, rows = model.device, method.max_nodes
    target = Target(model, 1, context + rows)
    target.cache.storage.normal_()
    target.cache.seqlens.fill_(context)
    tokens = torch.randint(model.config.vocab_size, (1, rows), device=device)
    root, chain = (specattn.Tree.chain(n, device=device) for n in (0, method.gamma))
    with target.attached():
        scores = target.verify(chain, tokens, collect=True)[1]

        def select() -> tuple[torch.Tensor, torch.Tensor]:
            return specattn.select_topk(
                scores.flatten(0, 1),
                target.cache.seqlens.repeat(target.full_layers),
                ratio=method.ratio,
                min_tokens=method.min_tokens,
            )

        selection = _with_root(*select(), context)
        calls: dict[str, Callable] = {
            "plain step": lambda: target.verify(root, tokens[:, :1]),
            "verify": lambda: target.verify(chain, tokens),
            "verify, scores": lambda: target.verify(chain, tokens, collect=True),
            "select": select,
            "draft step": lambda: target.draft(tokens[:, :1], 0, selection),
        }
        times, eager = _times(calls, Stopwatch(device), budget)
    weights, token = _weight_bytes(model), _token_bytes(target)
    chosen = int(selection.lengths[0])
    # name -> rows, bytes that must be read and written
    tasks = {
        "plain step": (1, weights + token * (context + 1)),
        "verify": (rows, weights + token * (context + rows)),
        "verify, scores": (rows, weights + token * (context + rows) + nbytes(scores)),
        "select": (0, nbytes(scores)),
        "draft step": (1, weights + token * chosen),
    }
    return [
        Pass(name, *task, Timing.of(times[name]), Timing.of(eager[name]) if eager else None)
        for name, task in tasks.items()
    ]


def _times(
    calls: dict[str, Callable], stopwatch: Stopwatch, budget: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds of each call, and on a GPU also its seconds without a CUDA graph."""
    if stopwatch.device.type != "cuda":
        return stopwatch.alternate(calls, budget=budget), {}
    eager = stopwatch.alternate(calls, budget=budget)
    try:
        graphs = {name: stopwatch.prepare(call) for name, call in calls.items()}
    except RuntimeError as failure:
        print(f"no CUDA graphs, times are eager: {failure}", file=sys.stderr)
        return eager, {}
    return stopwatch.alternate(graphs, budget=budget), eager


def _with_root(indices: torch.Tensor, lengths: torch.Tensor, context: int) -> Selection:
    """Return what the first draft step reads: the selected tokens and the root behind them."""
    chosen = int(lengths[0])
    indices = torch.nn.functional.pad(indices, (0, 1))
    indices[:, chosen] = context
    return Selection(indices[:, None].contiguous(), lengths[:1] + 1)


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that every pass reads: all but the table of embeddings."""
    return sum(map(nbytes, model.parameters())) - nbytes(model.get_input_embeddings().weight)


def _token_bytes(target: Target) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return nbytes(target.cache.storage[:, :, 0, 0])


def _generate(model: PreTrainedModel, method, prompt: int, new_tokens: int) -> dict:
    """Run the real loop and return its statistics; a first short run compiles the kernels."""
    ids = torch.randint(model.config.vocab_size, (1, prompt), device=model.device)
    for count in (2, new_tokens):
        output = generate(
            model, ids, method, max_new_tokens=count, min_new_tokens=count, temperature=0.0
        )
    return output.statistics.to_dict()


def _model(shape: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    config = AutoConfig.for_model(
        **MODELS[shape] | ({"num_hidden_layers": layers} if layers else {}),
        tie_word_embeddings=False,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _print_passes(passes: list[Pass], ceilings: Ceilings, method: Vegas) -> None:
    seconds = {one.name: one.time.median for one in passes}
    print(f"{'pass':16}{'T':>4}{'time':>12}{'+-':>6}{'eager':>12}{'of peak':>9}{'plain steps':>13}")
    for one in passes:
        share = one.bytes / one.time.median / ceilings.bandwidth
        eager = f"{one.eager.median * 1e3:.2f} ms" if one.eager else "-"
        print(
            f"{one.name:16}{one.rows or '-':>4}{one.time.median * 1e3:>9.2f} ms"
            f"{one.time.spread:>6.0%}{eager:>12}{share:>9.1%}"
            f"{one.time.median / seconds['plain step']:>13.2f}"
        )
    print(
        f"A Vegas round of {method.gamma} drafted tokens costs "
        f"{round_cost(seconds, method.gamma):.2f} plain steps: it pays when the mean acceptance "
        f"length, bonus token included, is above that."
    )


def round_cost(seconds: dict[str, float], gamma: int) -> float:
    """Return how many plain steps one round of Vegas takes, from the seconds of each pass."""
    drafting = gamma * seconds["draft step"] + seconds["select"]
    return (drafting + seconds["verify, scores"]) / seconds["plain step"]


def _print_split(name: str, statistics: dict) -> None:
    parts = " ".join(f"{part} {statistics[f'{part}_seconds']:.3f} s" for part in _PARTS)
    print(
        f"{name}: {statistics['new_tokens']} tokens in {statistics['passes']} passes, "
        f"{statistics['tokens_per_second']:.1f} tokens/s (random weights); {parts}"
    )


_PARTS = ("prefill", "draft", "target", "accept")


def _record(one: Pass, ceilings: Ceilings) -> dict:
    bandwidth = one.bytes / one.time.median
    share = bandwidth / ceilings.bandwidth
    return {"kind": "pass", **asdict(one), "bandwidth": bandwidth, "share": share}


def _parser() -> arguments.Parser:
    parser = arguments.Parser(prog="decode_shapes.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--shape", choices=MODELS, default="llama-3.1-8b")
    add("--layers", type=arguments.number, help="fewer layers than the model has")
    add("--context", type=arguments.number, default=32768, help="cached tokens, such as 32k")
    add("--gamma", type=arguments.number, default=6, help="drafted tokens of a round")
    add("--ratio", type=arguments.positive, default=0.07, help="share of the cache a draft reads")
    add("--prompt", type=arguments.number, default=4096, help="random prompt of the whole loop")
    add("--new-tokens", type=arguments.number, default=32)
    add("--budget", type=arguments.positive, default=2.0, help="seconds for all kinds of passes")
    add("--smoke", action="store_true", help="tiny, in seconds, on any device")
    add("--json", type=Path, metavar="FILE", help="write JSON Lines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
