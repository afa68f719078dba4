"""`colonnade` for scripts that tests run: processes forked with torch imported, where a new one needs seconds for it.

The command on the path is a client of a few milliseconds. It hands its words, folder, environment and standard streams
to the process of the tests, which forks a process that runs `colonnade.cli.main` with them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from ranks import preloaded_context

CLIENT = """#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
call = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(call).to_bytes(8, "big")], [0, 1, 2])
server.sendall(call)
sys.exit(int(server.recv(8) or 1))
"""


@contextmanager
def colonnade_on_path(folder: Path) -> Iterator[str]:
    """Write the command into `folder`, serve it, and yield a PATH that begins with the folder."""
    address = str(folder / "socket")
    script = folder / "colonnade"
    script.write_text(CLIENT.format(python=sys.executable, address=address))
    script.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        yield f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _serve(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_run, args=(client,), daemon=True).start()


def _run(client: socket.socket) -> None:
    with client:
        length, streams, _, _ = socket.recv_fds(client, 8, 3)
        with client.makefile("rb") as file:
            arguments, folder, environment = json.loads(file.read(int.from_bytes(length, "big")))
        handles = [reduction.DupFd(stream) for stream in streams]
        for stream in streams:
            os.close(stream)
        process: Any = preloaded_context().Process(
            target=_command, args=(arguments, folder, environment, handles)
        )
        process.start()
        process.join()
        code = process.exitcode
        client.sendall(str(code if code >= 0 else 128 - code).encode())


def _command(arguments: list[str], folder: str, environment: dict[str, str], handles: list) -> None:
    """Become the command: its streams, folder, environment and words. Ends as the command does."""
    for number, handle in enumerate(handles):
        stream = handle.detach()
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["colonnade", *arguments]
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    from colonnade.cli import main

    main()
