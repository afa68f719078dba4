"""Several hosts on one machine: each a network namespace with a name, an address and a shaped uplink to a switch.

    host1 [eth0 10.77.0.1] --- port1 [switch] port2 --- [eth0 10.77.0.2] host2

The switch is a namespace of its own with a bridge in it. Links are veth pairs; `tc tbf` shapes both of their ends,
so a host sends and receives at its rate at the same time. Nothing of it exists outside these namespaces but their
names and a folder /etc/netns/NAME each, whose `hosts` file `ip netns exec` shows to what runs there; deleting a
namespace deletes its devices, addresses and queues. A process on a host sees the host's own name, too.

Names carry this process's id. What a dead process has left is swept by the next `open_hosts`.

Needs root on Linux with ip and tc. Segmentation is left to the interfaces, as real cards do it: the byte counters see
large segments with one header each, while tbf counts the headers of every packet.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BenchError

PREFIX = "colonnade-"
ETC = Path("/etc/netns")
INTERFACE = "eth0"
NETWORK = "10.77.0"
BURST_SECONDS = 1e-3
"""Part of a link's rate that may pass at once; and at least a segment."""
LEAST_BURST_BYTES = 131_072
QUEUE_SECONDS = 0.05
"""The longest a packet waits at a link before it is dropped."""
END_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SET_PARENT_DEATH_SIGNAL = 1


class NoHosts(BenchError):
    """No network namespaces on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Uplink:
    """Bytes of a host's interface since it was made, as its counters say."""

    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    """Host name that its processes see."""
    address: str
    namespace: str
    port: str
    """The other end of its link, on the switch."""


class Hosts:
    """`open_hosts` makes them; `close`, or the end of a `with`, removes them and ends what runs there."""

    def __init__(self, hosts: Sequence[Host], switch: str) -> None:
        self.hosts = tuple(hosts)
        self.switch = switch
        self.started: list[subprocess.Popen[Any]] = []

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **retained: Any,
    ) -> subprocess.Popen[Any]:
        """Run it on a host; `env` is added to ours, `kept` goes to Popen. SIGTERM reaches it when this process dies;
        ctrl-C here does not reach it: `close` ends it."""
        process = subprocess.Popen(
            _on(self.hosts[host], command),
            env={**os.environ, **interface_names(), **(env or {})},
            preexec_fn=_end_with_parent,
            start_new_session=True,
            **retained,
        )
        self.started.append(process)
        return process

    def shape(self, gigabits: float | None, hosts: Sequence[Host] | None = None) -> None:
        """Uplinks of these hosts (None: of all), in both directions, from now on; None: as fast as the machine is."""
        for host in self.hosts if hosts is None else hosts:
            for namespace, device in ((host.namespace, INTERFACE), (self.switch, host.port)):
                _tc(namespace, device, gigabits)

    def uplinks(self) -> list[Uplink]:
        """The interface counters of every host, now."""
        results = []
        for host in self.hosts:
            text = _run("ip", "-n", host.namespace, "-j", "-s", "link", "show", "dev", INTERFACE)
            counts = json.loads(text)[0]["stats64"]
            results.append(Uplink(counts["tx"]["bytes"], counts["rx"]["bytes"]))
        return results

    def cut(self, host: int) -> None:
        """Take the link down: nothing comes or goes, and no process is notified."""
        _run("ip", "-n", self.switch, "link", "set", self.hosts[host].port, "down")

    def mend(self, host: int) -> None:
        _run("ip", "-n", self.switch, "link", "set", self.hosts[host].port, "up")

    def close(self) -> None:
        for host in self.hosts:
            _remove(host.namespace)
        _remove(self.switch)
        for process in self.started:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def open_hosts(num_hosts: int, *, gigabits: float | None = None) -> Hosts:
    """Named host1, host2, .. Raises NoHosts."""
    if reason := why_no_hosts():
        raise NoHosts(reason)
    sweep()
    number = next(
        n for n in range(1000) if not (ETC / f"{PREFIX}{os.getpid()}-{n}-switch").exists()
    )
    stem = f"{PREFIX}{os.getpid()}-{number}"
    hosts = Hosts(
        [
            Host(f"host{h}", f"{NETWORK}.{h}", f"{stem}-host{h}", f"port{h}")
            for h in range(1, num_hosts + 1)
        ],
        f"{stem}-switch",
    )
    try:
        _lay_out(hosts)
        hosts.shape(gigabits)
    except BaseException:
        hosts.close()
        raise
    return hosts


def why_no_hosts() -> str | None:
    """None where `open_hosts` works."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"there is no {missing[0]} here: install iproute2 and util-linux"
    if os.geteuid():
        return "network namespaces need root"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "one", "type", "veth", "peer", "name", "other")
        _tc(probe, "one", 1.0)
    except NoHosts as error:
        return str(error)
    finally:
        _remove(probe)
    return None


def sweep() -> None:
    """Remove the namespaces of processes that are no more, and what was written of them."""
    with suppress(NoHosts):
        for line in _run("ip", "netns", "list").splitlines():
            if _is_left_over(line):
                _remove(line.split()[0], (signal.SIGKILL,))  # they heard SIGTERM when it died
    for folder in ETC.glob(f"{PREFIX}*"):
        if _is_left_over(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(name: str) -> bool:
    """Return whether the process that a namespace's name tells has ended."""
    result = re.match(rf"{PREFIX}(\d+)-", name)
    return result is not None and not Path(f"/proc/{result[1]}").exists()


def interface_names() -> dict[str, str]:
    """Return settings of gloo and NCCL for hosts with several interfaces: which one leads to the others."""
    return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}


def _lay_out(hosts: Hosts) -> None:
    names = "".join(f"{host.address} {host.name}\n" for host in hosts.hosts)
    for namespace in (hosts.switch, *(host.namespace for host in hosts.hosts)):
        (ETC / namespace).mkdir(parents=True)
        (ETC / namespace / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
    _run("ip", "-n", hosts.switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", hosts.switch, "link", "set", "bridge", "up")
    for host in hosts.hosts:
        ends = ("name", INTERFACE, "type", "veth", "peer", "name", host.port, "netns", hosts.switch)
        _run("ip", "-n", host.namespace, "link", "add", *ends)
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        _run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
        _run("ip", "-n", hosts.switch, "link", "set", host.port, "master", "bridge", "up")


def _tc(namespace: str, device: str, gigabits: float | None) -> None:
    if gigabits is None:
        with suppress(NoHosts):  # there was no queue of ours
            _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        return
    burst = max(LEAST_BURST_BYTES, int(gigabits * 1e9 / 8 * BURST_SECONDS))
    rate = f"rate {gigabits}gbit burst {burst} latency {1e3 * QUEUE_SECONDS:.0f}ms"
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate.split())


def _on(host: Host, command: Sequence[str]) -> list[str]:
    """Each of these replaces itself by the next one: the process keeps its id and hears its signals."""
    names = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.name]
    return ["ip", "netns", "exec", host.namespace, *names, *command]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _remove(namespace: str, signals: Sequence[int] = (signal.SIGTERM, signal.SIGKILL)) -> None:
    """Whatever there is of it. What runs there is told to end, and then ended."""
    with suppress(NoHosts):
        for number in signals:
            pids = [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if _all_ended(pids, time.monotonic() + END_SECONDS):
                break
    with suppress(NoHosts):
        _run("ip", "netns", "del", namespace)
    shutil.rmtree(ETC / namespace, ignore_errors=True)


def _all_ended(pids: Sequence[int], deadline: float) -> bool:
    remaining = list(pids)
    while remaining and time.monotonic() < deadline:
        remaining = [pid for pid in remaining if _is_running(pid)]
        time.sleep(0.02 if remaining else 0)
    return not remaining


def _is_running(pid: int) -> bool:
    """A process that ended and was not waited for does not run."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        text = (done.stderr.strip().splitlines() or ["no word why"])[0]
        raise NoHosts(f"`{' '.join(command)}` failed: {text}")
    return done.stdout
