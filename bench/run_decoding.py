"""Measure decoding methods: tokens per second, what was accepted, where the time goes.

    python bench/run_decoding.py --quick
    python bench/run_decoding.py --method vegas:gamma=6 --context 4k,16k --temperature 0,1
    python bench/run_decoding.py --suite vegas --json vegas.jsonl --pictures out
    python bench/run_decoding.py --shape llama-3.1-8b --random-weights --acceptance vegas-qwen3-8b

`docs/benchmarks.md` says how to read the tables, `decoding/records.py` names the JSON fields.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import arguments
from common.machine import DISTURBING, describe, serving
from decoding import models, passes, pictures, show
from decoding.cases import Group
from decoding.comparison import DECODING
from decoding.measure import Plan, measure
from decoding.records import MEASURED, SCHEMA, File, case_record, of_kind, row_record
from decoding.simulation import Profile
from decoding.texts import Files, RandomTokens, Texts, held_out_files
from studies import options as command
from studies.papers import PROFILES
from studies.sections import Section
from transformers import PreTrainedModel

from specattn.decoding import Vegas

DRAFTING = {"vegas": {"switch": False}}  # a row is about the method, also where it does not pay


@dataclass
class Setting:
    """What all rows of a run share."""

    model: PreTrainedModel
    name: str
    texts: Texts
    plan: Plan
    profile: Profile | None
    defaults: dict[str, dict[str, Any]]  # by method, options that hold unless a row says otherwise
    budget: float  # seconds for the passes of one context
    note: str | None  # at the head of every line of output

    @property
    def acceptance(self) -> str:
        """What every record says of its acceptance."""
        return self.note or MEASURED


def main(argv: list[str] | None = None) -> int:
    """Measure; return 0 when all is right, 1 for a fault, 2 for bad arguments, 130 cut short."""
    parser = command.parser((__doc__ or "").splitlines()[0])
    options = parser.parse_args(argv)
    if options.compare:
        return _compare(options, parser)
    device = arguments.device(options.device, parser)
    try:
        command.complete(options)
        sections = command.sections(options)
        file = File(options.json, resume=options.resume)
        setting = _setting(options, sections, device)
        _check_texts(setting, sections)
        file.begin(_run_record(setting, options, device))
    except (ValueError, OSError) as failure:
        parser.error(" ".join(str(failure).split()))
    show.say(_heading(setting, sections, file.records[-1]), setting.note)
    try:
        _measure_all(setting, sections, file)
    except KeyboardInterrupt:
        kept = f"interrupted; {len(file.rows)} rows are kept"
        hint = f", go on with --resume --json {file.path}" if file.path else ""
        print(show.lines(kept + hint, setting.note), file=sys.stderr)
        return 130
    _print_rows(setting, file)
    if options.pictures:
        _draw(file, sections, options.pictures, setting.note)
    return _verdict(file, setting.note)


def _compare(options: argparse.Namespace, parser: arguments.Parser) -> int:
    try:
        return DECODING.show(*options.compare)
    except (OSError, ValueError) as failure:
        parser.error(f"--compare: {failure}")


def _measure_all(setting: Setting, sections: Sequence[Section], file: File) -> None:
    """Measure what the file does not have yet, and print each section when it is complete."""
    todo = [
        (section, group)
        for section in sections
        for group in section.groups
        if not file.has(_known(setting, section, group))
    ]
    total = sum(_weight(section.plan(setting.plan), group) for section, group in todo)
    with show.progress(total, setting.note) as advance:
        for section in sections:
            for group in section.groups:
                if (section, group) not in todo:
                    continue
                plan = section.plan(setting.plan)
                each = _weight(plan, group) / plan.runs(group)
                rows = measure(
                    setting.model,
                    setting.texts,
                    group,
                    plan,
                    setting.profile,
                    lambda name, each=each: advance(name, each),
                    setting.defaults,
                )
                known = _known(setting, section, group)
                for row, record in zip(rows, known, strict=True):
                    file.add(row_record(row, record))
            _time_passes(setting, section, file)
            _print_section(setting, section, file)


def _time_passes(setting: Setting, section: Section, file: File) -> None:
    """Time the passes of a round one by one, at every context of a section that asks for it."""
    if not section.passes:
        return
    method = Vegas(gamma=section.passes)
    for context in sorted({group.context for group in section.groups}):
        known = {
            "section": section.name,
            "model": setting.name,
            "context": context,
            "acceptance": setting.acceptance,
        }
        if any(known.items() <= one.items() for one in of_kind(file.records, "pass")):
            continue
        found = passes.measure(setting.model, method, context, setting.budget)
        for one in found:
            file.add({**one.to_dict(), **known})
        seconds = {one.name: one.time.median for one in found}
        show.say(
            f"\n{passes.table(found, context)}\n"
            f"A round of Vegas with {method.gamma} drafted tokens costs "
            f"{passes.round_cost(seconds, method.gamma):.2f} plain steps.",
            setting.note,
        )


def _print_section(setting: Setting, section: Section, file: File) -> None:
    """Print a paper's section as the paper lays it out."""
    if section.title:
        timed = [one for one in of_kind(file.records, "pass") if one["section"] == section.name]
        text = section.text(section.rows(file.rows), file.records[0]["suite"], timed)
        show.say("\n" + text, setting.note)


def _print_rows(setting: Setting, file: File) -> None:
    """Print every row in full."""
    rows = file.rows
    for text in (show.table(rows), show.acceptance(rows), show.differences(rows)):
        if text:
            show.say("\n" + text, setting.note)


def _setting(
    options: argparse.Namespace, sections: Sequence[Section], device: torch.device
) -> Setting:
    """Build the model and what is read with it."""
    plan = Plan(options.new_tokens, options.texts, options.repeats, options.seed)
    dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    torch.manual_seed(options.seed)
    if options.shape is None:
        model, tokenizer = models.checkpoint(options.model, models.DTYPES[dtype], device)
        texts: Texts = Files(tokenizer, options.prompt or held_out_files())
        return Setting(model, options.model.name, texts, plan, None, DRAFTING, options.budget, None)
    profile = Profile.parse(options.acceptance, PROFILES)
    model = models.random_weights(options.shape, options.layers, models.DTYPES[dtype], device)
    texts = RandomTokens(model.config.vocab_size)
    asked = {e.name for s in sections for g in s.groups for e in g.entries}
    defaults = DRAFTING | {
        method: {"drafter": models.random_drafter(method, model, options.shape)}
        for method in asked & models.DRAFTERS.keys()
    }
    name = options.shape + (f" cut to {options.layers} layers" if options.layers else "")
    return Setting(model, name, texts, plan, profile, defaults, options.budget, profile.note)


def _check_texts(setting: Setting, sections: Sequence[Section]) -> None:
    """Raise ValueError where the texts are too short for what is to be measured."""
    for section in sections:
        for group in section.groups:
            setting.texts.prompts(0, group.context, 1)


def _beyond(setting: Setting, group: Group, plan: Plan) -> bool:
    """Whether a text leaves the positions that the model was made for."""
    positions = setting.model.config.max_position_embeddings
    return setting.profile is None and group.context + plan.new_tokens > positions


def _known(setting: Setting, section: Section, group: Group) -> list[dict[str, Any]]:
    plan = section.plan(setting.plan)
    return [
        case_record(
            group,
            entry,
            plan,
            model=setting.name,
            section=section.name,
            acceptance=setting.acceptance,
            beyond_positions=_beyond(setting, group, plan),
        )
        for entry in group.entries
    ]


def _weight(plan: Plan, group: Group) -> float:
    """Return how long a group takes beside others: passes over the weights and over the cache."""
    return plan.runs(group) * plan.new_tokens * group.batch * (1 + group.context / 8192)


def _run_record(
    setting: Setting, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    config = setting.model.config
    return {
        "kind": "run",
        "schema": SCHEMA,
        **describe(device),
        "backend": serving(device),
        "model": {
            "name": setting.name,
            "model_type": config.model_type,
            "layers": config.num_hidden_layers,
            "dtype": str(setting.model.dtype).removeprefix("torch."),
            "weights": "random" if setting.profile else "checkpoint",
        },
        "plan": asdict(setting.plan),
        "suite": options.suite,
        "acceptance": setting.acceptance,
    }


def _heading(setting: Setting, sections: Sequence[Section], run: dict[str, Any]) -> str:
    model, plan = run["model"], setting.plan
    text = (
        f"{run['machine']['name']} | commit {run['commit']} | torch {run['versions']['torch']} | "
        f"backend {run['backend']}\n"
        f"{model['name']}, {model['layers']} layers, {model['dtype']}, {model['weights']} weights"
        f" | {plan.new_tokens} new tokens, {plan.texts} texts, {plan.repeats} repeats"
    )
    if any(_beyond(setting, g, s.plan(plan)) for s in sections for g in s.groups):
        text += (
            f"\nwarning: some contexts and their new tokens go beyond the "
            f"{setting.model.config.max_position_embeddings} positions of {setting.name}: times "
            "hold, acceptance is that of a model outside its range"
        )
    if setting.profile is None:
        return text
    rates = ", ".join(f"{rate:g}" for rate in setting.profile.rates)
    return (
        f"{text}\ncache filled with random numbers, no prefill; every round is real, but what is "
        f"accepted is drawn: {rates} by position, given all before it, the last one for all deeper "
        f"({setting.profile.source})"
    )


def _draw(file: File, sections: Sequence[Section], folder: Path, note: str | None) -> None:
    written = []
    try:
        for section in sections:
            prefix = section.name.lower().replace(" ", "-") + "-" if section.name else ""
            rows = section.rows(file.rows)
            written += pictures.draw(rows, folder, note, section.pictures, prefix)
    except ImportError:
        show.say("\nno pictures: matplotlib is not installed", note)
        return
    show.say("\npictures: " + ", ".join(map(str, written)), note)


def _verdict(file: File, note: str | None) -> int:
    """Name what went wrong; return 1 if something did."""
    rows = file.rows
    disturbed = sum((row.get("others") or 0.0) > DISTURBING for row in rows)
    if disturbed:
        say = f"\n{disturbed} of {len(rows)} rows were measured while others used the machine"
        show.say(say, note)
    failed = [row for row in rows if row["fault"]]
    wrong = [
        row
        for row in rows
        if row.get("identity")
        and any(not one["near_tie"] for one in row["identity"]["differences"])
    ]
    for row in failed:
        print(show.lines(f"{show.label(row)}: {row['fault']}", note), file=sys.stderr)
    for row in wrong:
        text = f"{show.label(row)}: greedy text is not plain decoding's, and no tie explains it"
        print(show.lines(text, note), file=sys.stderr)
    return int(bool(failed or wrong))


if __name__ == "__main__":
    sys.exit(main())
