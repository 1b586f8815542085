"""A hook of mkdocs: pages link to files of the repository as on GitHub, and the site carries them.

Whatever a page links to outside ``docs`` becomes part of the site: pages and pictures as they are,
source files as pages that show them, folders as lists. The README is the site's first page.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import Abort
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".sh": "bash", ".h": "cpp", ".cpp": "cpp"}
SHOWN_AS_THEY_ARE = {".png", ".svg"}
HOME = {"README.md": "index.md"}
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md")  # linked from no page, perhaps


def on_files(files, config):
    """Add what pages link to outside `docs`, and what that links to."""
    written = [x.src_uri for x in files if x.src_uri.endswith((".md", ".ipynb")) and x.abs_src_path]
    known = {f"docs/{uri}" for uri in written}
    known |= {*HOME, *ALWAYS}
    waiting = list(known)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in known or target.startswith("docs/") or not (ROOT / target).exists():
                continue
            known.add(target)
            if target.endswith(".md"):
                waiting.append(target)
    for target in sorted(known):
        if not target.startswith("docs/"):
            files.append(_file(target, config))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point the links of a page to where the site has what they lead to."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]
    own_notebook = posixpath.basename(here).removesuffix(".md") + ".ipynb"

    def moved(match):
        link, anchor = match[1], match[2] or ""
        if "://" in link:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(_original(here)), link))
        if not (ROOT / target).exists() or posixpath.basename(target) == own_notebook:
            return match[0]  # mkdocs says what is broken
        return posixpath.relpath(_site_uri(target), posixpath.dirname(here) or ".") + anchor

    return LINK.sub(moved, markdown)


def on_page_content(html, page, config, files):
    """Make links of the pages that docstrings name."""
    if not page.file.src_uri.startswith("reference/"):
        return html

    def linked(match):
        named = files.get_file_from_path(match[1])
        if named is None:
            raise Abort(f"{page.file.src_uri}: a docstring names docs/{match[1]}, which is no page")
        return f'<a href="{named.url_relative_to(page.file)}">{match[0]}</a>'

    return re.sub(r"docs/([\w/-]+\.md)", linked, html)


def _targets(page):
    """Return what a page of the repository links to, from its root."""
    folder = posixpath.dirname(page)
    links = [match[1] for match in LINK.finditer((ROOT / page).read_text())]
    return [posixpath.normpath(posixpath.join(folder, x)) for x in links if "://" not in x]


def _site_uri(target):
    """Return where the site has a file of the repository, as mkdocs names sources."""
    if target.startswith("docs/"):
        page = target.removeprefix("docs/")
        return page.removesuffix(".ipynb") + ".md" if page.endswith(".ipynb") else page
    if target in HOME:
        return HOME[target]
    path = Path(target)
    page = (ROOT / target).is_dir() or path.suffix not in {".md", *SHOWN_AS_THEY_ARE}
    return f"repository/{target}{'.md' if page else ''}"


def _original(uri):
    """Return the file of the repository that a page of the site shows."""
    for original, home in HOME.items():
        if uri == home:
            return original
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def _file(target, config):
    path, uri = ROOT / target, _site_uri(target)
    if path.suffix in SHOWN_AS_THEY_ARE:
        return File.generated(config, uri, abs_src_path=str(path))
    if path.is_dir():
        return File.generated(config, uri, content=_listing(path))
    text = path.read_text()
    if path.suffix != ".md":
        text = f"# {path.name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"
    return File.generated(config, uri, content=text)


def _listing(folder):
    """Return a page that names the files of a folder with their first lines of documentation."""
    rows = [f"# {folder.relative_to(ROOT)}", "", "| file | |", "|---|---|"]
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            rows.append(f"| `{path.relative_to(folder)}` | {_summary(path)} |")
    return "\n".join(rows)


def _summary(path):
    if path.suffix != ".py":
        return ""
    documentation = ast.get_docstring(ast.parse(path.read_text())) or ""
    return documentation.partition("\n")[0].replace("|", "\\|")
