"""``specattn tune``: find a method's options for a model and a machine, by measuring."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from specattn.cli.errors import Interrupted, numbers, one_line_errors
from specattn.cli.options import App, ModelOptions, option, takes_options
from specattn.cli.prompts import read_text
from specattn.cli.terminal import preload, progress_bars, say

if TYPE_CHECKING:
    from specattn.tuning import Tuner

app = App()

SCHEMA = "specattn.tune.vegas/1"
_LISTS = {"ratios": float, "gammas": int}


@app.callback()
def tune() -> None:
    """Find a method's options for a model, a machine and texts of your own."""


@dataclass(frozen=True, kw_only=True)
class TuningOptions(ModelOptions):
    """What is measured, and where it is written."""

    prompts: list[Path] = option(..., "UTF-8 text, or a folder of such; may be repeated.")
    output: Path = option(..., "JSON file, whole after every measurement.")
    context: int | None = option(None, "Tokens of each prompt [default: the shortest's].", min=1)
    ratios: str | None = option(
        None, "Shares of the cache, such as 0.03,0.07,0.2.", metavar="X,X,..."
    )
    gammas: str | None = option(None, "Drafted tokens, such as 2,4,6.", metavar="N,N,...")
    large_gamma: int | None = option(None, "Drafted tokens of the first step [default: 12].")
    min_tokens: int | None = option(None, "Least tokens that a draft reads [default: 256].")
    new_tokens: int = option(128, "New tokens of each request and run.")
    repeats: int = option(2, "Timed runs of each candidate and batch.")
    batch: int = option(1, "Prompts decoded together.")
    resume: bool = option(False, "Keep what the output has.")
    pictures: Path | None = option(
        None, "Draw the paper's figures 8 and 13 into this folder.", metavar="DIR"
    )


@app.command()
@takes_options
def vegas(options: TuningOptions) -> None:
    """Tune Vegas in the paper's three steps: ratio with a large gamma, gamma, ratio again."""
    with one_line_errors():
        tuner = _tuner(options)
    with progress_bars() as progress:
        task = progress.add_task("", total=tuner.runs)
        try:
            chosen = tuner.run(lambda step: progress.update(task, description=step, advance=1))
        except Interrupted:
            kept = len(tuner.record.measurements)
            say(f"interrupted; {kept} measurements are kept, go on with --resume")
            raise
    say(
        f"{chosen['method']}: {chosen['tokens_per_second']:.1f} tokens/s, "
        f"{chosen['speedup']:.2f} times plain decoding, "
        f"{chosen['accepted_per_round']:.2f} drafted tokens accepted per round",
        style="bold",
    )
    if chosen["speedup"] < 1:
        say("Plain decoding is faster for these prompts on this machine.")
    if options.pictures is not None:
        from specattn.tuning.pictures import draw

        try:
            say(f"pictures: {', '.join(map(str, draw(tuner.record, options.pictures)))}")
        except ImportError:
            say("no pictures: matplotlib is not installed (pip install 'specattn[bench]')")


def _tuner(options: TuningOptions) -> Tuner:
    """Check everything that can be wrong, cheapest first, then load."""
    preload("specattn.cli.loading")
    import torch

    from specattn.cli.loading import Checkpoint, versions
    from specattn.distributed.launch import refuse_ranks
    from specattn.training import find_files
    from specattn.tuning import Record, Sweep, Tuner

    refuse_ranks("specattn tune")
    given = {field.name: getattr(options, field.name, None) for field in fields(Sweep)}
    for name, kind in _LISTS.items():
        if (text := given[name]) is not None:
            given[name] = numbers(f"--{name}", text, kind)
    sweep = Sweep(**{name: value for name, value in given.items() if value is not None})
    files = find_files(options.prompts)
    if len(files) % sweep.batch:
        raise ValueError(f"--prompts: {len(files)} files do not fill batches of {sweep.batch}")
    texts = [read_text(path, "--prompts") for path in files]
    checkpoint = Checkpoint(options)
    tokens = [checkpoint.tokenizer(text)["input_ids"] for text in texts]
    length = options.context or min(map(len, tokens))
    for path, ids in zip(files, tokens, strict=True):
        if len(ids) < length:
            raise ValueError(f"--context: {path} has {len(ids)} tokens, fewer than {length}")
    model = checkpoint.load()
    room = model.config.max_position_embeddings - sweep.new_tokens
    if length > room:
        raise ValueError(f"--context: with the new tokens there is room for {room}, not {length}")
    heading = {
        "schema": SCHEMA,
        "versions": versions(),
        "model": checkpoint.describe(model),
        "prompts": {"files": list(map(str, files)), "context": length},
        "sweep": asdict(sweep),
    }
    record = Record(options.output, heading, resume=options.resume)
    return Tuner(model, [torch.tensor(ids[:length]) for ids in tokens], sweep, record)
