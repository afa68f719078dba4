"""Access log: one JSON object per request, and one per event of the model, written in a thread."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

FLUSH_SECONDS = 0.25
MAX_TEXT = 300
NEWLINE = 10


class AccessLog:
    """Log of requests and events. Any thread may write; a line is never torn by another one's.

    Lines are written each quarter of a second and by `close`. A process that is killed loses those in between. A disk
    that is full loses lines, which are counted; the server goes on.
    """

    def __init__(self, path: str | None) -> None:
        """path: file to append to; "-": standard output; None: nothing is logged."""
        self.path = path
        self.num_lost = 0
        """Number of lines that could not be written."""
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._descriptor = -1
        self._num_reported = 0  # of the lost lines
        self._is_torn = False  # the file may end inside a line

    def start(self) -> None:
        """Open the file and start the thread. Raises OSError."""
        if self.path is None:
            return
        if self.path == "-":
            self._descriptor = os.dup(sys.stdout.fileno())
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
        self._thread = threading.Thread(target=self._work, name="access log", daemon=True)
        self._thread.start()

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Add a line. Texts are cut to 300 characters; control characters are escaped."""
        if self._thread is None:
            return
        line = format_line(event, fields)
        with self._lock:
            self._lines.append(line)

    def close(self) -> None:
        """Write the remaining lines."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            os.close(self._descriptor)

    def _work(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        """Write the lines, or count them as lost: a full disk or a closed pipe must not stop the server."""
        with self._lock:
            lines = self._lines
            self._lines = []
        num_lines = len(lines)
        if not lines:
            return
        if self.num_lost > self._num_reported:
            lines.append(format_line("lost", {"lines": self.num_lost - self._num_reported}))
        content = "".join(f"{line}\n" for line in lines).encode()
        if self._is_torn:
            content = b"\n" + content
        num_written = 0
        try:
            while num_written < len(content):
                num_written += os.write(self._descriptor, content[num_written:])
        except OSError:
            num_complete = content[:num_written].count(b"\n") - self._is_torn
            self.num_lost += max(num_lines - max(num_complete, 0), 0)
            if num_written:
                self._is_torn = content[num_written - 1] != NEWLINE
        else:
            self._num_reported = self.num_lost
            self._is_torn = False


def format_line(event: str, fields: dict[str, Any]) -> str:
    """Return an event as JSON, with the time of day."""
    values = {k: v[:MAX_TEXT] if isinstance(v, str) else v for k, v in fields.items()}
    return json.dumps({"time": round(time.time(), 3), "event": event, **values})
