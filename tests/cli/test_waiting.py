"""What a terminal shows while a command starts and reads a prompt."""

import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from specattn.cli import terminal
from tests import HANGS, NEVER_ENDS


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_a_line_stands_there_before_torch_is_imported(tmp_path, ends):
    """`torch` here is a module that never ends; a signal then leaves the cursor as it was."""
    (tmp_path / "torch.py").write_text(NEVER_ENDS)
    code = "import sys; sys.argv = ['specattn', 'generate', '--prompt', 'x']\n"
    code += "from specattn_command import main; main()"
    ours, theirs = pty.openpty()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "TERM": "xterm"},
        stderr=theirs,
        text=True,
    ) as process:
        os.close(theirs)
        seen = ""
        while not ("starting" in seen and "here" in seen):
            seen += os.read(ours, 4096).decode()
        process.send_signal(ends)
        assert process.wait(HANGS) == 128 + ends
    while "interrupted" not in seen:
        seen += os.read(ours, 4096).decode()
    os.close(ours)
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor is shown again"


def test_a_bar_has_a_rate_and_a_time_left(monkeypatch):
    seen, clock = io.StringIO(), iter(range(1000))
    console = type(terminal.console)(file=seen, force_terminal=True, width=100)
    monkeypatch.setattr(terminal, "console", console)
    with terminal.progress_bars("tokens") as bars:
        bars.get_time = lambda: float(next(clock))
        task = bars.add_task("reading the prompt", total=4000)
        for done in (0, 500, 1000):
            bars.update(task, completed=done)
    assert re.search(
        r"1000/4000 \S*[\d,]+ tokens/s", re.sub("\x1b\\[[\\d;?]*[a-zA-Z]", "", seen.getvalue())
    )
