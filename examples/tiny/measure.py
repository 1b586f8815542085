"""Measure the embedded target on held-out files: overall, by position, copying, and a sample.

``python measure.py [--model DIR] [--json FILE]`` measures any Hugging Face directory.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import held_out_files, read_texts
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
LONGEST = 32768
BUCKETS = (0, 1024, 2048, 4096, 8192, 16384, 32768)
SHORT_CONTEXT = 4096
COPY_DISTANCES = (512, 2048, 8192, 16384, 30720)
COPIED = 512
PROMPT = '''class Queue:
    """A first-in, first-out queue with a maximal size."""

    def __init__(self, maxsize=0):
'''


@torch.no_grad()
def token_losses(model, ids):
    """Loss in nats of each token of ``ids`` [S] after the first, given all before it: [S - 1]."""
    hidden = model.model(ids[None, :-1], use_cache=False)[0][0]
    pairs = zip(hidden.split(2048), ids[1:].split(2048), strict=True)
    parts = [F.cross_entropy(model.lm_head(h).float(), y, reduction="none") for h, y in pairs]
    return torch.cat(parts)


def short_context_losses(model, ids, context=SHORT_CONTEXT):
    """`token_losses`, but each token sees at most ``context`` tokens and at least half as many."""
    half = context // 2
    losses = [token_losses(model, ids[: context + 1])]
    for start in range(half, len(ids) - context, half):
        losses.append(token_losses(model, ids[start : start + context + 1])[half:])
    return torch.cat(losses)[: len(ids) - 1]


def loss_by_position(model, documents, losses, buckets=BUCKETS):
    """Mean loss in each bucket of positions, with the whole context and with a short one.

    The second number is the control: the same tokens, so what lies between the two is the effect
    of distance and not of the text.

    Parameters
    ----------
    model : Qwen3ForCausalLM
    documents, losses : list of Tensor
        Token ids and their `token_losses`; those shorter than the last bucket are left out.
    buckets : tuple of int

    Returns
    -------
    list of dict
    """
    length = buckets[-1]
    long = [i for i, loss in enumerate(losses) if len(loss) >= length]
    if not long:
        return []
    full = torch.stack([losses[i] for i in long])
    short = torch.stack([short_context_losses(model, documents[i]) for i in long])
    return [
        {
            "from": low,
            "to": high,
            "tokens": full[:, low:high].numel(),
            "loss": round(full[:, low:high].mean().item(), 3),
            "loss_short_context": round(short[:, low:high].mean().item(), 3),
        }
        for low, high in zip(buckets, buckets[1:], strict=False)
    ]


def copy_losses(model, ids, filler, distances=COPY_DISTANCES):
    """Loss of a passage of ``ids`` when it comes again after ``distance`` tokens, and unseen.

    Only the second half of the passage counts: by then the copy has been found or it has not.
    """
    passage = ids[1 : 1 + COPIED]
    texts = {0: ids[: 1 + COPIED]}
    for distance in (d for d in distances if d <= len(filler)):
        texts[distance] = torch.cat([ids[:1], passage, filler[: distance - COPIED], passage])
    return [
        {"distance": d, "loss": round(token_losses(model, x)[-COPIED // 2 :].mean().item(), 3)}
        for d, x in texts.items()
    ]


@torch.no_grad()
def sample(model, tokenizer, prompt=PROMPT, tokens=200, seed=0):
    """Continue ``prompt`` at temperature 0.7 among the likeliest 95 %."""
    torch.manual_seed(seed)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=tokens, do_sample=True, temperature=0.7, top_p=0.95)
    return tokenizer.decode(out[0, ids.shape[1] :])


def measure(directory, files=None, longest=LONGEST):
    """Measure the checkpoint in ``directory`` in float32.

    Parameters
    ----------
    directory : path
        Hugging Face directory with model and tokenizer.
    files : list of Path, optional
        Held-out files to read; all of them by default.
    longest : int
        Files are cut after so many tokens.

    Returns
    -------
    dict
        ``held_out`` (files, tokens, bytes, loss in nats per token, bits per byte), ``by_position``,
        ``copying`` and ``sample``.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = read_texts(held_out_files() if files is None else files)
    eos = tokenizer.eos_token_id
    documents = [torch.tensor([eos, *tokenizer(text).input_ids])[: longest + 1] for text in texts]

    losses = [token_losses(model, ids) for ids in documents]
    total, tokens = sum(x.sum().item() for x in losses), sum(map(len, losses))
    read = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in documents)
    # Only the library's tests are this long: a row of all shorter files stands for the modules.
    shorter = torch.cat([ids for ids in documents if len(ids) <= longest] or documents)
    shorter = shorter[: longest + 1]
    rows = [*documents, shorter], [*losses, token_losses(model, shorter)]
    return {
        "corpus": f"{len(documents)} held-out files of the standard library",
        "held_out": {
            "tokens": tokens,
            "bytes": read,
            "loss": round(total / tokens, 4),
            "bits_per_byte": round(total / read / 0.693147, 4),
        },
        "by_position": loss_by_position(model, *rows),
        "copying": copy_losses(model, documents[1], documents[0]),
        "sample": {"prompt": PROMPT, "text": sample(model, tokenizer)},
    }


def main():
    """Command line: measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=HERE, help="Hugging Face directory")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    numbers = json.dumps(measure(options.model), indent=2)
    print(numbers)
    if options.json:
        options.json.write_text(numbers + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
