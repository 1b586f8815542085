"""Several ranks beside one: seconds, processor seconds and bytes of a prefill and of passes.

    python bench/run_distributed.py --context 31000 --ranks 2

Every rank has one thread. Processor seconds say what a rank computes even where other programs take
its core: the prefill's speed-up is at most that of one rank over the largest of several.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from pathlib import Path

TINY = Path(__file__).parents[1] / "examples" / "tiny"


def main() -> None:
    """Run the same work on one rank and on several, and print a line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--context", type=int, default=31_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=7, help="of a verification")
    parser.add_argument("--passes", type=int, default=20)
    given = parser.parse_args()
    for size in (1, given.ranks):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=work, args=(given, rank, size, port)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def work(given: argparse.Namespace, rank: int, size: int, port: int) -> None:
    """Prefill a random text, run passes, print what they took."""
    import torch
    import torch.distributed as dist

    from specattn.decoding.checkpoint import load_causal_model
    from specattn.decoding.lockstep import Lockstep
    from specattn.decoding.target import Target
    from specattn.distributed import ContextParallel
    from specattn.tree import Tree

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    ranks = None
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
        )
        ranks = ContextParallel()
    model = load_causal_model(given.model, torch.float32)
    target = Target(model, 1, given.context + 2 * given.rows, lockstep=ranks and Lockstep(ranks))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(model.config.vocab_size, (given.context,), generator=generator)

    before = dict(ranks.sent_bytes) if ranks else {}
    wall, processor = time.perf_counter(), time.process_time()
    target.prefill([text], 2048)
    prefill = time.perf_counter() - wall, time.process_time() - processor
    sent = ranks.sent_bytes["attention"] - before.get("attention", 0) if ranks else 0
    print(
        f"{size} ranks, rank {rank}: cache {target.cache.storage.nbytes / 1e6:.0f} MB, prefill "
        f"{prefill[0]:.2f} s, processor {prefill[1]:.2f} s, sent {sent / 1e6:.0f} MB",
        flush=True,
    )
    chain, walls, processors = Tree.chain(given.rows - 1), [], []
    for _ in range(given.passes):
        wall, processor = time.perf_counter(), time.process_time()
        target.verify(chain, text[None, : given.rows])
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    print(
        f"{size} ranks, rank {rank}: pass of {given.rows} rows {min(walls) * 1e3:.1f} ms at least, "
        f"{statistics.median(walls) * 1e3:.1f} median, processor "
        f"{statistics.median(processors) * 1e3:.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
