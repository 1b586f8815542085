"""Build the embedded target from nothing: tokenizer, training, checkpoint, evaluation.

    python build.py --out DIR

reads the standard library of the Python that runs it. The training state is kept in ``DIR/work``,
and the same command goes on from it after an interruption. ``--toy`` does everything in seconds
with a model that has learnt nothing, to see that it works.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from bpe import train_tokenizer
from corpus import held_out_files, read_texts, training_files
from measure import measure
from train import Recipe, Stage, Trainer

SHIPPED = Recipe()
TOY = replace(
    SHIPPED,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    stages=(Stage(context=64, steps=4), Stage(context=128, steps=2, spread=0.5, echo=0.5)),
    batch_tokens=256,
    compile=False,
)
TOY_FILES = 4


def write_checkpoint(model, tokenizer, directory):
    """Save bf16 weights and the tokenizer as a Hugging Face directory."""
    model.set_attn_implementation("sdpa")
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build(recipe, out, files=None):
    """Build the model that ``recipe`` describes.

    Parameters
    ----------
    recipe : Recipe
    out : Path
        Folder of the checkpoint and ``evaluation.json``; ``out / "work"`` keeps the training state.
    files : int, optional
        Read only so many training and held-out files, the shortest ones of the latter.

    Returns
    -------
    dict
        What `measure` found, and the recipe's cost.
    """
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    texts = read_texts(training_files()[:files])
    print(f"tokenizer of {recipe.vocab_size} from {len(texts)} files", flush=True)
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    eos = tokenizer.eos_token_id
    documents = [torch.tensor([eos, *ids]) for ids in tokenizer(texts).input_ids]
    print(f"training on {sum(map(len, documents))} tokens", flush=True)
    trainer = Trainer(recipe, documents, work / "state.pt")
    write_checkpoint(trainer.run(), tokenizer, out)

    seen = {"corpus_tokens": sum(map(len, documents))}
    seen |= {"tokens_seen": recipe.steps * recipe.batch_tokens}
    return evaluate(out, files, trainer, seen)


def evaluate(out, files, trainer, seen):
    """Measure a checkpoint; write and return its ``evaluation.json``, with what it has `seen`."""
    print("evaluation on held-out files", flush=True)
    held_out = held_out_files(min_bytes=200)
    numbers = measure(out, held_out[-files:] if files else held_out)
    minutes = round(trainer.seconds / 60, 1)
    numbers["training"] = {**seen, "steps": trainer.step, "minutes": minutes}
    (out / "evaluation.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return numbers


def command_line(about, build, toy, shipped):
    """Build what the command line says: a recipe and a number of files where it is `toy`."""
    parser = argparse.ArgumentParser(description=about.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--toy", action="store_true", help="toy sizes: seconds, learns nothing")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe, files = toy if options.toy else (shipped, None)
    print(json.dumps(build(recipe, options.out, files), indent=2))


if __name__ == "__main__":
    command_line(__doc__, build, toy=(TOY, TOY_FILES), shipped=SHIPPED)
