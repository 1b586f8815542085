"""``python -m specattn.cli``, which is what torchrun starts."""

from specattn.cli import main

main()
