"""LongSpec's two tricks of training, each left out once, on the embedded target.

    python ablations.py --out DIR

trains a drafter on short rows four times: as `specattn train longspec` does; with plain positions;
without flash noise; and from a random start. Each then meets what it was not trained on, long
held-out text: loss by position, acceptance length, and the loss of the first steps of training on
long rows. Results go to DIR/ablations.json, pictures beside it. What is done is kept in DIR, and
the same command goes on from there. A quarter of an hour on two idle cores.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import held_out_files, read_texts, training_files
from measure_drafter import acceptance, held_out_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from specattn.decoding import LongSpec
from specattn.drafters import LongSpecDrafter
from specattn.training import Documents, DrafterTrainer, LongSpecObjective, PackedRows
from specattn.training.longspec import LEVELS, start_from_target
from specattn.training.target import last_layer_cache

HERE = Path(__file__).parent
VARIANTS = {
    "LongSpec": {},
    "plain positions": {"anchor_offset": False},
    "no flash noise": {"levels": 1},
    "random start": {"from_target": False},
}
SHIFTS = (1, 3, 5)
SMOOTHED = 4
BUCKETS = (0, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Size:
    """How much is trained and measured."""

    row_length: int = 256
    rows: int = 16
    steps: int = 80
    learning_rate: float = 1e-3
    long_row_length: int = 8192
    long_steps: int = 16
    long_learning_rate: float = 3e-4
    contexts: tuple = (4096,)
    long_rows: int = 2
    prompts: int = 3
    new_tokens: int = 64
    positions: tuple = BUCKETS
    files: int | None = None


TOY = Size(
    row_length=32,
    rows=2,
    steps=2,
    long_row_length=64,
    long_steps=2,
    contexts=(64,),
    prompts=1,
    new_tokens=4,
    positions=(0, 16, 64),
    files=3,
)


class Study:
    """Target, text and sizes, shared by all variants."""

    def __init__(self, size, out):
        self.size, self.out = size, out
        self.tokenizer = AutoTokenizer.from_pretrained(HERE)
        self.target = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.bfloat16).eval()
        self.exact_target = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32).eval()
        texts = read_texts(held_out_files())
        self.held_out = [
            torch.tensor(self.tokenizer(text, verbose=False).input_ids) for text in texts
        ]

    def train(self, drafter, folder, *, long=False, levels=LEVELS, anchor_offset=True):
        """Train on short or on long rows; return the loss of every step."""
        size = self.size
        rows, steps, length = (
            (1, size.long_steps, size.long_row_length)
            if long
            else (size.rows, size.steps, size.row_length)
        )
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=rows,
            learning_rate=size.long_learning_rate if long else size.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            weight_decay=0.1,
            adam_beta2=0.98,
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            bf16=True,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=False,
        )
        objective = LongSpecObjective(
            self.target, drafter, levels=levels, anchor_offset=anchor_offset and not long
        )
        documents = Documents(training_files()[: size.files])
        data = PackedRows(documents, self.tokenizer, length, seed=0, endless=True)
        trainer = DrafterTrainer(objective, arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    @cached_property
    def long_rows(self):
        """Held-out rows up to the last bucket: what the drafter reads of each, and its labels."""
        length = self.size.positions[-1]
        positions = torch.arange(length)[None]
        rows = []
        for ids in [ids for ids in self.held_out if len(ids) > length][: self.size.long_rows]:
            inputs = ids[None, :length]
            embeds = self.exact_target.get_input_embeddings()(inputs).detach()
            cache = last_layer_cache(self.exact_target, inputs, positions)
            rows.append(((embeds, positions, *cache), ids[1 : length + 1]))
        return rows

    @torch.no_grad()
    def loss_by_position(self, drafter):
        """Mean loss in each bucket of positions of `long_rows`, over some shifts of decoding."""
        buckets, head = self.size.positions, self.exact_target.lm_head
        losses = []
        for read, labels in self.long_rows:
            for shift in SHIFTS:
                hidden = drafter(*read, shift=shift)[0]
                parts = zip(hidden.split(2048), labels.split(2048), strict=True)
                losses.append(
                    torch.cat([F.cross_entropy(head(h), y, reduction="none") for h, y in parts])
                )
        mean = torch.stack(losses).mean(0)
        return [
            {"from": low, "to": high, "loss": round(mean[low:high].mean().item(), 4)}
            for low, high in zip(buckets, buckets[1:], strict=False)
        ]

    def run(self, name, options):
        """Train and measure one variant, or read what was found before."""
        options = dict(options)
        known = self.out / f"{name.replace(' ', '-')}.json"
        if known.exists():
            return json.loads(known.read_text(encoding="utf-8"))
        torch.manual_seed(0)
        drafter = LongSpecDrafter.for_target(self.target, target="examples/tiny").float()
        if options.pop("from_target", True):
            start_from_target(drafter, self.target)
        print(f"{name}: short rows", flush=True)
        found = {"short": self.train(drafter, self.out / "trainer", **options)}
        drafter.eval()
        print(f"{name}: measuring", flush=True)
        found["by_position"] = self.loss_by_position(drafter)
        found["acceptance"] = [
            {
                "context": context,
                **acceptance(
                    self.exact_target,
                    LongSpec(drafter),
                    held_out_prompts(self.held_out, context, self.size.prompts),
                    temperature=0.0,
                    new_tokens=self.size.new_tokens,
                ),
            }
            for context in self.size.contexts
        ]
        if name in ("LongSpec", "plain positions"):
            print(f"{name}: long rows", flush=True)
            found["long"] = self.train(drafter.train(), self.out / "trainer", long=True)
            found["by_position_after_long"] = self.loss_by_position(drafter.eval())
        known.write_text(json.dumps(found), encoding="utf-8")
        return found


def difference(losses, others):
    """Mean of ``losses - others`` over steps on the same rows, and its standard error.

    Steps on single rows differ by their text far more than by the drafter, so only pairs tell.
    """
    pairs = torch.tensor(losses, dtype=torch.float64) - torch.tensor(others, dtype=torch.float64)
    return {
        "mean": round(pairs.mean().item(), 4),
        "error": round(pairs.std().item() / len(pairs) ** 0.5, 4),
    }


def draw(results, folder):
    """Draw both ablations as PNG into ``folder``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name in ("LongSpec", "plain positions"):
        label = {"LongSpec": "anchor-offset indices"}.get(name, name)
        buckets = results[name]["by_position"]
        left.plot([b["to"] for b in buckets], [b["loss"] for b in buckets], "o-", label=label)
        curve = torch.tensor(results[name]["long"])
        smooth = curve.unfold(0, min(SMOOTHED, len(curve)), 1).mean(-1)
        right.plot(smooth, label=label)
    left.set(xscale="log", xlabel="position, up to", ylabel="loss, nats per token")
    left.set_title("after training on short rows", fontsize="medium")
    right.set(xlabel=f"step (mean of {SMOOTHED})", ylabel="loss, nats per token")
    right.set_title("then training on long rows", fontsize="medium")
    left.legend(frameon=False)
    right.legend(frameon=False)
    figure.savefig(folder / "ablation-anchor-offset.png", dpi=120)
    pyplot.close(figure)

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name in ("LongSpec", "no flash noise"):
        label = {"LongSpec": "flash noisy training"}.get(name, name)
        curve = torch.tensor(results[name]["short"])
        left.plot(curve.unfold(0, min(SMOOTHED, len(curve)), 1).mean(-1), label=label)
        rates = results[name]["acceptance"][0]["position_rates"]
        right.plot(range(1, 1 + len(rates)), rates, "o-", label=label)
    left.set(xlabel=f"step (mean of {SMOOTHED})", ylabel="training loss, nats per token")
    right.set(xlabel="depth in the tree", ylabel="passes that accept a token there", ylim=(0, 1))
    context = results["LongSpec"]["acceptance"][0]["context"]
    right.set_title(f"prompts of {context} tokens, temperature 0", fontsize="medium")
    left.legend(frameon=False)
    right.legend(frameon=False)
    figure.savefig(folder / "ablation-flash-noise.png", dpi=120)
    pyplot.close(figure)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 2)[2]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results and pictures")
    parser.add_argument("--toy", action="store_true", help="seconds: all steps, nothing learnt")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    size = TOY if options.toy else Size()
    study = Study(size, options.out)
    results = {name: study.run(name, variant) for name, variant in VARIANTS.items()}
    summary = {
        "size": asdict(size),
        "long_rows_plain_positions_minus_anchor_offset": difference(
            results["plain positions"]["long"], results["LongSpec"]["long"]
        ),
        "variants": results,
    }
    text = json.dumps(summary, indent=1)
    (options.out / "ablations.json").write_text(text + "\n", encoding="utf-8")
    draw(results, options.out)


if __name__ == "__main__":
    main()
