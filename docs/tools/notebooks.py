"""A hook of mkdocs: notebooks are run, and become pages with what they printed and drew.

Their links are those of any page of ``docs``, so that `sources` moves them and mkdocs checks them.
"""

from __future__ import annotations

import base64
from pathlib import Path

from mkdocs.structure.files import File
from run_notebook import executed


def on_files(files, config):
    """Put a page beside every notebook, with its pictures."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = notebook.src_uri.removesuffix(".ipynb")
        text, pictures = page_of(executed(Path(notebook.abs_src_path)), Path(name).name)
        files.append(File.generated(config, f"{name}.md", content=text))
        for number, picture in enumerate(pictures):
            files.append(File.generated(config, f"{name}-{number}.png", content=picture))
    return files


def page_of(notebook, name):
    """Return the Markdown of a notebook that was run, and its pictures as PNG."""
    parts, pictures = [], []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![What this cell draws]({name}-{len(pictures)}.png)")
                pictures.append(base64.b64decode(data["image/png"]))
            elif output.get("name") == "stderr":
                continue
            elif text := output.get("text", data.get("text/plain", "")).strip():
                parts.append(f"```text\n{text}\n```")
    source = f"[The notebook]({name}.ipynb) behind this page was run when the site was built."
    first, *rest = parts
    title, _, opening = first.partition("\n")
    return "\n\n".join([title, source, opening.strip(), *rest]) + "\n", pictures
