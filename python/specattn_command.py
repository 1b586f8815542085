"""The program ``specattn``, which answers from its first moment.

Importing `specattn` imports torch, and that takes seconds. This module is not part of the package,
so that a signal, or a package that is not installed, is one line in that time too.
"""

import os
import signal
import sys


def main() -> None:
    """Import the command and run it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until the command has handlers of its own
        signal.signal(number, _end)
    try:
        from specattn.cli import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "?").partition(".")[0]
        print(
            f"specattn: error: the command needs {package}: pip install 'specattn[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    run()


def _end(number: int, _: object) -> None:
    """End at once: an exception may be swallowed inside an import, and nothing is to be kept."""
    os.write(2, b"specattn: interrupted\n")
    os._exit(128 + number)
