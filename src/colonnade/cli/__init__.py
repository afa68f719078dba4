"""The command line: one file per verb. Errors are one line (got / wanted / do this) and exit status 2."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPPED = "stopped; the newest checkpoint is as it was"


def end_in_an_import(_: int, frame: FrameType | None) -> None:
    """SIGINT's handler: `KeyboardInterrupt`, but inside an import, where nothing has begun, the process's end.

    A C++ module in whose initialisation Python raises (torch's) ends the process by `std::terminate`.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            say_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def say_stopped() -> None:
    """Print how it ended; a rank of `--ranks` leaves that to its launcher."""
    if sys.argv[1:2] != ["rank"]:
        print(STOPPED, file=sys.stderr, flush=True)


def main() -> None:
    """What `colonnade` runs. Everything is imported in here, so that Ctrl-C meanwhile ends it without a traceback."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, end_in_an_import)
        from colonnade.cli.app import run

        status = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        say_stopped()
        status = 130
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). Nor may the interpreter fail when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    sys.exit(status)
