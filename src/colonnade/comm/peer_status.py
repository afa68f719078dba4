"""What every rank is doing, as the others can read it, so that a lost one can be named.

A thread of each rank writes a line (`heartbeat.py`) once a second: the step, the calls it made and the one it
waits in. Nobody reads them until a call takes long or breaks. A rank whose lines stop coming is cut off, stopped or
gone; one whose lines come is alive, and the numbers of its calls tell whether it is the one waited for.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colonnade.comm.differences import SHOWN, rank_words
from colonnade.comm.heartbeat import Heartbeats
from colonnade.comm.rendezvous import Peer, first_line
from colonnade.errors import PeerLost

BEAT_SECONDS = 1.0
LONG_SECONDS = 3.0  # a call that takes longer has its thread look at the others
VERDICT_SECONDS = 2.5  # two beats: whoever is not heard meanwhile is silent
ANSWER_SECONDS = 6.0  # for a verdict, where the store may not answer
LINGER_SECONDS = (
    2.0  # the rank that serves the store stays, so that others find in it whom they lost
)
LEAVE_SECONDS = 5.0  # a thread of a rank that failed waits so long for the others
LOOK = timedelta(seconds=0.5)  # between two looks at whether waiting makes sense
PATIENCE = 12
"""Times `timeout` that a checkpoint or a start may take others longer than this rank: a disk, a download, a plan."""
PATIENT = ("checkpoint", "control")
LONGEST_WORDS = 2000  # characters of an error that are told to others


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of another rank."""

    peer: Peer
    silent: float
    """Seconds since a line of it came, as far as somebody looked."""
    state: str = ""
    """Of its process, where it can be seen: "gone", "stopped", "running"; "": it cannot."""
    step: int = 0
    calls: Mapping[str, int] | None = None
    """Made so far, by channel."""
    waiting: Mapping[str, float] | None = None
    """Seconds, by the channel of the call it is in."""
    idle: float = 0.0
    """Seconds since its last call."""
    left: str = ""
    """Why it stopped, in its own words."""
    follows: bool = False
    """It stopped because of others, which are `lost` where it could name them."""
    lost: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    ranks: tuple[int, ...] = ()
    """That are waited for in vain; (): all seem well."""
    why: str = ""
    is_certain: bool = False
    """Nothing that is heard later can change it."""


def verdict(
    heard: Mapping[int, Heard], channel: str, number: int, only: Collection[int] | None = None
) -> Verdict:
    """Who is to blame for call `number` of `channel`, which does not end, of all other ranks. Pure. `only`: ranks that
    take part in it, where not all do; another one that is lost may still be why one of them does not come.

    A rank that stopped because of another one is not the cause."""
    failed = {r: f"left ({h.left})" for r, h in heard.items() if h.left and not h.follows}
    gone = {r: "is gone, as if killed" for r, h in heard.items() if h.state == "gone"}
    stopped = {r: "is stopped (SIGSTOP)" for r, h in heard.items() if h.state == "stopped"}
    silent = {
        r: f"has not been heard of for {h.silent:.0f} s: killed, stopped, or its host is down or cut off"
        for r, h in heard.items()
        if h.silent > VERDICT_SECONDS and h.state != "running"
    }
    behind = {
        r: "has not come, though it is alive"
        for r, h in heard.items()
        if h.calls is not None and h.calls.get(channel, 0) < number
        if only is None or r in only
    }
    followed = {r for r, h in heard.items() if h.follows}
    gone_or_silent = {**silent, **stopped, **gone}
    for found in (failed, gone_or_silent, behind):
        causes = {r: why for r, why in found.items() if r not in followed}
        if causes:
            is_certain = found is failed or any(r in gone or r in stopped for r in causes)
            return Verdict(tuple(sorted(causes)), _told(heard, causes), is_certain)
    for rank in sorted(followed):
        why = f"rank {rank} stopped first: {heard[rank].left}"
        return Verdict(tuple(heard[rank].lost), why, True)
    return Verdict()


def _told(heard: Mapping[int, Heard], causes: Mapping[int, str]) -> str:
    said = []
    for rank in sorted(causes)[:SHOWN]:
        peer = heard[rank].peer
        said.append(
            f"rank {rank} (pid {peer.pid} on {peer.host}) {causes[rank]}; {doing(heard[rank])}"
        )
    if len(causes) > SHOWN:
        said.append(f"and so on for {rank_words(sorted(causes)[SHOWN:])}")
    return "; ".join(said)


def doing(heard: Heard) -> str:
    """What it last said of itself."""
    if heard.calls is None:
        return "it never said what it does"
    where = f"last seen in step {heard.step}"
    if heard.waiting:
        calls = sorted(heard.waiting.items(), key=lambda item: -item[1])
        return where + ", " + ", ".join(f"{s:.0f} s in {p!r}" for p, s in calls)
    return f"{where}, {heard.idle:.0f} s after its last call: computing, or at its data or files"


class Presence:
    """One rank's own line, and its view of the others'. `start` and `stop` its thread."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        peers: Sequence[Peer],
        rank: int,
        timeout: timedelta,
        *,
        serves: bool = False,
    ) -> None:
        """`serves`: this process serves the store that the heartbeats are in."""
        self.rank, self.peers, self.timeout = rank, tuple(peers), timeout.total_seconds()
        self._heartbeats, self._serves = heartbeats, serves
        self.step = 0
        self.lost = ""  # why no call is made any more
        self.lost_ranks: tuple[int, ...] = ()
        self.only: dict[str, Collection[int]] = {}  # who takes part, by channel, where not all do
        self._calls: dict[str, int] = {}
        self._waiting: dict[str, float] = {}
        self._idle = time.monotonic()
        self._left, self._left_at = "", 0.0
        self._beats = 0
        self._seen: dict[int, tuple[int, float, dict[str, Any]]] = {}  # beat, when, line
        self._looking_since = 0.0
        self._losing = threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._asked: tuple[str, int] | None = None
        self._answer = Verdict()
        self._follows = False
        self._store_error = ""
        self._answered, self._written = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, words: str) -> None:
        """This rank ends."""
        if not self._over.is_set():
            self.tell(words)
            self._over.set()
            self._wake.set()
            self._thread.join(1.0)

    @property
    def is_over(self) -> bool:
        """This rank has said that it ends."""
        return self._over.is_set()

    def enter(self, channel: str) -> None:
        """A call begins. Raises PeerLost where an earlier one has shown that it would not end."""
        if self.lost:
            raise PeerLost(self.lost)
        self._calls[channel] = self._calls.get(channel, 0) + 1

    def wait(self, channel: str, work: dist.Work) -> None:
        """Until the call is done. Raises PeerLost: its end cannot be waited for."""
        began = self._waiting[channel] = time.monotonic()
        limit = self.timeout * (PATIENCE if channel in PATIENT else 1)
        is_over = False
        try:
            while True:
                try:
                    work.wait(LOOK)
                    return
                except RuntimeError as error:
                    if is_over:
                        raise self.lose(channel, error) from None
                    # Its end may have come right after the look: then it is asked once more.
                    is_over = work.is_completed()
                if is_over:
                    continue
                now = time.monotonic()
                if self.lost:
                    raise PeerLost(self.lost)
                if now - began > limit:
                    raise self.lose(channel, None)
                if self._left and now - max(began, self._left_at) > LEAVE_SECONDS:
                    self.lost = f"rank {self.rank} stopped: {self._left}"
                    raise PeerLost(self.lost)
        finally:
            self._waiting.pop(channel, None)
            self._idle = time.monotonic()

    def lose(self, channel: str, error: BaseException | None) -> PeerLost:
        """The call has failed, or took too long: whose fault it is. No call is made from here on."""
        waited = time.monotonic() - self._waiting.get(channel, time.monotonic())
        with self._losing:
            if self.lost:
                return PeerLost(self.lost)
            number = self._calls.get(channel, 0)
            self._answered.clear()
            self._asked = channel, number
            self._wake.set()
            if self._answers():
                self.lost_ranks, why = self._answer.ranks, self._answer.why
                why = why or "every rank is alive and in this call: the network between them failed"
            else:
                why = f"{self._heartbeats.silence}{self._store_error}"
            whom = rank_words(self.lost_ranks) if self.lost_ranks else "a peer"
            heard = f" (gloo: {_plain(first_line(error))})" if error is not None else ""
            lost = (
                f"rank {self.rank} of {len(self.peers)} lost {whom} in {channel!r} (call {number}, step {self.step}, "
                f"after {waited:.0f} s): {why}. The run goes on from its newest checkpoint: start it again, "
                f"which torchrun "
                f"--max-restarts does{heard}"
            )
            self._follows = True
            self.tell(lost)
            if self._serves:
                time.sleep(LINGER_SECONDS)
            self.lost = lost
            return PeerLost(lost)

    def _answers(self) -> bool:
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._answered.wait(0.1):
                return True
        return self._answered.is_set()

    def tell(self, words: str) -> None:
        """This rank stops, and says why to those that will wait for it."""
        self._left, self._left_at = self._left or words, self._left_at or time.monotonic()
        self._written.clear()
        self._wake.set()
        if self._thread.is_alive():
            self._written.wait(1.0)

    def come_back(self) -> None:
        """This rank goes on after an error that it told."""
        self._left, self._left_at = "", 0.0

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._beat()
                asked = self._asked
                if asked is not None:
                    self._asked = None
                    self._answer = self._judge(*asked)
                    self._answered.set()
                elif self._is_long():
                    self._look()
                self._wake.wait(self._pause())
                self._wake.clear()
        except RuntimeError as error:  # the store is gone: what it was asked stays unanswered
            self._store_error = f" ({first_line(error)})"

    def _pause(self) -> float:
        """All ranks may look at all others' lines at once."""
        return BEAT_SECONDS if not self._is_long() else max(BEAT_SECONDS, len(self.peers) / 100)

    def _is_long(self) -> bool:
        oldest = min(list(self._waiting.values()), default=None)
        return oldest is not None and time.monotonic() - oldest > LONG_SECONDS

    def _beat(self) -> None:
        now, self._beats = time.monotonic(), self._beats + 1
        line = {
            "beat": self._beats,
            "step": self.step,
            "calls": dict(self._calls),
            "waiting": {channel: now - began for channel, began in list(self._waiting.items())},
            "idle": now - self._idle,
            "left": self._left,
            "follows": self._follows,
            "lost": self.lost_ranks,
        }
        self._heartbeats.write(self.rank, json.dumps(line))
        if line["left"] == self._left:
            self._written.set()

    def _look(self) -> None:
        now = time.monotonic()
        others = [r for r in range(len(self.peers)) if r != self.rank]
        for rank, text in self._heartbeats.read(others).items():
            line = json.loads(text)
            before = self._seen.get(rank)
            if before is None or before[0] != line["beat"]:
                self._seen[rank] = line["beat"], now, line

    def _judge(self, channel: str, number: int) -> Verdict:
        """Looks until somebody is to blame, or everybody was heard twice."""
        began = time.monotonic()
        while True:
            self._look()
            heard = {r: self._heard(r, began) for r in range(len(self.peers)) if r != self.rank}
            found = verdict(heard, channel, number, self.only.get(channel))
            if found.is_certain or time.monotonic() - began > VERDICT_SECONDS + 0.5:
                return found
            self._over.wait(0.2)
            self._beat()

    def _heard(self, rank: int, began: float) -> Heard:
        peer, now = self.peers[rank], time.monotonic()
        state = ""
        if peer.machine == self.peers[self.rank].machine:
            state = process_state(peer.pid)
        if rank not in self._seen:
            return Heard(peer, now - began, state)
        _, when, line = self._seen[rank]
        return Heard(
            peer, now - when, state, line["step"], line["calls"], line["waiting"], line["idle"],
            line["left"], line["follows"], line["lost"],
        )  # fmt: skip


@contextmanager
def telling(presence: Presence | None) -> Iterator[None]:
    """An error in here is told to the other ranks, which would else only see this one leave."""
    if presence is None:
        yield
        return
    presence.come_back()
    try:
        yield
    except PeerLost:
        raise
    except BaseException as error:
        presence.tell(words_of(error))
        raise


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_WORDS]


def _plain(text: str) -> str:
    """What gloo says, without where in its source it does, and advice that is ours to give."""
    text = text.partition(". This is typically")[0]
    return text.partition(".cc:")[2].partition("] ")[2] or text


def process_state(pid: int) -> str:
    """ "running", "stopped" or "gone"; "" where this system does not say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone" if os.path.isdir("/proc/self") else ""
    return {"T": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")
