"""Deal one text's cache out over several processes, and compare with the text of one.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Every process loads the model and keeps its share of the cache; the first one prints.
"""

from concurrent.futures import _base
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import Suffix, generate
from specattn.distributed import ContextParallel


def main():
    """Continue a file of the standard library together, then alone."""
    dist.init_process_group("gloo")
    ranks = ContextParallel()
    folder = Path(__file__).parent / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer(Path(_base.__file__).read_text())["input_ids"][:1024]

    together = generate(model, prompt, Suffix(), max_new_tokens=48, context_parallel=ranks)
    if ranks.rank == 0:
        alone = generate(model, prompt, Suffix(), max_new_tokens=48)
        print(tokenizer.decode(together.new_tokens[0]))
        print(f"{ranks.size} ranks, {ranks.sent_bytes['attention'] / 1e6:.1f} MB of states sent")
        print("equals the text of one rank:", together.new_tokens == alone.new_tokens)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
