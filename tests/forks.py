"""What runs in a fork of a test's process, which has imported what takes seconds."""

import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from tests import HANGS


def fork(function):
    """Call a function in a process of its own, to its end; return what it prints."""
    with tempfile.TemporaryFile("w+") as printed:
        child = os.fork()
        if child == 0:
            _call(function, printed)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        said = printed.read()
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"it ended with status {code}\n{said}"
    return said


def run_script(path, *arguments):
    """Run a script as ``python path ...`` would; return what it prints."""

    def run():
        sys.argv = [str(path), *map(str, arguments)]
        sys.path.insert(0, str(Path(path).parent))
        runpy.run_path(str(path), run_name="__main__")

    return fork(run)


def _call(function, printed):
    """Call the function in this process, which ends with it."""
    code = 1
    try:
        signal.alarm(HANGS)
        sys.stdout = sys.stderr = printed
        torch.set_num_threads(1)  # threads of OpenMP that the test's process had are none here
        function()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        printed.flush()
        os._exit(code)
