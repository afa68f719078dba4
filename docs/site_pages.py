"""Hook of the documentation site: adds the pages that are stored elsewhere, and points links at them.

DESIGN.md, CONTRIBUTING.md and CHANGELOG.md come from the repository's root, the recipes from their folder, and the API
pages from docstrings.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
API = {
    "colonnade": "colonnade",
    "data": "colonnade.data",
    "export": "colonnade.export",
    "models": "colonnade.models",
}
LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "recipes.md", content=build_recipes()))
    for name, module in API.items():
        files.append(File.generated(config, f"api/{name}.md", content=build_api(module)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at the page that stands for the file."""
    folder = posixpath.dirname(page.file.src_uri)
    from_root = page.file.src_uri in ROOT_PAGES

    def replace(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = target if from_root else posixpath.join("docs", folder, target)
        return match[1] + posixpath.relpath(find_page(posixpath.normpath(path)), folder or ".")

    return LINK.sub(replace, markdown)


def find_page(path: str) -> str:
    """Return the site's page for a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "docs":
        return "README.md"
    return "recipes.md" if path.startswith("recipes") else path


def build_recipes() -> str:
    """Return a page with every recipe: its own description, then its code."""
    parts = [
        "# Recipes\n\nPapers as run configurations, and a model's whole life, each a script in `recipes/`.\n"
    ]
    for path in sorted((ROOT / "recipes").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        about = ast.get_docstring(ast.parse(code)) or ""
        parts.append(f"## {path.name}\n\n{about}\n\n```python\n{code}```\n")
    return "\n".join(parts)


def build_api(module: str) -> str:
    """Return a page with the public names of a module: those that its stub imports, else its `__all__`."""
    init = ROOT / "src" / module.replace(".", "/") / "__init__.py"
    stub = init.with_suffix(".pyi")
    nodes = ast.parse((stub if stub.exists() else init).read_text(encoding="utf-8")).body
    names = [
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    ]
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return f"# {module}\n\n" + "\n".join(f"::: {module}.{name}\n" for name in sorted(names))
