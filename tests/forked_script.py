"""Run a script in a process that is forked with torch imported, where a new one needs seconds for that."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ranks import start_child


def run_script(
    folder: Path, text: str, *arguments: object, environment: dict[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `text` with its arguments as `python -c` would, and wait for its end; its output is kept in `folder`.

    Torch, the command line and `torch._dynamo` are imported already, on one thread, and the process ends without
    the interpreter's own end: a script that is about one of these needs a process of its own.
    """
    output, errors = folder / "script-output", folder / "script-errors"
    for file in (output, errors):
        file.unlink(missing_ok=True)
    child = start_child(errors, environment, _run, text, list(map(str, arguments)), output)
    child.process.join(timeout)
    code = child.code
    child.kill()
    assert code is not None, f"the script has not ended after {timeout} s:\n{errors.read_text()}"
    return subprocess.CompletedProcess(text, code, output.read_text(), errors.read_text())


def _run(text: str, arguments: Sequence[str], output: Path) -> None:
    sys.argv = ["-c", *arguments]
    with output.open("w") as file, contextlib.redirect_stdout(file):
        exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})
