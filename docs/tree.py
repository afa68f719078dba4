"""Write docs/tree.md: one line for every source file, taken from the first sentence that the file says of itself.

python docs/tree.py      a test says when it must be run
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tree.md"
HEAD = """# The tree

One line for each source file, its own first sentence. `make figures` writes this page.

| file | what |
|---|---|
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(build_page(), encoding="utf-8")


def build_page() -> str:
    """Return the page's text."""
    return HEAD + "".join(f"| `{name}` | {sentence} |\n" for name, sentence in lines())


def lines() -> Iterator[tuple[str, str]]:
    """Yield name and first sentence of each file, src before native. A C++ header stands for its .cc as well."""
    for path in sorted((ROOT / "src" / "colonnade").rglob("*.py")):
        if path.stat().st_size:
            yield (
                name_of(path),
                first_sentence(ast.get_docstring(ast.parse(path.read_text())) or ""),
            )
    paths = [path for path in (ROOT / "native").rglob("*") if "tests" not in path.parts]
    headers = {path for path in paths if path.suffix == ".h"}
    for path in sorted(paths):
        if path.suffix == ".cc" and path.with_suffix(".h") in headers:
            continue
        if path.suffix in (".h", ".cc"):
            name = name_of(path)
            if path.with_suffix(".cc") in paths and path.suffix == ".h":
                name = name.removesuffix("h") + "{h,cc}"
            yield name, first_sentence(first_comment(path.read_text(encoding="utf-8")))


def name_of(path: Path) -> str:
    """Return a file's path from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def first_comment(text: str) -> str:
    """Return the `//` lines at the head of a C++ file, as one text."""
    block = re.match(r"(?:// ?.*\n)+", text)
    return re.sub(r"^// ?", "", block[0], flags=re.MULTILINE) if block else ""


def first_sentence(text: str) -> str:
    """Return the first sentence of a text's first paragraph, without its full stop."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<!\bet al)\.\s", paragraph)[0]
    return sentence.rstrip(".").replace("|", "\\|")


if __name__ == "__main__":
    main()
