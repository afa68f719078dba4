"""Access log: one JSON object per request, and one per event of the model, written in a thread."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

FLUSH_SECONDS = 0.25
MAX_TEXT = 300


class AccessLog:
    """Log of requests and events. Any thread may write; a line is never torn by another one's.

    Lines are written each quarter of a second and by `close`. A process that is killed loses those in between.
    """

    def __init__(self, path: str | None) -> None:
        """path: file to append to; "-": standard output; None: nothing is logged."""
        self.path = path
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: Any = None

    def start(self) -> None:
        """Open the file and start the thread. Raises OSError."""
        if self.path is None:
            return
        self._file = sys.stdout if self.path == "-" else open(self.path, "a", encoding="utf-8")
        self._thread = threading.Thread(target=self._work, name="access log", daemon=True)
        self._thread.start()

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Add a line. Texts are cut to 300 characters; control characters are escaped."""
        if self._thread is None:
            return
        values = {k: v[:MAX_TEXT] if isinstance(v, str) else v for k, v in fields.items()}
        line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
        with self._lock:
            self._lines.append(line)

    def close(self) -> None:
        """Write what is left."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            if self._file is not sys.stdout:
                self._file.close()

    def _work(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        if lines:
            try:
                self._file.write("\n".join(lines) + "\n")
                self._file.flush()
            except (OSError, ValueError):  # a full disk or a closed pipe must not stop the server
                pass
