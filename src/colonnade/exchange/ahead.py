"""Clean rows of the next batch travel while this one computes: who lets them go, and the thread that sends them.

    lookahead thread   hand(ticket) of every batch it has prepared, in order
    training thread    values of batch t have come: let(what is in flight). Clean rows of t+1 may leave
    thread "ahead"     waits for t+1's rows and sends the clean ones, on a group of its own
    training thread    before it fetches t+1: take(ticket). What has not come is fetched after the update of t

Clean are rows that no batch in flight holds: no update that is still to come before t+1 is read can change them, so
they are the bits that `fetch` would send. What changes rows otherwise (a batch trained beside the lookahead, rows that
are deleted or loaded) spoils what may have left by then. All of this is in the order of the training thread's program,
which ranks share, so it needs no word between them but one bit for each row, from its owner.

Let go after the values of t have come: until then the link has more urgent things to carry.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from colonnade import _native
from colonnade.exchange.clean import Rows, clean_rows
from colonnade.exchange.contract import Exchange, RowSource, Ticket
from colonnade.store.dram import DramStore
from colonnade.topology.waiting import waiting

END = "end"


def open_ahead(
    num_ranks: int,
    exchange: Exchange,
    store: object,
    depth: int | Literal["auto"],
    reads_ahead: int,
    *,
    never: Sequence[int],
) -> Ahead | None:
    """For a lookahead of this depth, where a plan wants it; None where nothing leaves ahead, by what all ranks know
    alike. Not under bounded staleness, which reads ahead all there is. Not of rows on a device, which come down when
    they are fetched."""
    if num_ranks == 1 or depth == 0 or reads_ahead or not exchange.sends_clean:
        return None
    return Ahead(exchange, store, never) if isinstance(store, DramStore) else None


@dataclass(slots=True)
class Leaving:
    """Of a ticket that was handed over. `done`: its clean rows have left, or will not."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Ahead:
    """One for each lookahead. `let`, `spoil`, `take` and `end` are called by the training thread, at the same places on
    every rank."""

    def __init__(self, exchange: Exchange, store: DramStore, never: Sequence[int]) -> None:
        """never: tables whose rows are never clean."""
        self.exchange, self.store, self.never = exchange, store, tuple(never)
        self.num_rows = 0  # that this rank has sent ahead, to itself, too
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        # For one ticket after the other: what is in flight when it is let go, None to leave it, END for all others.
        self._words: queue.SimpleQueue[list[Rows] | str | None] = queue.SimpleQueue()
        self._is_let = self._is_spoilt = False  # the next ticket
        self._thread: threading.Thread | None = None

    def hand(self, ticket: Ticket | None) -> None:
        """The lookahead's thread, of each ticket in order; None: there will be no other."""
        if ticket is not None:
            ticket.leaving = Leaving()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
                self._thread.start()
        self._tickets.put(ticket)

    def let(self, live: Sequence[Ticket]) -> None:
        """The newest batch has its values. live: used batches whose updates are to come, it among them."""
        if not self._is_let:
            self._is_let = True
            self._words.put([(ticket.pinned, ticket.owned_offsets) for ticket in live])

    def spoil(self) -> None:
        """Rows change otherwise, now or at the next update: what was let go is not to be used."""
        self._is_spoilt = True

    def take(self, ticket: Ticket) -> None:
        """Before `fetch`: what was sent ahead of it is known. Raises what the thread did; PeerLost."""
        if ticket.leaving is None:
            return
        if not self._is_let:
            self._words.put(None)
        is_spoilt, self._is_let, self._is_spoilt = self._is_spoilt, False, False
        with waiting("fetch"):
            ticket.leaving.done.wait()
        if ticket.leaving.error is not None:
            raise ticket.leaving.error
        if is_spoilt:
            self.exchange.recall(ticket)

    def end(self) -> None:
        """No other ticket leaves. One that was let go does: other ranks wait for it."""
        self._words.put(END)

    def _run(self) -> None:
        # As the lookahead's thread: training should get the processors.
        _native.limit_threads_here(max(1, _native.num_threads() // 4))
        is_over = False
        while (ticket := self._tickets.get()) is not None:
            assert ticket.leaving is not None
            try:
                word = None if is_over else self._words.get()
                if isinstance(word, list):
                    self._send(ticket, word)
                is_over = is_over or word == END
            except BaseException as error:  # raised again by `take`
                ticket.leaving.error, is_over = error, True
            finally:
                ticket.leaving.done.set()
            del ticket

    def _send(self, ticket: Ticket, in_flight: Sequence[Rows]) -> None:
        slots, clean = ticket.slots, torch.zeros(len(ticket.owned_ids), dtype=torch.bool)
        if slots is None:  # prepared while the lookahead closes: it will be dropped
            slots = torch.empty(0, dtype=torch.int32)
        else:
            self.store.wait(ticket.job, is_stall=False)
            clean = clean_rows((slots, ticket.owned_offsets), in_flight, self.never)
        source = RowSource(self.store.views(), slots, False)
        self.num_rows += self.exchange.send_clean(ticket, source, clean)
