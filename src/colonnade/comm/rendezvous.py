"""Rendezvous of the ranks through keys in a store.

The store is a file that ranks of one host inherit (`colonnade train --ranks`), or a server at MASTER_ADDR:MASTER_PORT
that torchrun or rank 0 runs.

torchrun serves one store for all its restarts, so the store also contains keys of ranks that are gone: torch's own
groups would read their addresses there and wait for them. Here each attempt has a new token, which prefixes its other
keys:

    hello/<rank>              a rank's identity and random word      overwritten at each attempt
    reply/<word>              rank 0's token, for the rank with that word
    <token>/here/<rank>       identity of a rank that joined this attempt
    <token>/go                set once all ranks have joined
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

from colonnade.comm.differences import find_disagreements, format_differences, format_ranks
from colonnade.errors import PeerLost, WorldError

ROOT = "colonnade"
STORE = "COLONNADE_STORE"
HEARTBEATS = "COLONNADE_HEARTBEATS"
"""Environment variables: paths of the store and heartbeat files that ranks of one host share (`cli/ranks.py`)."""
POLL_SECONDS = 0.05  # between two checks for new ranks


@dataclass(frozen=True, slots=True)
class Peer:
    """Identity of a rank: its host, process and versions."""

    host: str
    machine: str
    """Machine and pid namespace; processes with equal values can use each other's pids."""
    pid: int
    local_ranks: int
    """Number of ranks on its host."""
    colonnade: str
    torch: str
    processor: str
    verb: str = ""
    """Command-line verb; "" for a program of the user."""


def describe_this_rank(local_ranks: int, verb: str = "") -> Peer:
    """Return the identity of this process's rank."""
    from colonnade import __version__

    boot = ""
    space = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = uuid.uuid4().hex  # cannot compare machines: no other rank counts as on this machine
    return Peer(
        socket.gethostname(),
        f"{boot}/{space}",
        os.getpid(),
        local_ranks,
        __version__,
        str(torch.__version__),
        platform.machine(),
        verb,
    )


def serves_store(rank: int) -> bool:
    """Return whether the process of this rank serves the store, which then ends with it."""
    return rank == 0 and STORE not in os.environ and not _served_by_torchrun()


def _served_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """Open the store that the environment names: the file COLONNADE_STORE, or the server at MASTER_ADDR:MASTER_PORT.

    Without torchrun, rank 0 runs the server: only at MASTER_ADDR if it is a numeric address, else on all addresses of
    its host. Raises WorldError, PeerLost."""
    if path := os.environ.get(STORE):
        return _open_file_store(path, timeout)
    address = os.environ.get("MASTER_ADDR", "")
    text = os.environ.get("MASTER_PORT", "")
    if not address or not text.isdecimal() or not 0 < int(text) < 2**16:
        raise WorldError(
            f"got MASTER_ADDR={address!r} and MASTER_PORT={text!r} in a world of {num_ranks} ranks, wanted where rank "
            "0 is to be found; torchrun sets them"
        )
    port = int(text)
    serves = serves_store(rank)
    listening = _open_listening_socket(address, port) if serves else None
    try:
        return dist.TCPStore(
            address,
            port,
            num_ranks,
            serves,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except RuntimeError as error:
        server = "rank 0" if not _served_by_torchrun() else "torchrun on the first host"
        raise PeerLost(
            f"rank {rank} of {num_ranks} found no server at MASTER_ADDR={address}, MASTER_PORT={port}, where {server} "
            f"should be: start all ranks, and let this host reach that port. ({first_line(error)})"
        ) from None


def _open_file_store(path: str, timeout: timedelta) -> dist.FileStore:
    for name in (STORE, HEARTBEATS):
        file = os.environ.get(name, "")
        if not os.access(file, os.R_OK | os.W_OK):
            raise WorldError(
                f"got {name}={file!r}, wanted a file that this process may read and write; "
                "colonnade train --ranks sets it"
            )
    store = dist.FileStore(path)  # without a number of ranks, so that no rank removes the file
    store.set_timeout(timeout)
    return store


def join_rendezvous(
    store: dist.Store, rank: int, num_ranks: int, own_identity: Peer, timeout: timedelta
) -> tuple[str, list[Peer]]:
    """Exchange identities with all ranks; return a key prefix unique to this attempt, and the identities. Collective.

    Raises PeerLost, which names the ranks that did not join within `timeout`, and WorldError if the ranks cannot work
    together."""
    deadline = time.monotonic() + timeout.total_seconds()
    word = uuid.uuid4().hex
    greeting = json.dumps({**asdict(own_identity), "word": word})
    store.set(f"{ROOT}/hello/{rank}", greeting)
    if rank == 0:
        token = word
        store.set(_arrival_key(token, 0), greeting)
        _answer_hellos(store, token, num_ranks, deadline)
    else:
        _wait_for_keys(
            store, [f"{ROOT}/reply/{word}"], deadline, lambda: _describe_missing([0], num_ranks)
        )
        token = store.get(f"{ROOT}/reply/{word}").decode()
        first = json.loads(store.compare_set(_arrival_key(token, rank), "", greeting))
        if first["word"] != word:
            raise WorldError(
                f"two processes came as rank {rank} of {num_ranks}: pid {first['pid']} on {first['host']} and pid "
                f"{own_identity.pid} on {own_identity.host}; give every process a RANK of its own"
            )
        _wait_for_keys(
            store,
            [f"{ROOT}/{token}/go"],
            deadline,
            lambda: _describe_missing(
                [r for r in range(num_ranks) if not store.check([_arrival_key(token, r)])],
                num_ranks,
            ),
        )
    greetings = [
        json.loads(text)
        for text in store.multi_get([_arrival_key(token, r) for r in range(num_ranks)])
    ]
    peers = [Peer(**{k: v for k, v in fields.items() if k != "word"}) for fields in greetings]
    _check_peer_versions(peers)
    return f"{ROOT}/{token}", peers


def _answer_hellos(store: dist.Store, attempt_token: str, num_ranks: int, deadline: float) -> None:
    """Answer on rank 0 every hello, including those of earlier attempts, until each rank has joined."""
    missing = list(range(1, num_ranks))
    answered = set()
    while missing:
        missing = [r for r in missing if not store.check([_arrival_key(attempt_token, r)])]
        # Check all ranks: a second process may announce itself as a rank that has joined.
        for r in range(1, num_ranks) if missing else ():
            if store.check([f"{ROOT}/hello/{r}"]):
                word = json.loads(store.get(f"{ROOT}/hello/{r}"))["word"]
                if word not in answered:
                    store.set(f"{ROOT}/reply/{word}", attempt_token)
                    answered.add(word)
        if missing and time.monotonic() > deadline:
            raise PeerLost(_describe_missing(missing, num_ranks))
        if missing:
            time.sleep(POLL_SECONDS)
    store.set(f"{ROOT}/{attempt_token}/go", "")


def _wait_for_keys(store: dist.Store, keys: list[str], deadline: float, describe_missing) -> None:
    try:
        store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:
        # A FileStore's timeout has no exception type of its own, and its file cannot disappear.
        if isinstance(error, dist.DistStoreError) or STORE in os.environ:
            raise PeerLost(describe_missing()) from None
        raise PeerLost(
            f"the rendezvous at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} went away while ranks "
            f"met: the process that serves it ended. ({first_line(error)})"
        ) from None


def _check_peer_versions(peers: Sequence[Peer]) -> None:
    facts_by_rank = [
        {
            "colonnade": peer.colonnade,
            "torch": peer.torch,
            "processor": peer.processor,
            "ranks on its host": peer.local_ranks,
            "verb": peer.verb,
        }
        for peer in peers
    ]
    if differences := find_disagreements(facts_by_rank):
        raise WorldError(
            f"{format_differences(differences)}; start every rank with the same command, Colonnade and torch, "
            f"and the same number "
            "on each host"
        )
    if len(peers) % peers[0].local_ranks:
        raise WorldError(
            f"got {len(peers)} ranks, {peers[0].local_ranks} on each host, wanted the same number on each; give "
            "torchrun the same --nproc-per-node everywhere"
        )


def _describe_missing(ranks: Sequence[int], num_ranks: int) -> str:
    server = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    unreachable = "" if STORE in os.environ else f" cannot reach {server},"
    return f"{format_ranks(ranks)} of {num_ranks} did not come in time: not started,{unreachable} or another program"


def _arrival_key(token: str, rank: int) -> str:
    return f"{ROOT}/{token}/here/{rank}"


def _open_listening_socket(address: str, port: int) -> int | None:
    """Open a listening socket at `address` if it is numeric, and return its descriptor; None: listen on all
    addresses."""
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
