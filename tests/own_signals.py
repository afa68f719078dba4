"""Signals of the suite: a command in the background ignores some, as a shell starts it, and so do its children."""

from __future__ import annotations

import signal

HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
}


def restore_signals() -> None:
    """Handle the signals that this process was started to ignore as it would in the foreground."""
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
