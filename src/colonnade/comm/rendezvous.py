"""Rendezvous of the ranks, by keys in a store: a file that ranks of one host inherit (`colonnade train --ranks`), or
what torchrun, or rank 0, serves at MASTER_ADDR:MASTER_PORT.

torchrun serves one store for all its restarts, so keys of ranks that are gone lie in it: torch's own groups read their
addresses there and wait for them. Here every attempt has a token that nobody had before it, under which all else lies:

    hello/<rank>              who I am, and a word of my own         overwritten at each attempt
    reply/<word>              rank 0's token, for whoever said the word
    <token>/here/<rank>       who came, in this attempt
    <token>/go                all have
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from colonnade.comm.differences import disagreements, joined, rank_words
from colonnade.errors import PeerLost, WorldError

ROOT = "colonnade"
STORE, HEARTBEATS = "COLONNADE_STORE", "COLONNADE_HEARTBEATS"
"""Variables that name the files in which ranks of one host meet, and write their heartbeats (`cli/ranks.py`)."""
LOOK_SECONDS = 0.05  # between two looks at who has come


@dataclass(frozen=True, slots=True)
class Peer:
    """Who a rank is."""

    host: str
    machine: str
    """The same where processes see each other's numbers."""
    pid: int
    local_ranks: int
    """Ranks on its host."""
    colonnade: str
    torch: str
    processor: str
    verb: str = ""
    """Of the command line; "": a program of the user's own."""


def myself(local_ranks: int, verb: str = "") -> Peer:
    from colonnade import __version__

    boot, space = "", ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = uuid.uuid4().hex  # nothing to compare by: nobody is on the same machine
    return Peer(
        socket.gethostname(), f"{boot}/{space}", os.getpid(), local_ranks,
        __version__, str(torch.__version__), platform.machine(), verb,
    )  # fmt: skip


def serves_store(rank: int) -> bool:
    """Whether the store ends with this process."""
    return rank == 0 and STORE not in os.environ and not _served_by_torchrun()


def _served_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """Open the store that the environment names: the file COLONNADE_STORE, which no port leads to, or the server at
    MASTER_ADDR:MASTER_PORT. Without torchrun rank 0 serves that: at MASTER_ADDR alone if it is a number, else on all of
    its host's addresses. Raises WorldError, PeerLost."""
    if path := os.environ.get(STORE):
        return _open_file(path, timeout)
    address, text = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not text.isdecimal() or not 0 < int(text) < 2**16:
        raise WorldError(
            f"got MASTER_ADDR={address!r} and MASTER_PORT={text!r} in a world of {num_ranks} ranks, wanted where rank "
            "0 is to be found; torchrun sets them"
        )
    port = int(text)
    serves = serves_store(rank)
    listening = _listen(address, port) if serves else None
    try:
        return dist.TCPStore(
            address, port, num_ranks, serves, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listening,
        )  # fmt: skip
    except RuntimeError as error:
        where = "rank 0" if not _served_by_torchrun() else "torchrun on the first host"
        raise PeerLost(
            f"rank {rank} of {num_ranks} found nobody at MASTER_ADDR={address}, MASTER_PORT={port}, where {where} "
            f"should be: start all ranks, and let this host reach that port. ({first_line(error)})"
        ) from None


def _open_file(path: str, timeout: timedelta) -> dist.FileStore:
    for name in (STORE, HEARTBEATS):
        file = os.environ.get(name, "")
        if not os.access(file, os.R_OK | os.W_OK):
            raise WorldError(
                f"got {name}={file!r}, wanted a file that this process may read and write; "
                "colonnade train --ranks sets it"
            )
    store = dist.FileStore(path)  # without a number of ranks: none of them removes the file
    store.set_timeout(timeout)
    return store


def meet(
    store: dist.Store, rank: int, num_ranks: int, me: Peer, timeout: timedelta
) -> tuple[str, list[Peer]]:
    """Collective: a prefix for the keys of this attempt alone, and who all ranks are. Raises PeerLost, naming the ranks
    that have not come within `timeout`, and WorldError where they cannot work together."""
    deadline = time.monotonic() + timeout.total_seconds()
    word = uuid.uuid4().hex
    said = json.dumps({**asdict(me), "word": word})
    store.set(f"{ROOT}/hello/{rank}", said)
    if rank == 0:
        token = word
        store.set(_here(token, 0), said)
        _welcome(store, token, num_ranks, deadline)
    else:
        _wait(store, [f"{ROOT}/reply/{word}"], deadline, lambda: _missing([0], num_ranks))
        token = store.get(f"{ROOT}/reply/{word}").decode()
        first = json.loads(store.compare_set(_here(token, rank), "", said))
        if first["word"] != word:
            raise WorldError(
                f"two processes came as rank {rank} of {num_ranks}: pid {first['pid']} on {first['host']} and pid "
                f"{me.pid} on {me.host}; give every process a RANK of its own"
            )
        everybody = range(num_ranks)
        _wait(store, [f"{ROOT}/{token}/go"], deadline, lambda: _missing(
            [r for r in everybody if not store.check([_here(token, r)])], num_ranks
        ))  # fmt: skip
    heard = [
        json.loads(text) for text in store.multi_get([_here(token, r) for r in range(num_ranks)])
    ]
    peers = [Peer(**{k: v for k, v in each.items() if k != "word"}) for each in heard]
    _check(peers)
    return f"{ROOT}/{token}", peers


def _welcome(store: dist.Store, token: str, num_ranks: int, deadline: float) -> None:
    """Rank 0: answer every hello, those of earlier attempts too, until one rank of each number took the answer."""
    missing, answered = list(range(1, num_ranks)), set()
    while missing:
        missing = [r for r in missing if not store.check([_here(token, r)])]
        for r in (
            range(1, num_ranks) if missing else ()
        ):  # all: another may come as a rank that is there
            if store.check([f"{ROOT}/hello/{r}"]):
                word = json.loads(store.get(f"{ROOT}/hello/{r}"))["word"]
                if word not in answered:
                    store.set(f"{ROOT}/reply/{word}", token)
                    answered.add(word)
        if missing and time.monotonic() > deadline:
            raise PeerLost(_missing(missing, num_ranks))
        if missing:
            time.sleep(LOOK_SECONDS)
    store.set(f"{ROOT}/{token}/go", "")


def _wait(store: dist.Store, keys: list[str], deadline: float, words) -> None:
    try:
        store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:
        # A FileStore's timeout has no type of its own; its file cannot go away.
        if isinstance(error, dist.DistStoreError) or STORE in os.environ:
            raise PeerLost(words()) from None
        raise PeerLost(
            f"the rendezvous at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} went away while ranks "
            f"met: the process that serves it ended. ({first_line(error)})"
        ) from None


def _check(peers: Sequence[Peer]) -> None:
    told = [
        {
            "colonnade": peer.colonnade,
            "torch": peer.torch,
            "processor": peer.processor,
            "ranks on its host": peer.local_ranks,
            "verb": peer.verb,
        }
        for peer in peers
    ]
    if found := disagreements(told):
        raise WorldError(
            f"{joined(found)}; start every rank with the same command, Colonnade and torch, as many on each host"
        )
    if len(peers) % peers[0].local_ranks:
        raise WorldError(
            f"got {len(peers)} ranks, {peers[0].local_ranks} on each host, wanted as many on each; give torchrun the "
            "same --nproc-per-node everywhere"
        )


def _missing(ranks: Sequence[int], num_ranks: int) -> str:
    server = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    unreachable = "" if STORE in os.environ else f" cannot reach {server},"
    return f"{rank_words(ranks)} of {num_ranks} did not come in time: not started,{unreachable} or another program"


def _here(token: str, rank: int) -> str:
    return f"{ROOT}/{token}/here/{rank}"


def _listen(address: str, port: int) -> int | None:
    """A socket bound to `address` if it is a number of this host; None: all addresses."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.inet_pton(family, address)
    except OSError:
        return None
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise WorldError(
            f"rank 0 cannot listen at MASTER_ADDR={address}, MASTER_PORT={port}: {error.strerror}; give a free "
            "port, and an address of rank 0's host (or its name)"
        ) from None
    return listening.detach()


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
