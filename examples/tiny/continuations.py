"""Print texts that the embedded target writes, as JSON Lines, for its drafters to learn from.

``python continuations.py --texts 640 > own.jsonl`` continues pieces of training files, half of
them greedily and half at temperature 1.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from corpus import read_texts, training_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import generate

HERE = Path(__file__).parent


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--piece", type=int, default=128, help="tokens that are continued")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8, help="texts at a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    texts, rng = read_texts(training_files()), random.Random(options.seed)
    for number in range(options.texts // options.batch):
        pieces = []
        while len(pieces) < options.batch:
            text = rng.choice(texts)
            start = rng.randrange(len(text)) if len(text) > 6 * options.piece else 0
            ids = tokenizer(text[start : start + 6 * options.piece], verbose=False).input_ids
            if len(ids) >= options.piece:
                pieces.append(ids[-options.piece :])
        output = generate(
            model,
            pieces,
            "suffix",
            max_new_tokens=options.new_tokens,
            temperature=number % 2,
            top_k=0,
            seed=number,
        )
        for ids in output.sequences:
            print(json.dumps({"text": tokenizer.decode(ids)}), flush=True)


if __name__ == "__main__":
    main()
