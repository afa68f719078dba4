"""Event file that TensorBoard reads: numbers by name and step.

Written by the calling thread. TensorBoard's own writer has a thread, which prints a traceback when a disk is full.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path


class Board:
    """Appends to a new event file of a folder; earlier files' steps from `first_step` on no longer count."""

    def __init__(self, folder: Path, first_step: int) -> None:
        # These take a while to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._records = RecordWriter(self.path.open("xb"))
        self._event = Event
        self._write(file_version="brain.Event:2")
        if first_step > 1:
            self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """Write all of one step's numbers. Raises OSError."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(step=step, summary=Summary(value=values))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: object) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()
