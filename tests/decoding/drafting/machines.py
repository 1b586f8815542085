"""Machines that are made up: the real loop and drafters, by a clock that charges their times.

    PYTHONPATH=. python tests/decoding/drafting/machines.py [MACHINE ...]

prints, for each machine, text, temperature and length, the speed over plain decoding of the best
fixed size and of drafts that size themselves, behind a warm-up.
"""

import itertools
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from specattn.decoding import METHODS, Target
from specattn.decoding.drafting import pairs, sparse_chain
from specattn.decoding.drafting.pacer import Pacer
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.methods import longspec_block, suffix
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import NO_CAPTURE
from specattn.decoding.passes.cached_model import CachedModel
from specattn.decoding.passes.padding import ROWS
from specattn.decoding.passes.runner import Runner
from specattn.decoding.text.statistics import Clock

ROOT = Path(__file__).resolve().parents[3]
H100 = {"passes": {1: 9.8, 16: 9.8, 25: 10.7, 64: 13, 128: 18}, "beyond": 60, "lookup": 0.55}
MACHINES = {
    # Milliseconds of passes by rows of the batch, and of more; of a lookup; of drafts: least, of a
    # level, of a node of it; of the first of a shape, and of the second besides. (pacing.md)
    "toy": {
        "passes": {1: 1.5, 2: 1.55, 4: 1.75, 8: 2.3, 16: 3.5, 32: 6.5, 65: 12.5},
        "beyond": 99, "lookup": 0.1, "drafts": (0.2, 0.17, 0.06), "cold": (1.5, 0),
    },
    # As measured on two cores of a Zen 4, behind 4k tokens: a draft has much that is no level's.
    "toy zen4": {
        "passes": {1: 2.1, 2: 2.8, 4: 3.9, 8: 4.6, 16: 7.8, 32: 14.5, 65: 28},
        "beyond": 99, "lookup": 0.15, "drafts": (0.9, 0.58, 0.06), "cold": (1.5, 0),
    },
    "0.6b": {
        "passes": {1: 47, 2: 50, 4: 56, 8: 69, 16: 113, 32: 210, 65: 416},
        "beyond": 999, "lookup": 0.15, "drafts": (4, 6.5, 0.3), "cold": (47, 0),
    },
    "h100": H100 | {"drafts": (0, 0.9, 0.02), "cold": (600, 20)},
    # Passes from parts, as measured on 2026-11-27 and waited for; drafts as they may be.
    "h100 parts": {
        "passes": {1: 6.6, 16: 6.8, 32: 7.7, 64: 8.4, 128: 9.5, 256: 12},
        "beyond": 20, "lookup": 0.55, "drafts": (0.1, 0.5, 0.02), "cold": (600, 20),
    },
    "h100 x8": {
        "passes": {8: 12.7, 64: 15, 128: 19}, "beyond": 80, "lookup": 1.5,
        "drafts": (0.3, 1.1, 0.05), "cold": (600, 20),
    },
}  # fmt: skip
HOST = 0.05  # milliseconds of Python between rounds
FIXED = {
    "poss": [
        {"width": w, "depth": d, "total_tokens": n}
        for w, d, n in (
            (1, 1, 2),
            (1, 3, 4),
            (1, 6, 7),
            (4, 3, 8),
            (4, 6, 16),
            (10, 6, 32),
            (10, 6, 60),
        )
    ],
    "longspec": [
        {"widths": w} for w in ((1,), (1, 1), (2, 2), (2, 2, 2), (4, 4, 4, 4), (4, 8, 8, 8))
    ],
    "suffix": [{"nodes": n} for n in (2, 4, 8, 16, 32, 64)],
}
FIXED["eagle3"] = FIXED["mtp"] = FIXED["poss"]


READERS = ("poss", "eagle3", "mtp", "medusa")


class Machine:
    """A machine whose time passes as its drafts and passes do.

    With a `seed` times vary, one of seven is disturbed by others, and a shape's second is slow.
    """

    def __init__(self, name, seed=None):
        one = MACHINES[name]
        self.rows, self.seconds = (
            np.array(list(one["passes"])),
            np.array(list(one["passes"].values())),
        )
        self.beyond, self.lookup, self.drafts = one["beyond"], one["lookup"], one["drafts"]
        self.cold, self.graphs = one["cold"], name.startswith("h100")
        self.t, self.captured = 0.0, {}
        self.varies = None if seed is None else np.random.default_rng(seed)

    def spend(self, milliseconds, shape=None):
        if self.varies is not None:
            milliseconds *= np.exp(self.varies.normal(0, 0.07))
            milliseconds *= self.varies.choice((1.5, 2, 4)) if self.varies.random() < 1 / 7 else 1
            milliseconds *= 1.5 if self.captured.get(shape) == 1 else 1
        self.t += milliseconds / 1e3
        if shape is not None:
            met = self.captured[shape] = self.captured.get(shape, 0) + 1
            self.t += (self.cold[met - 1] if met <= len(self.cold) else 0) / 1e3

    def run_pass(self, rows, capture):
        if self.graphs:
            rows = self.captured_rows(rows, capture) or next((n for n in ROWS if n >= rows), rows)
        known = rows > self.rows[-1]
        ms = self.beyond if known else float(np.interp(rows, self.rows, self.seconds))
        self.spend(ms + HOST, None if known else ("pass", rows, str(capture)))

    def captured_rows(self, rows, capture):
        """Return the smallest captured size that serves such a pass: padding costs little."""
        of, most = str(capture), self.rows[-1]
        sizes = [n for kind, n, by in self.captured if kind == "pass" and by == of]
        return min((n for n in sizes if rows <= n <= most), default=None) if self.graphs else None

    def run_draft(self, name, width, depth):
        least, level, node = self.drafts
        self.spend(least + depth * (level + node * width), (name, width, depth))

    @contextmanager
    def at_work(self):
        """Let everything take this machine's time."""

        def timed(kind, name, before):
            real = getattr(kind, name)

            def run(own, *args, **options):
                before(own, *args, **options)
                return real(own, *args, **options)

            return patch.object(kind, name, run)

        def verify(target, tree, tokens, **options):
            self.run_pass(tokens.numel(), options.get("capture", NO_CAPTURE))

        def captured_rows(target, rows, capture=NO_CAPTURE):
            return self.captured_rows(rows * len(target.cache.seqlens), capture)

        def levels(block, root, widths, draw=None):
            self.run_draft("longspec", max(widths), len(widths))

        def chain(sparse, root, selectors):
            for _ in selectors:
                self.run_pass(len(root), "draft")

        def grow(block, root, width, depth):
            self.run_draft(type(block).__name__, width, depth)

        with (
            patch.object(Clock, "now", lambda _: self.t),
            patch.object(Clock, "seconds", lambda _, begin, end: end - begin),
            patch.object(Clock, "passed", lambda *_: True),
            patch.object(Runner, "captures", self.graphs),
            patch.object(CachedModel, "captured_rows", captured_rows),
            timed(CachedModel, "verify", verify),
            timed(pairs.PairBlock, "grow", grow),
            timed(longspec_block.DraftBlock, "grow", levels),
            timed(sparse_chain.SparseChain, "propose", chain),
            timed(suffix.SuffixDrafter, "find", lambda *_: self.spend(self.lookup)),
        ):
            yield self


def embedded():
    """Return the embedded target and its tokenizer."""
    folder = ROOT / "examples" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def texts(tokenizer, tokens):
    """Return a prompt of code and one of prose."""
    files = {
        "code": Path(sys.modules["argparse"].__file__ if "argparse" in sys.modules else ""),
        "prose": ROOT / "docs" / "vegas.md",
    }
    return {
        kind: torch.tensor(tokenizer(path.read_text())["input_ids"][:tokens])
        for kind, path in files.items()
    }


def snapshot_of(model, prompts, new_tokens):
    """Return what all methods start from."""
    readers = [METHODS[name]() for name in READERS]
    target = Target(model, len(prompts), len(prompts[0]) + new_tokens + 600)
    return PromptSnapshot(target, prompts, readers=readers)


def speed(snapshot, machine, method, new_tokens, heat, seed=7):
    """Return new tokens per second of the machine's time."""
    _, found = snapshot.run(
        method, new_tokens, LogitsProcessorList(), do_sample=heat > 0, seed=seed
    )
    return found


def compared(snapshot, name, methods, new_tokens, heat):
    """Return speeds over plain decoding: of the best fixed size, and of a method by itself.

    Each behind a warm-up: of the fixed ones by the same run, of the others by `everything`.
    """
    found = {}
    for method in methods:
        options = [{}] if method in ("plain", "auto") else FIXED[method]
        for given in options:
            machine = Machine(name)
            with machine.at_work():
                one = METHODS[method](**given)
                if method != "auto":
                    speed(snapshot, machine, one, 8, heat)
                    speed(snapshot, machine, one, new_tokens, heat)
                    found[method, str(given)] = speed(
                        snapshot, machine, one, new_tokens, heat
                    ).tokens_per_second
        if method == "plain":
            continue
        forget(snapshot)
        machine = Machine(name)
        with machine.at_work():
            warm(snapshot, METHODS[method](), heat)
            result = speed(snapshot, machine, METHODS[method](), new_tokens, heat)
            found[method, "self"] = result.tokens_per_second
            found[method, "details"] = (
                result.statistics.details if hasattr(result, "statistics") else result.details
            )
            found[method, "mal"] = result.total.mean_acceptance_length
    return found


def forget(snapshot):
    """Forget what was measured, learned and met."""
    known = Model.of(snapshot.target.model)._known
    for kind in [kind for kind in known if kind[0] == "pace"]:
        del known[kind]
    snapshot.target.workspace.met.clear()


def warm(snapshot, method, heat):
    """Calibrate everything."""
    real = Pacer.__init__

    def everything(self, *args, **options):
        real(self, *args, **options)
        self.calibrates = True

    with patch.object(Pacer, "__init__", everything):
        snapshot.run(method, 12, LogitsProcessorList(), do_sample=heat > 0, seed=7)


def main(machines):
    """Print all cells."""
    model, tokenizer = embedded()
    prompts = texts(tokenizer, 1024)
    print("machine  text  T method      n | fixed  self | of fixed or plain")
    for name, kind in itertools.product(machines or MACHINES, prompts):
        snapshot = snapshot_of(model, [prompts[kind]] * (8 if "x8" in name else 1), 512)
        for heat, n, method in itertools.product((0, 1), (32, 128), (*FIXED, "auto")):
            found = compared(snapshot, name, ["plain", method], n, heat)
            plain, own = found["plain", "{}"], found[method, "self"]
            given = [
                speed for (of, size), speed in found.items() if of == method and size[0] == "{"
            ]
            fixed = max([plain, *given])
            cell = f"{name:8} {kind:5} {heat} {method:9} {n:3}"
            print(
                f"{cell} | {fixed / plain:5.2f} {own / plain:5.2f} | {own / fixed:4.2f}", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
