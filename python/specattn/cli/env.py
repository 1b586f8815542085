"""``specattn env``: what is installed, and what serves this machine."""

from __future__ import annotations

import torch

import specattn
from specattn.cli.terminal import write_line


def env() -> None:
    """Print the versions and the backends that serve this machine, and why not the rest."""
    write_line(f"specattn  {specattn.__version__}")
    write_line(f"torch     {torch.__version__}, {torch.get_num_threads()} threads")
    for name, state in specattn.backends().items():
        write_line(f"{name:9} {state}")
