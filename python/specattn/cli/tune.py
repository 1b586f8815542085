"""``specattn tune``: find a method's options for a model and a machine, by measuring."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.interrupts import Interrupted
from specattn.cli.options import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    SeedOption,
    TemperatureOption,
)

if TYPE_CHECKING:
    from specattn.tuning import Record, Sweep, Tuner

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Find a method's options for a model, a machine and texts of your own.",
)

SCHEMA = "specattn.tune.vegas/1"


@app.callback()
def tune() -> None:
    """Find a method's options for a model, a machine and texts of your own."""


@app.command()
def vegas(
    prompts: Annotated[
        list[Path], typer.Option(help="UTF-8 text, or a folder of such; may be repeated.")
    ],
    output: Annotated[Path, typer.Option(help="JSON file, whole after every measurement.")],
    model: ModelOption = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each prompt [default: those of the shortest]."),
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Shares of the cache, such as 0.03,0.07,0.2.")
    ] = None,
    gammas: Annotated[str | None, typer.Option(help="Drafted tokens, such as 2,4,6.")] = None,
    large_gamma: Annotated[
        int | None, typer.Option(help="Drafted tokens of the first step [default: 12].")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Least tokens that a draft reads [default: 256].")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Per request and run.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs of each candidate and batch.")] = 2,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the output has.")] = False,
    pictures: Annotated[
        Path | None, typer.Option(help="Draw the paper's figures 8 and 13 into this folder.")
    ] = None,
) -> None:
    """Tune Vegas in the paper's three steps: ratio with a large gamma, gamma, ratio again."""
    with one_line_errors():
        from specattn.cli.terminal import console
        from specattn.distributed.launch import refuse_ranks
        from specattn.tuning import Sweep

        refuse_ranks("specattn tune")
        given: dict[str, Any] = {
            "ratios": _numbers("--ratios", ratios, float),
            "gammas": _numbers("--gammas", gammas, int),
            "large_gamma": large_gamma,
            "min_tokens": min_tokens,
        }
        sweep = Sweep(
            **{name: value for name, value in given.items() if value is not None},
            new_tokens=new_tokens,
            repeats=repeats,
            batch=batch,
            temperature=temperature,
            seed=seed,
        )
        tuner = _tuner(model, prompts, context, sweep, dtype, device, output, resume)
    chosen = _run(tuner)
    console.print(
        f"[bold]{chosen['method']}[/]: {chosen['tokens_per_second']:.1f} tokens/s, "
        f"{chosen['speedup']:.2f} times plain decoding, "
        f"{chosen['accepted_per_round']:.2f} drafted tokens accepted per round"
    )
    if chosen["speedup"] < 1:
        console.print("Plain decoding is faster for these prompts on this machine.")
    if pictures is not None:
        _draw(tuner.record, pictures)


def _tuner(
    folder: Path | None,
    paths: list[Path],
    context: int | None,
    sweep: Sweep,
    dtype: str,
    device: str,
    output: Path,
    resume: bool,
) -> Tuner:
    """Check everything that can be wrong, cheapest first, then load."""
    import torch

    from specattn.cli.loading import (
        decoding_dtype,
        device_named,
        load_tokenizer,
        model_folder,
        silence_transformers,
        versions,
    )
    from specattn.cli.prompts import read_text
    from specattn.decoding.model.checkpoint import load_causal_model
    from specattn.training import find_files
    from specattn.tuning import Record, Tuner

    folder = model_folder(folder)
    files = find_files(paths)
    if len(files) % sweep.batch:
        raise ValueError(f"--prompts: {len(files)} files do not fill batches of {sweep.batch}")
    texts = [read_text(path, "--prompts") for path in files]
    chosen_device = device_named(device)
    chosen_dtype = decoding_dtype(dtype, chosen_device)
    silence_transformers()
    tokenizer = load_tokenizer(folder)
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    length = context or min(map(len, tokens))
    for path, ids in zip(files, tokens, strict=True):
        if len(ids) < length:
            raise ValueError(f"--context: {path} has {len(ids)} tokens, fewer than {length}")
    loaded = load_causal_model(folder, chosen_dtype, chosen_device)
    room = loaded.config.max_position_embeddings - sweep.new_tokens
    if length > room:
        raise ValueError(f"--context: with the new tokens there is room for {room}, not {length}")
    heading: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": versions(),
        "model": {
            "path": str(folder),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
        },
        "prompts": {"files": list(map(str, files)), "context": length},
        "sweep": asdict(sweep),
    }
    record = Record(output, heading, resume=resume)
    prompts = [torch.tensor(ids[:length]) for ids in tokens]
    return Tuner(loaded, prompts, sweep, record)


def _run(tuner: Tuner) -> dict[str, Any]:
    """Tune, with a bar; what is measured when it is interrupted stays in the file."""
    from specattn.cli.terminal import console, progress_bars

    with progress_bars() as progress:
        task = progress.add_task("", total=tuner.runs)
        try:
            return tuner.run(lambda step: progress.update(task, description=step, advance=1))
        except Interrupted:
            kept = len(tuner.record.measurements)
            console.print(f"interrupted; {kept} measurements are kept, go on with --resume")
            raise


def _draw(record: Record, folder: Path) -> None:
    from specattn.cli.terminal import console
    from specattn.tuning.pictures import draw

    try:
        files = draw(record, folder)
    except ImportError:
        console.print("no pictures: matplotlib is not installed (pip install 'specattn[bench]')")
        return
    console.print("pictures: " + ", ".join(map(str, files)))


def _numbers(option: str, text: str | None, kind: type) -> tuple | None:
    """Read numbers separated by commas."""
    try:
        return None if text is None else tuple(map(kind, text.split(",")))
    except ValueError:
        raise ValueError(f"{option}: expected numbers separated by commas, got {text!r}") from None
