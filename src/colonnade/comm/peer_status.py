"""Status of every rank, readable by the other ranks, so that an error can name a lost rank.

A thread of each rank writes a line (`heartbeat.py`) once a second: the step, the number of calls made, and the calls it
waits in. Other ranks read these lines only when a call takes long or fails. A rank without new lines is cut off,
stopped or gone. A rank with new lines is alive, and its call counts tell whether the others wait for it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colonnade.comm.differences import MAX_SHOWN, format_ranks
from colonnade.comm.heartbeat import Heartbeats
from colonnade.comm.rendezvous import Peer, first_line
from colonnade.errors import PeerLost

BEAT_SECONDS = 1.0
LONG_SECONDS = 3.0  # during a longer call, the thread reads the lines of other ranks
DIAGNOSIS_SECONDS = 2.5  # two beats: a rank without a new line in this time is silent
ANSWER_SECONDS = 6.0  # limit of a diagnosis, because the store may not answer
LINGER_SECONDS = (
    2.0  # the rank that serves the store stays up, so that other ranks can read who was lost
)
LEAVE_SECONDS = 5.0  # limit of a thread's wait for other ranks after its own rank failed
POLL_INTERVAL = timedelta(seconds=0.5)  # between two checks whether waiting is still useful
PATIENCE = 12
"""Multiple of `timeout` that applies to checkpoints and starts, which may take other ranks longer: a slow disk, a
download, planning."""
PATIENT_CHANNELS = ("checkpoint", "control")
MAX_ERROR_LENGTH = 2000  # characters of an error that other ranks receive


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Status of another rank, as far as this rank knows it."""

    peer: Peer
    silent_seconds: float
    """Seconds since this rank last read a new line of it."""
    process_state: str = ""
    """State of its process: "gone", "stopped" or "running"; "" if unknown."""
    step: int = 0
    calls: Mapping[str, int] | None = None
    """Number of calls made, by channel."""
    waiting: Mapping[str, float] | None = None
    """Seconds waited in unfinished calls, by channel."""
    idle_seconds: float = 0.0
    """Seconds since its last call."""
    stop_reason: str = ""
    """Error or reason with which it stopped, in its own words; "" if it runs."""
    is_follower: bool = False
    """True if it stopped because of other ranks: `lost_ranks`, if it could name them."""
    lost_ranks: Sequence[int] = ()
    ended_after: int | None = None
    """Number of its batches, if its data ended before this rank's."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Ranks that prevent a call from completing, with a reason."""

    ranks: tuple[int, ...] = ()
    """Ranks that have stopped responding; empty if none."""
    reason: str = ""
    is_certain: bool = False
    """True if later lines cannot change the diagnosis."""


def diagnose_stuck_call(
    statuses: Mapping[int, PeerStatus],
    channel: str,
    call_number: int,
    participants: Collection[int] | None = None,
) -> Diagnosis:
    """Find the ranks that prevent call `call_number` of `channel` from completing. Pure.

    statuses: all other ranks. participants: ranks that take part in the call, None for all. A lost rank outside the
    call may still be the reason why a participant does not join. A rank that stopped because of another one is not the
    cause."""
    failed = {
        r: f"left ({s.stop_reason})"
        for r, s in statuses.items()
        if s.stop_reason and not s.is_follower
    }
    gone = {r: "is gone, as if killed" for r, s in statuses.items() if s.process_state == "gone"}
    stopped = {
        r: "is stopped (SIGSTOP)" for r, s in statuses.items() if s.process_state == "stopped"
    }
    silent = {
        r: f"sent no heartbeat for {s.silent_seconds:.0f} s: killed, stopped, or its host is down or cut off"
        for r, s in statuses.items()
        if s.silent_seconds > DIAGNOSIS_SECONDS and s.process_state != "running"
    }
    behind = {
        r: "has not joined this call, though it is alive"
        for r, s in statuses.items()
        if s.calls is not None and s.calls.get(channel, 0) < call_number
        if participants is None or r in participants
    }
    ended = {
        r: f"has no more batches: its data ended after {s.ended_after}, and this rank has one more; give every rank as "
        "many"
        for r, s in statuses.items()
        if s.ended_after is not None
    }
    followers = {r for r, s in statuses.items() if s.is_follower}
    gone_or_silent = {**silent, **stopped, **gone}
    for candidates in (ended, failed, gone_or_silent, behind):
        causes = {r: why for r, why in candidates.items() if r not in followers}
        if causes:
            is_certain = (
                candidates is ended
                or candidates is failed
                or any(r in gone or r in stopped for r in causes)
            )
            return Diagnosis(
                tuple(sorted(causes)), _describe_failure_causes(statuses, causes), is_certain
            )
    for rank in sorted(followers):
        reason = f"rank {rank} stopped first: {statuses[rank].stop_reason}"
        return Diagnosis(tuple(statuses[rank].lost_ranks), reason, True)
    return Diagnosis()


def _describe_failure_causes(statuses: Mapping[int, PeerStatus], causes: Mapping[int, str]) -> str:
    """Return one text for messages: each rank with its process, the cause, and its last status."""
    parts = []
    for rank in sorted(causes)[:MAX_SHOWN]:
        peer = statuses[rank].peer
        status = describe_peer_status(statuses[rank])
        parts.append(f"rank {rank} (pid {peer.pid} on {peer.host}) {causes[rank]}; {status}")
    if len(causes) > MAX_SHOWN:
        parts.append(f"and so on for {format_ranks(sorted(causes)[MAX_SHOWN:])}")
    return "; ".join(parts)


def describe_peer_status(status: PeerStatus) -> str:
    """Describe the step and calls that a rank last reported."""
    if status.calls is None:
        return "it never reported its status"
    step = f"last seen in step {status.step}"
    if status.waiting:
        calls = sorted(status.waiting.items(), key=lambda item: -item[1])
        return step + ", " + ", ".join(f"{s:.0f} s in {p!r}" for p, s in calls)
    return f"{step}, {status.idle_seconds:.0f} s after its last call: computing, or at its data or files"


class PeerMonitor:
    """Thread that writes this rank's status line and, when a call hangs or fails, reads those of the other ranks.

    Also counts this rank's calls, and waits for them. Begin with `start`, end with `stop`."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        peers: Sequence[Peer],
        rank: int,
        timeout: timedelta,
        *,
        serves: bool = False,
    ) -> None:
        """Create the monitor of `rank`. `serves`: this process serves the store that contains the heartbeats."""
        self.rank = rank
        self.peers = tuple(peers)
        self.timeout = timeout.total_seconds()
        self._heartbeats = heartbeats
        self._serves = serves
        self.step = 0
        self.lost = ""  # reason why no further call can be made
        self.lost_ranks: tuple[int, ...] = ()
        self.participants: dict[str, Collection[int]] = {}  # by channel, if not all ranks
        self._calls: dict[str, int] = {}
        self._num_lookaheads = 0
        # Number of a lookahead, number of batches read from its data, whether these were all.
        self._batches = 0, 0, False
        self._waiting: dict[str, float] = {}
        self._idle_since = time.monotonic()
        self._stop_reason = ""
        self._stopped_at = 0.0
        self._beats = 0
        self._lines: dict[int, tuple[int, float, dict[str, Any]]] = {}  # beat, read at, line
        self._loss_lock = threading.Lock()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._failed_call: tuple[str, int] | None = None  # channel and number to diagnose
        self._diagnosis = Diagnosis()
        self._is_follower = False
        self._store_error = ""
        self._diagnosed = threading.Event()
        self._written = threading.Event()
        self._thread = threading.Thread(
            target=self._run_heartbeat_thread, name="presence", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def announce_end(self, reason: str) -> None:
        """Announce that this rank ends, and stop the thread."""
        if not self._over.is_set():
            self.report_stop(reason)
            self._over.set()
            self._wake.set()
            self._thread.join(1.0)

    @property
    def is_over(self) -> bool:
        """True once this rank has announced its end."""
        return self._over.is_set()

    def watch_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over the batches of this rank's next lookahead that reports their end to other ranks."""
        self._num_lookaheads += 1
        return self._count_batches(batches, self._num_lookaheads)

    def _count_batches(self, batches: Iterable[Any], lookahead: int) -> Iterator[Any]:
        count = 0
        for count, batch in enumerate(batches, 1):
            self._batches = lookahead, count, False
            yield batch
        self._batches = lookahead, count, True

    def _find_early_end(self, line: Mapping[str, Any]) -> int | None:
        """Return after how many batches the rank of a status line ended, if this rank has more; else None."""
        lookahead, count, is_over = line["batches"]
        own = self._batches
        return count if is_over and lookahead == own[0] and count < own[1] else None

    def begin_call(self, channel: str) -> None:
        """Count a call that begins. Raises PeerLost if an earlier call has failed."""
        if self.lost:
            raise PeerLost(self.lost)
        self._calls[channel] = self._calls.get(channel, 0) + 1

    def wait_for_call(self, channel: str, pending_work: dist.Work) -> None:
        """Wait until the call is done. Raises PeerLost if it fails or times out."""
        began = self._waiting[channel] = time.monotonic()
        limit = self.timeout * (PATIENCE if channel in PATIENT_CHANNELS else 1)
        is_over = False
        try:
            while True:
                try:
                    pending_work.wait(POLL_INTERVAL)
                    return
                except RuntimeError as error:
                    if is_over:
                        raise self.diagnose_loss(channel, error) from None
                    # The call may have completed right after the wait timed out: then wait once more.
                    is_over = pending_work.is_completed()
                if is_over:
                    continue
                now = time.monotonic()
                if self.lost:
                    raise PeerLost(self.lost)
                has_ended = "route" in channel and any(
                    self._find_early_end(line) is not None
                    for _, _, line in list(self._lines.values())
                )
                if has_ended or now - began > limit:
                    raise self.diagnose_loss(channel, None)
                if self._stop_reason and now - max(began, self._stopped_at) > LEAVE_SECONDS:
                    self.lost = f"rank {self.rank} stopped: {self._stop_reason}"
                    raise PeerLost(self.lost)
        finally:
            self._waiting.pop(channel, None)
            self._idle_since = time.monotonic()

    def diagnose_loss(self, channel: str, call_error: BaseException | None) -> PeerLost:
        """Return the error for a call that failed or timed out, naming the ranks that caused it. No call can be made
        after this."""
        waited = time.monotonic() - self._waiting.get(channel, time.monotonic())
        with self._loss_lock:
            if self.lost:
                return PeerLost(self.lost)
            number = self._calls.get(channel, 0)
            self._diagnosed.clear()
            self._failed_call = channel, number
            self._wake.set()
            if self._wait_for_diagnosis():
                self.lost_ranks = self._diagnosis.ranks
                reason = self._diagnosis.reason
                reason = reason or (
                    "every rank is alive and in this call: the network between them failed"
                )
            else:
                reason = f"{self._heartbeats.failure_reason}{self._store_error}"
            peers = format_ranks(self.lost_ranks) if self.lost_ranks else "a peer"
            cause = (
                f" (gloo: {_shorten_gloo(first_line(call_error))})"
                if call_error is not None
                else ""
            )
            lost = (
                f"rank {self.rank} of {len(self.peers)} lost {peers} in {channel!r} (call {number}, step {self.step}, "
                f"after {waited:.0f} s): {reason}. The run resumes from its newest checkpoint: start it again, "
                f"which torchrun "
                f"--max-restarts does{cause}"
            )
            self._is_follower = True
            self.report_stop(lost)
            if self._serves:
                time.sleep(LINGER_SECONDS)
            self.lost = lost
            return PeerLost(lost)

    def _wait_for_diagnosis(self) -> bool:
        """Return whether the thread finished the diagnosis in time."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._diagnosed.wait(0.1):
                return True
        return self._diagnosed.is_set()

    def report_stop(self, reason: str) -> None:
        """Write to the other ranks that this rank stops, and why."""
        self._stop_reason = self._stop_reason or reason
        self._stopped_at = self._stopped_at or time.monotonic()
        self._written.clear()
        self._wake.set()
        if self._thread.is_alive():
            self._written.wait(1.0)

    def withdraw_stop(self) -> None:
        """Clear an announced stop, because this rank continues after an error."""
        self._stop_reason = ""
        self._stopped_at = 0.0

    def _run_heartbeat_thread(self) -> None:
        try:
            while not self._over.is_set():
                self._write_own_status()
                failed_call = self._failed_call
                if failed_call is not None:
                    self._failed_call = None
                    self._diagnosis = self._diagnose_call(*failed_call)
                    self._diagnosed.set()
                elif self._has_long_call():
                    self._read_peer_statuses()
                self._wake.wait(self._choose_interval())
                self._wake.clear()
        except RuntimeError as error:  # the store is gone, so a pending diagnosis is never made
            self._store_error = f" ({first_line(error)})"

    def _choose_interval(self) -> float:
        """Return the seconds until the next line; more in large worlds, where all ranks may read all lines at once."""
        return (
            BEAT_SECONDS if not self._has_long_call() else max(BEAT_SECONDS, len(self.peers) / 100)
        )

    def _has_long_call(self) -> bool:
        oldest = min(list(self._waiting.values()), default=None)
        return oldest is not None and time.monotonic() - oldest > LONG_SECONDS

    def _write_own_status(self) -> None:
        now = time.monotonic()
        self._beats = self._beats + 1
        line = {
            "beat": self._beats,
            "step": self.step,
            "batches": self._batches,
            "calls": dict(self._calls),
            "waiting": {channel: now - began for channel, began in list(self._waiting.items())},
            "idle": now - self._idle_since,
            "left": self._stop_reason,
            "follows": self._is_follower,
            "lost": self.lost_ranks,
        }
        self._heartbeats.write_line(self.rank, json.dumps(line))
        if line["left"] == self._stop_reason:
            self._written.set()

    def _read_peer_statuses(self) -> None:
        now = time.monotonic()
        others = [r for r in range(len(self.peers)) if r != self.rank]
        for rank, text in self._heartbeats.read_lines(others).items():
            line = json.loads(text)
            before = self._lines.get(rank)
            if before is None or before[0] != line["beat"]:
                self._lines[rank] = line["beat"], now, line

    def _diagnose_call(self, channel: str, call_number: int) -> Diagnosis:
        """Read lines until the cause is certain, or every rank had time to write two lines."""
        began = time.monotonic()
        while True:
            self._read_peer_statuses()
            statuses = {
                r: self._build_peer_status(r, began)
                for r in range(len(self.peers))
                if r != self.rank
            }
            diagnosis = diagnose_stuck_call(
                statuses, channel, call_number, self.participants.get(channel)
            )
            if diagnosis.is_certain or time.monotonic() - began > DIAGNOSIS_SECONDS + 0.5:
                return diagnosis
            self._over.wait(0.2)
            self._write_own_status()

    def _build_peer_status(self, rank: int, diagnosis_start: float) -> PeerStatus:
        peer = self.peers[rank]
        now = time.monotonic()
        state = ""
        if peer.machine == self.peers[self.rank].machine:
            state = read_process_state(peer.pid)
        if rank not in self._lines:
            return PeerStatus(peer, now - diagnosis_start, state)
        _, read_at, line = self._lines[rank]
        return PeerStatus(
            peer,
            now - read_at,
            state,
            line["step"],
            line["calls"],
            line["waiting"],
            line["idle"],
            line["left"],
            line["follows"],
            line["lost"],
            self._find_early_end(line),
        )


@contextmanager
def report_errors_to_peers(monitor: PeerMonitor | None) -> Iterator[None]:
    """Report an exception inside this context to the other ranks, which otherwise only see that this rank left."""
    if monitor is None:
        yield
        return
    monitor.withdraw_stop()
    try:
        yield
    except PeerLost:
        raise
    except BaseException as error:
        monitor.report_stop(format_error(error))
        raise


def format_error(error: BaseException) -> str:
    """Format an exception as one text of limited length: its class and message."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH]


def _shorten_gloo(text: str) -> str:
    """Remove gloo's source position from its message, and advice that Colonnade's own message replaces."""
    text = text.partition(". This is typically")[0]
    return text.partition(".cc:")[2].partition("] ")[2] or text


def read_process_state(pid: int) -> str:
    """Return the state of a process of this machine: "running", "stopped" or "gone"; "" if the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone" if os.path.isdir("/proc/self") else ""
    return {"T": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")
