"""``python -m specattn``: the command, where its program is not on the path."""

from specattn_command import main

main()
