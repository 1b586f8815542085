"""Run a notebook, here and in the tests."""

from __future__ import annotations

import os

import nbformat
from nbclient import NotebookClient

SECONDS = 300  # for one cell, on a busy machine


def executed(path):
    """Return a notebook with its outputs; a cell that fails ends it with its error."""
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    quiet = ["--IPKernelApp.log_level=ERROR"]
    client = NotebookClient(notebook, timeout=SECONDS, resources=folder, extra_arguments=quiet)
    client.execute()
    return notebook
