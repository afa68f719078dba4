"""`colonnade` for tests that run it: processes forked with torch imported, where a new one needs seconds for it.

For scripts, the command on the path is a client of a few milliseconds. It hands its words, folder, environment and
standard streams to the process of the tests, which forks a process that runs `colonnade.cli.main` with them. For what
looks at the processes themselves, `start_command` forks the command, and that forks its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import call_records
from ranks import Child, preloaded_context, start_child

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


class ForkedCommand:
    """`colonnade WORDS`, forked, with the methods of a `subprocess.Popen` whose outputs are pipes of text."""

    def __init__(self, words: Sequence[str], **environment: str) -> None:
        outputs = os.pipe(), os.pipe()
        with open(os.devnull) as nothing:
            streams = nothing.fileno(), *(writer for _, writer in outputs)
            handles = [reduction.DupFd(stream) for stream in streams]
        call = list(words), os.getcwd(), {**os.environ, **environment}, handles
        self._process: Any = preloaded_context().Process(target=_command, args=call)
        self._process.start()
        for _, writer in outputs:
            os.close(writer)
        self.pid = self._process.pid
        self.stdout, self.stderr = (open(reader, encoding="utf-8") for reader, _ in outputs)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if self.poll() is None:
            raise TimeoutError(f"process {self.pid} had not ended after {seconds:g} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def start_command(
    output: Path, environment: Mapping[str, str], words: Sequence[str], *, is_forked: bool = True
) -> Child:
    """Start `colonnade WORDS`; what it prints goes to the file `output`. Not `is_forked`: as a user does, and its ranks
    are new processes, too, which costs seconds of processor time for each."""
    if is_forked:
        return start_child(output, environment, run_command, list(words))
    with output.open("ab") as file:
        command = [sys.executable, "-m", "colonnade", *words]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    return Child(StartedProcess(process), output)


class StartedProcess:
    """A started process that has the attributes of a forked one."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.pid = process.pid
        self.kill = process.kill
        self._process = process

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, seconds: float | None = None) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass


def run_command(words: Sequence[str]) -> NoReturn:
    """Do what `colonnade WORDS` does, in this process, and end with its status. It forks the ranks that it starts."""
    from colonnade.cli import ranks as launch

    launch.subprocess = SimpleNamespace(Popen=ForkedRank)  # type: ignore[attr-defined]
    _run_main(words)


def _run_main(words: Sequence[str]) -> NoReturn:
    from colonnade.cli import main

    sys.argv = ["colonnade", *words]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    if code == 0:
        call_records.end_record()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class ForkedRank:
    """A rank as the launcher starts it with `subprocess.Popen`, but forked from the launcher.

    This process has no threads, and was forked from one that imports only; so a fork of it is as good as a new process.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]
    ) -> None:
        assert list(command[:4]) == [sys.executable, "-u", "-m", "colonnade"]
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in pass_fds:
                    try:
                        os.close(int(name))
                    except OSError:
                        pass  # that of the listing itself
            os.environ.clear()
            os.environ.update(env)
            _run_main(command[4:])

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
