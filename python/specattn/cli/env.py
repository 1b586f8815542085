"""``specattn env``: what is installed, and what serves this machine."""

from __future__ import annotations

import torch

import specattn


def env() -> None:
    """Print the versions and the backends that serve this machine, and why not the rest."""
    print(f"specattn  {specattn.__version__}")
    print(f"torch     {torch.__version__}, {torch.get_num_threads()} threads")
    for name, state in specattn.backends().items():
        print(f"{name:9} {state}")
