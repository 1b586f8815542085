"""Decode a Hugging Face checkpoint with Vegas, in both ways, and compare with plain greedy text.

    python examples/hf_generate.py --model ~/models/Qwen3-8B --prompt-file report.txt

Without arguments the embedded model continues a file of the standard library.
"""

import argparse
from concurrent.futures import _base
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import Vegas, generate


def main():
    """Print the text, the mean acceptance length, and whether the text is plain greedy decoding's.

    In 16 bits two logits may lie so close that passes of different sizes round them in a different
    order; float32 makes that rare.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "tiny")
    parser.add_argument("--prompt-file", type=Path, default=Path(_base.__file__))
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = tokenizer(options.prompt_file.read_text(), return_tensors="pt", verbose=False)
    ids = text.input_ids[:, : options.prompt_tokens].to(model.device)
    length = {"max_new_tokens": options.max_new_tokens}

    # A given gamma is drafted in every round, also where plain decoding is found to be faster.
    method = Vegas(gamma=6, ratio=0.07)
    plain = model.generate(ids, do_sample=False, **length)

    # 1. Inside transformers: its sampling options, processors and stopping criteria are obeyed.
    inside = model.generate(ids, custom_generate=method, do_sample=False, **length)

    # 2. Our own function: ragged batches, callbacks, statistics.
    output = generate(model, ids, method, temperature=0, **length)

    print(tokenizer.decode(output.new_tokens[0], skip_special_tokens=True))
    total = output.statistics.total
    print(f"mean acceptance length, with bonus token: {total.mean_acceptance_length:.2f}")
    print(f"model.generate equals plain greedy: {torch.equal(inside, plain)}")
    print(f"specattn generate equals plain greedy: {torch.equal(output.sequences[0], plain[0])}")


if __name__ == "__main__":
    main()
