"""`RefreshThread`: looks for newer checkpoints until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RefreshThread:
    """Thread that calls a function again and again. No failure ends it: it counts failures and tries again."""

    def __init__(self, refresh: Callable[[], object], name: str) -> None:
        self.problem: BaseException | None = None
        """Error of the newest call; None: it succeeded, or there was none."""
        self.num_failures = 0
        """Number of calls that failed."""
        self._refresh = refresh
        self._name = name
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """True once `start` was called."""
        return self._thread is not None

    def start(self, seconds: float) -> None:
        """Call the function every `seconds` until `stop`."""
        self._thread = threading.Thread(
            target=self._run, args=(seconds,), name=self._name, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Return when the current call has ended; none follows."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self._refresh()
                self.problem = None
            except BaseException as error:  # any error: nothing else would restart this thread
                self.problem = error
                self.num_failures += 1
