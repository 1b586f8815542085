"""The notebooks run, draw what they promise, and are committed without what they printed."""

from pathlib import Path

import nbformat
import pytest
from docs.tools.run_notebook import executed

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
PICTURES = {"acceptance": 3, "own_engine": 2}


def test_every_notebook_is_known():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PICTURES)


@pytest.mark.slow  # `make docs` runs them, too
@pytest.mark.parametrize("name", PICTURES)
def test_runs(name):
    notebook = executed(FOLDER / f"{name}.ipynb")  # its own assertions hold, or a cell fails
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", ())]
    assert len(pictures) == PICTURES[name]


@pytest.mark.parametrize("name", PICTURES)
def test_is_committed_without_outputs(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
