"""Every block of code in the README and in docs/ runs as it stands, in order, in an empty folder.

```python      runs; the blocks of a page share their names, like cells of a notebook
```sh          runs with `colonnade` on the path; a command that fails fails the page
```yaml        is written to the file that its first line names: `# file: clicks.yaml`
``` (nothing)  is shown, not run: output, or what only a person can do
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from forked_command import colonnade_on_path
from torch.distributed.run import get_args_parser

from colonnade.cli import plan, train
from colonnade.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
KNOWN = {"", "python", "sh", "yaml"}
LONG = {
    "docs/howto/tiers.md",  # its tables must outgrow memory
    "docs/howto/sharding.md", "docs/howto/data.md", "docs/howto/partition.md", "docs/howto/towers.md",
    "docs/concepts/ranks.md", "docs/concepts/staleness.md", "docs/concepts/memory.md", "docs/howto/export.md",
    "docs/knowledge.md", "docs/howto/serve.md", "docs/howto/settings.md", "docs/howto/predict.md",
    "docs/concepts/runs.md", "docs/howto/track.md", "docs/howto/advise.md",
}  # fmt: skip
"""Pages whose commands take long, and show what other tests look at, too."""
TRACKERS = {"mlflow", "optuna", "wandb"}
"""Packages that pages show and no extra installs: their blocks run where they are."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return (language, text) of each fenced block, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """PATH with `colonnade` in it."""
    with colonnade_on_path(tmp_path_factory.mktemp("bin")) as path:
        yield path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (name_of(page) in LONG))
        for page in PAGES[1:]
    ],
)
def test_blocks_run(page, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    absent: set[str] = set()
    for language, text in blocks_of(page):
        assert language in KNOWN, f"{name_of(page)} has a block of {language}: nobody runs it"
        imported = set(re.findall(r"^import (\w+)$", text, re.MULTILINE))
        if missing := {name for name in imported & TRACKERS if find_spec(name) is None}:
            absent |= missing
        elif language == "python":
            exec(compile(text, name_of(page), "exec"), names)
        elif language == "yaml":
            first, content = text.split("\n", 1)
            assert first.startswith("# file: "), "a yaml block names its file in its first line"
            Path(first.removeprefix("# file: ")).write_text(content, encoding="utf-8")
        elif language == "sh":
            run_shell(text, path)
    if absent:
        pytest.skip(f"the other blocks ran; not installed: {', '.join(sorted(absent))}")


def run_shell(text: str, path: str) -> str:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env={**os.environ, "PATH": path, "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{text}\nended with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


def test_the_readme_trains_something(capsys, tmp_path, monkeypatch, path):
    test_blocks_run(README, tmp_path, monkeypatch, path)
    assert "AUC 0." in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_torchrun_takes_none_of_our_options_for_its_own():
    """`-m colonnade` without `--` works until somebody adds an option such as --run, which torchrun has words for."""
    shown = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES}
    shown |= {"plan --help": plan.EXAMPLES, "train --help": train.EXAMPLES}
    result = 0
    for place, text in shown.items():
        for line in text.replace("\\\n", " ").splitlines():
            if "$" in line or not re.match(r"\s*torchrun .*colonnade ", line):
                continue
            words = shlex.split(line)[1:]
            reported = get_args_parser().parse_args(words)
            ours = words[words.index("colonnade") :]
            assert reported.module and words[-len(ours) - 1] == "--", f"{place}: {line}"
            assert [reported.training_script, *reported.training_script_args] == ours, (
                f"{place}: {line}"
            )
            result += 1
    assert result >= 5


def test_commands_that_are_shown_have_the_options_they_are_given():
    """Also of blocks that nobody runs, and of benches, which hand on what is theirs."""
    verbs, result = typer.main.get_command(app).commands, 0
    for page in PAGES:
        for kind, text in blocks_of(page):
            for line in text.replace("\\\n", " ").splitlines() if kind in ("", "sh") else ():
                words = re.sub(r"\s#.*", "", line).split()
                if (
                    "colonnade" not in words
                    or (verb := words[words.index("colonnade") + 1 :]) == []
                ):
                    continue
                if (command := verbs.get(verb[0])) is None or verb[0] == "bench":
                    continue
                known = {
                    name for param in command.params for name in param.opts + param.secondary_opts
                }  # type: ignore[attr-defined]
                known |= {
                    name
                    for param in getattr(command, "commands", {}).values()
                    for p in param.params
                    for name in p.opts
                }
                for word in verb[1:]:
                    if word in ("|", ">", "&&", ";"):
                        break
                    if word.startswith("--"):
                        result += 1
                        assert word.split("=")[0] in known, f"{name_of(page)}: {line}"
    assert result > 50


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@[A-Z]+@", README.read_text(encoding="utf-8"))
