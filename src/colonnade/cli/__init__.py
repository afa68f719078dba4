"""Command line, with one file per verb. Errors are one line (got / wanted / do this) and exit status 2."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType

STOPPED = "stopped; the newest checkpoint is unchanged"


def exit_during_import(_: int, frame: FrameType | None) -> None:
    """Handle SIGINT: end the process inside an import, when nothing has begun; else raise KeyboardInterrupt.

    An exception during the initialisation of a C++ module (torch's) would end the process by `std::terminate`.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def print_stopped() -> None:
    """Print that the command was stopped, except in a rank of `--ranks`, where the launcher prints it."""
    if sys.argv[1:2] != ["rank"]:
        print(STOPPED, file=sys.stderr, flush=True)


def main() -> None:
    """Run the `colonnade` command. Imports are inside, so that Ctrl-C during an import prints no traceback."""
    # Users of the command want the message, not the line of the source that warns.
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, exit_during_import)
        from colonnade.cli.app import run_command

        status = run_command(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print_stopped()
        status = 130
    except BrokenPipeError:
        # The reader of the output has closed it (`| head`). The interpreter's last flush must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    sys.exit(status)
