"""The command line: one file per verb. Errors are one line (got / wanted / do this) and exit status 2."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """What `colonnade` runs. Everything is imported in here, so that Ctrl-C meanwhile ends it without a traceback."""
    try:
        from colonnade.cli.app import run

        status = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped; the newest commit is as it was", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). Nor may the interpreter fail when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    sys.exit(status)
