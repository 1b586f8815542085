"""Measure a drafter of the embedded target: acceptance length on held-out files, by context.

``python measure_drafter.py [--method poss:depth=8] [--contexts 4096,8192] [--json FILE]``
"""

import argparse
import json
from itertools import zip_longest
from pathlib import Path

import torch
from corpus import held_out_files, read_texts
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import METHODS, generate, parse_method

HERE = Path(__file__).parent
NEW_TOKENS = 128
CONTEXTS = (4096, 8192, 16384, 32768 - 256)
"""The last leaves room for the new tokens and a tree in the target's 32768 positions."""
TEMPERATURES = (0.0, 1.0)


def held_out_prompts(documents, context, most):
    """Cut prompts of ``context`` tokens from held-out files.

    Parameters
    ----------
    documents : list of Tensor, int64 [L]
        Token ids of the files.
    context, most : int
        Tokens of a prompt; prompts at most.

    Returns
    -------
    list of Tensor, int64 [context]
        The beginnings of files that are long enough, the longest files first; then a row of all
        shorter files, which stands for the library's modules, as its longest files are tests.
    """
    prompts = [ids[:context] for ids in documents if len(ids) >= context]
    shorter = torch.cat([ids for ids in documents if len(ids) < context] or [torch.tensor([])])
    if len(shorter) >= context:
        prompts = [shorter[:context].long(), *prompts]
    return prompts[:most]


def acceptance(model, method, prompts, temperature, new_tokens=NEW_TOKENS):
    """Continue ``prompts`` one by one with a method.

    Returns
    -------
    dict
        Prompts, verification passes, mean acceptance length (bonus included), the share of passes
        that accepted a token at depth 1, 2, ..., and that share among those that came so far.
    """
    requests = []
    for prompt in prompts:
        output = generate(
            model,
            [prompt],
            method,
            max_new_tokens=new_tokens,
            temperature=temperature,
            top_k=0,
            seed=0,
        )
        requests += output.statistics.requests
    rounds = sum(request.rounds for request in requests)
    accepted = sum(request.accepted for request in requests)
    accepted_at, offered_at = (
        [sum(column) for column in zip_longest(*(getattr(r, name) for r in requests), fillvalue=0)]
        for name in ("accepted_at", "offered_at")
    )
    return {
        "prompts": len(prompts),
        "passes": rounds,
        "acceptance_length": round(1 + accepted / rounds, 3),
        "position_rates": [round(count / rounds, 3) for count in accepted_at],
        "conditional_rates": [
            round(count / max(1, of), 3) for count, of in zip(accepted_at, offered_at, strict=True)
        ],
    }


def measure(method, target=HERE, contexts=CONTEXTS, temperatures=TEMPERATURES, most=8):
    """Measure a method, as a command line writes it, in float32.

    Returns
    -------
    list of dict
        An entry for each context and temperature, as `acceptance` says.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    name, options = parse_method(method)
    prepared = METHODS[name](**options).prepared(model)
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = read_texts(held_out_files())
    documents = [torch.tensor(tokenizer(text, verbose=False).input_ids) for text in texts]
    results = []
    for context in contexts:
        prompts = held_out_prompts(documents, context, most)
        for temperature in temperatures:
            found = acceptance(model, prepared, prompts, temperature)
            results.append(
                {"method": method, "context": context, "temperature": temperature, **found}
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def numbers(text):
    """Parse ``4096,8192``."""
    return tuple(int(part) for part in text.split(","))


def main():
    """Command line: measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--method", default="longspec", help="with options, such as poss:drafter=FOLDER,window=512"
    )
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS, help="prompt tokens")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per context, at most")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    results = measure(options.method, contexts=options.contexts, most=options.prompts)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
