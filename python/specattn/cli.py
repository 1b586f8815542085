"""The ``specattn`` command: decode a checkpoint, compare methods, train drafters, see backends."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import specattn
from specattn import _cli_train, _cli_tune
from specattn._cli_errors import one_line_errors
from specattn._cli_plan import plan
from specattn.files import write_atomically

if TYPE_CHECKING:
    from specattn._long_run import LongRun
    from specattn._session import Session
    from specattn.decoding import Method

app = typer.Typer(
    name="specattn",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Speculative decoding over long contexts, exact at every temperature.",
)

app.add_typer(_cli_train.app, name="train")
app.add_typer(_cli_tune.app, name="tune")
app.command()(plan)

SCHEMA = "specattn.generate/1"

ModelOption = Annotated[
    Path | None,
    typer.Option(help="Hugging Face directory with safetensors [default: the embedded target]."),
]
PromptOption = Annotated[Path, typer.Option(help="UTF-8 text to continue.")]
NewTokensOption = Annotated[int, typer.Option(min=1, help="Stop after this many new tokens.")]
MinNewTokensOption = Annotated[int, typer.Option(min=0, help="Do not stop before so many.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")]
RepetitionOption = Annotated[
    float, typer.Option(min=0.01, help="Of tokens that are in the text already; 1 is none.")
]
PenaltyOption = Annotated[
    float, typer.Option(min=0.01, help="Of tokens in the last --penalty-window; 1 is none.")
]
WindowOption = Annotated[int, typer.Option(min=1, help="Last tokens that --penalty looks at.")]
MinPOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Drop tokens below this share of the best one's.")
]
EtaOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Eta sampling's epsilon, such as 2e-4; 0 is off.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampling.")]
PromptTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Read only the first N tokens of the prompt file.")
]
DtypeOption = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, or auto: float32 on a CPU, else as stored.")
]
DeviceOption = Annotated[str, typer.Option(help="Torch device, or auto: a GPU where there is one.")]
MethodOption = Annotated[
    str,
    typer.Option(help="NAME or NAME:OPTION=VALUE,... such as vegas:gamma=4,ratio=0.05."),
]
GammaOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens drafted per round. Vegas: [default: 6]. LongSpec: a chain instead of a tree.",
    ),
]
RatioOption = Annotated[
    float | None,
    typer.Option(help="Vegas: share of the prefix a draft step reads [default: 0.07]."),
]
DrafterOption = Annotated[
    Path | None,
    typer.Option(help="LongSpec: folder of the drafter [default: `longspec` in the model's]."),
]
WidthsOption = Annotated[
    str | None,
    typer.Option(help="LongSpec: tree nodes per level [default: 4,16,16,16,16]."),
]


@app.command()
def generate(
    prompt_file: PromptOption,
    model: ModelOption = None,
    method: MethodOption = "vegas",
    max_new_tokens: NewTokensOption = 128,
    min_new_tokens: MinNewTokensOption = 0,
    temperature: TemperatureOption = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k best tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep this much mass.")] = 1.0,
    min_p: MinPOption = 0.0,
    eta: EtaOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    penalty: PenaltyOption = 1.0,
    penalty_window: WindowOption = 1024,
    seed: SeedOption = 0,
    gamma: GammaOption = None,
    ratio: RatioOption = None,
    drafter: DrafterOption = None,
    widths: WidthsOption = None,
    prompt_tokens: PromptTokensOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write tokens, text and statistics here.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Save the run here every 30 seconds, to go on with later.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run that --state saved here; save it again.")
    ] = None,
) -> None:
    """Continue a file; the text goes to standard output, all else to standard error."""
    for option, file in (("--json", json_file), ("--state", state), ("--resume", resume)):
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"{option}: folder {file.absolute().parent} does not exist")
    chosen = _method(method, gamma=gamma, ratio=ratio, drafter=drafter, widths=_widths(widths))
    session = _session(model, prompt_file, prompt_tokens, max_new_tokens, dtype, device)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p or None,
        "eta_cutoff": eta,
        "repetition_penalty": repetition_penalty,
        "penalty": penalty,
        "penalty_window": penalty_window,
        "seed": seed,
    }
    tokens = {"max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens}
    begun = _started(session, sampling, resume or state, resume is not None, max_new_tokens)
    run = session.run(_prepared(chosen, session), begun, **tokens)
    session.console.print(session.table({method: run}))
    if json_file is not None:
        name = method.partition(":")[0]
        settings = {"method": {"name": name, **vars(chosen)}, "sampling": {**tokens, **sampling}}
        _write_json(json_file, {"schema": SCHEMA, **session.to_dict(), **settings, **run.to_dict()})
    if run.finish_reason == "interrupted":
        session.console.print(
            f"Interrupted after {len(run.new_tokens)} of {max_new_tokens} tokens."
        )
        raise typer.Exit(130)


@app.command()
def compare(
    prompt_file: PromptOption,
    model: ModelOption = None,
    methods: Annotated[
        str, typer.Option(help="As for generate, separated by commas.")
    ] = "plain,vegas",
    max_new_tokens: NewTokensOption = 128,
    min_new_tokens: MinNewTokensOption = 0,
    temperature: TemperatureOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    penalty: PenaltyOption = 1.0,
    penalty_window: WindowOption = 1024,
    seed: SeedOption = 0,
    gamma: GammaOption = None,
    ratio: RatioOption = None,
    drafter: DrafterOption = None,
    widths: WidthsOption = None,
    prompt_tokens: PromptTokensOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Continue a file with several methods, one after the other, and print them side by side."""
    options = {"gamma": gamma, "ratio": ratio, "drafter": drafter, "widths": _widths(widths)}
    chosen = {text: _method(text, **options) for text in _split_methods(methods)}
    session = _session(model, prompt_file, prompt_tokens, max_new_tokens, dtype, device)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": 0,
        "repetition_penalty": repetition_penalty,
        "penalty": penalty,
        "penalty_window": penalty_window,
        "seed": seed,
    }
    prepared = {name: _prepared(one, session) for name, one in chosen.items()}
    runs = {}
    for name, one in prepared.items():
        session.console.rule(f"[bold]{name}", align="left")
        runs[name] = session.run(
            one,
            session.start(sampling),
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
        )
    session.console.rule()
    session.console.print(session.table(runs))
    if temperature == 0:
        same = len({tuple(run.new_tokens) for run in runs.values()}) == 1
        verdict = "[bold green]yes" if same else "[bold red]no"
        session.console.print(f"Outputs identical, token for token: {verdict}")


@app.command()
def env() -> None:
    """Print the versions and the backends that serve this machine, and why not the rest."""
    import torch

    print(f"specattn  {specattn.__version__}")
    print(f"torch     {torch.__version__}, {torch.get_num_threads()} threads")
    for name, state in specattn.backends().items():
        print(f"{name:9} {state}")


def main() -> None:
    """Run the command; what a user can mend is one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False) or 0
    except typer.TyperException as error:
        print(f"specattn: error: {error.format_message()}", file=sys.stderr)
        code = 2
    except typer.Abort:
        code = 130
    except BrokenPipeError:
        # The reader of the text has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _split_methods(text: str) -> list[str]:
    from specattn.decoding.methods import split_methods

    return split_methods(text)


@one_line_errors()
def _method(text: str, **options: Any) -> Method:
    """Build a method from its text; `options` hold for whichever method has them."""
    from specattn.decoding import METHODS, parse_method

    try:
        name, given = parse_method(text)
    except ValueError as error:
        raise ValueError(f"--method: {error}") from None
    known = inspect.signature(METHODS[name]).parameters
    common = {key: value for key, value in options.items() if value is not None and key in known}
    return METHODS[name](**{**common, **given})


def _widths(text: str | None) -> tuple[int, ...] | None:
    """Read ``4,16,16``."""
    try:
        return None if text is None else tuple(map(int, text.split(",")))
    except ValueError:
        raise typer.BadParameter(
            f"--widths: expected numbers separated by commas, got {text!r}"
        ) from None


@one_line_errors()
def _prepared(method: Method, session: Session) -> Method:
    """Load what the method needs beside the model."""
    return method.prepared(session.model)


@one_line_errors()
def _session(*arguments: Any) -> Session:
    """Open a session; importing transformers takes seconds, so only commands that decode do."""
    from specattn._session import Session

    return Session.open(*arguments)


@one_line_errors()
def _started(
    session: Session, sampling: dict[str, Any], state: Path | None, resume: bool, new_tokens: int
) -> LongRun:
    """Begin a run, or go on with a saved one."""
    run = session.start(sampling, state, resume=resume)
    if len(run.tokens) >= new_tokens:
        raise ValueError(f"{state} has {len(run.tokens)} tokens, not fewer than {new_tokens}")
    return run


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write all of it or nothing."""
    text = json.dumps(content, indent=2, default=str) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
