"""Hooks of mkdocs: the site's pages are the repository's Markdown files, under the paths that they have.

So a link is right on a code host and on the site alike. A link to a file that is no page, such as code, must
lead somewhere in the repository; on the site its text stands without the link. The reference has a page for
each package, made from docstrings, and each notebook is a page with its outputs.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOTS = ("benchmarks", "dataset", "pfl_ext")
LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def _named(nav: Any) -> Iterator[str]:
    """The pages that a part of ``nav`` in mkdocs.yml names."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _named(value)
    else:
        for item in nav:
            yield from _named(item)


def modules_of(package: Path) -> list[str]:
    """Public modules that lie in a package itself, dotted, those with a docstring alone."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(package.glob("*.py"))
        if not path.name.startswith("_") and path.read_text().lstrip().startswith('"""')
    ]


def packages() -> dict[str, list[str]]:
    """The modules of each package that has some, by the package's dotted name."""
    found: dict[str, list[str]] = {}
    for root in ROOTS:
        for init in sorted((ROOT / root).rglob("__init__.py")):
            modules = modules_of(init.parent)
            if modules:
                found[".".join(init.parent.relative_to(ROOT).parts)] = modules
    return found


def notebook_files(config: MkDocsConfig) -> Iterator[File]:
    """A page for each notebook, with the pictures that its cells drew."""
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        parts, pictures = [], 0
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            for output in cell.get("outputs", []):
                if "text" in output and output["name"] == "stdout":
                    parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
                elif "image/png" in output.get("data", {}):
                    pictures += 1
                    name = f"{path.stem}-{pictures}.png"
                    png = base64.b64decode("".join(output["data"]["image/png"]))
                    yield File.generated(config, f"docs/notebooks/{name}", content=png)
                    parts.append(f"![What the cell above draws]({name})")
        source = path.relative_to(ROOT).with_suffix(".md").as_posix()
        yield File.generated(config, source, content="\n\n".join(parts) + "\n")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the pages of the reference, by root."""
    entry = next(item for item in config.nav or [] if isinstance(item, dict) and "Reference" in item)
    entry["Reference"] = [
        {root: [{name: f"reference/{name}.md"} for name in packages() if name.split(".")[0] == root]}
        for root in ROOTS
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages and pictures of the whole repository in place of those of the folder docs; and the reference."""
    kept = [file for file in files if not (file.abs_src_path or "").startswith(str(ROOT / "docs"))]
    for name in _named(config.nav):
        if not name.startswith(("reference/", "docs/notebooks/")):
            kept.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for root in (*ROOTS, "docs"):
        for path in sorted((ROOT / root).rglob("*.png")):
            name = path.relative_to(ROOT).as_posix()
            kept.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for name, modules in packages().items():
        text = f"# {name}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
        kept.append(File.generated(config, f"reference/{name}.md", content=text))
    return Files([*kept, *notebook_files(config)])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep links to pages and to other sites; leave the text of a link to a file.

    Raises:
        PluginError: for a link to what is not in the repository.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def kept(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match.group()
        place = posixpath.normpath(posixpath.join(folder, path))
        if place.endswith(".ipynb"):
            return f"[{text}]({target.replace('.ipynb', '.md')})"
        if files.get_file_from_path(place) is not None:
            return match.group()
        if not (ROOT / place).exists():
            raise PluginError(f"{page.file.src_uri}: the link to {target} leads nowhere")
        readme = posixpath.join(place, "README.md")
        if files.get_file_from_path(readme) is not None:
            return f"[{text}]({posixpath.relpath(readme, folder or '.')}{'#' + anchor if anchor else ''})"
        return text

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(kept, part) for part in parts)
