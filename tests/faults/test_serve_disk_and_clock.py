"""A server beside full disks and clocks that jump: it answers, and nothing half written is served."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import served
from disks import FailingDisk
from in_process import fields_of, infer, opened, publish, score_step, scores_of, wait_for
from served import bearer, serving

from colonnade.checkpoint.header import list_checkpoints
from colonnade.publish.deltas import CURRENT, DeltaPublisher, read_current
from colonnade.serve import control, versions
from colonnade.serve.access_log import AccessLog
from colonnade.serve.versions import estimate_age

HOUR = 3600.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    served.train(folder / "run", folder / "published")
    return folder


@pytest.fixture(scope="module")
def steps(trained) -> list[int]:
    return list_checkpoints(trained / "run")


@pytest.fixture(scope="module")
def batch():
    return served.samples()[0]


def wait_for_look(client) -> None:
    """Wait until the server has looked for news once more."""
    looks = client.service.looks
    wait_for(lambda: client.service.looks > looks + 1)


@pytest.fixture
def counted(monkeypatch) -> None:
    """Let a service count its looks for news."""
    from colonnade.serve.service import Service

    original = Service.note_poll

    def note_poll(service, model):
        service.looks = getattr(service, "looks", 0) + 1
        original(service, model)

    monkeypatch.setattr(Service, "note_poll", note_poll)


def test_a_publisher_whose_disk_is_full_at_any_change(trained, tmp_path, batch, steps, counted):
    """The disk fills up at its first, second, ... change: the step before is served, whole, until there is space."""
    live = tmp_path / "live"
    lines: list[str] = []
    publish_step(trained, live, steps[0], lines)
    expected = {step: score_step(trained, batch, step)[:, 0].numpy() for step in steps}
    num_full = 0
    with opened(live, tmp_path / "state", poll_seconds=0.02) as client:
        for number in range(1, 40):
            disk = FailingDisk(number, once=False)
            publisher = DeltaPublisher(trained / "run", live, disk)
            publisher.send(steps[1], steps[:2], lines.append)
            if publisher.problem is None and not disk.num_refused:
                break
            num_full += 1
            wait_for_look(client)
            answer = infer(client, batch)
            step = int(fields_of(answer)["model_version"])
            assert step in steps[:2] and np.array_equal(scores_of(answer), expected[step])
            assert step == read_current(live).step and client.service.model.problem is None
            if step == steps[0]:
                assert "No space left" in lines[-1]
        assert num_full > 4
        wait_for(lambda: client.service.model.step == steps[1])
        publish_step(trained, live, steps[2], lines)
        wait_for(lambda: client.service.model.step == steps[2])
        assert np.array_equal(scores_of(infer(client, batch)), expected[steps[2]])


def publish_step(trained: Path, live: Path, step: int, lines: list[str]) -> None:
    publisher = DeltaPublisher(trained / "run", live, FailingDisk(0, once=True))
    publisher.send(step, [step], lines.append)
    publisher.close()


def refuse_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_under_the_servers_own_folder(trained, tmp_path, batch, steps, monkeypatch):
    """A pin that does not fit says so, leaves nothing behind, and works when there is space."""
    with opened(trained / "published", tmp_path / "state") as client:

        def pin():
            return client("POST", "/admin/pin", json={"step": steps[0]}, headers=bearer())

        with monkeypatch.context() as full:
            full.setattr(control.os, "link", refuse_space)
            full.setattr(control.shutil, "copyfile", refuse_space)
            answer = pin()
            assert answer.status_code == 507, answer.text
            assert "No space left" in answer.json()["error"] and "free" in answer.json()["error"]
        with monkeypatch.context() as full:
            full.setattr(control, "write_durably", refuse_space)
            assert pin().status_code == 507
        with monkeypatch.context() as full:
            full.setattr(control.os, "replace", refuse_space)
            assert pin().status_code == 507
        pins = tmp_path / "state" / "pins"
        assert [path.name for path in pins.iterdir() if path.name.startswith(".")] == []
        assert list((tmp_path / "state").glob("*.tmp")) == []
        assert client.service.model.control.read().pins == ()
        assert infer(client, batch).status_code == 200
        assert pin().json()["pins"] == [steps[0]]


def test_an_access_log_on_a_full_disk(trained, tmp_path):
    """Requests are answered, lost lines are counted, and the server ends well."""
    with serving(trained / "published", "--access-log", "/dev/full", "--poll", 0.05) as server:
        with server.client() as client:
            for _ in range(20):
                assert client.get("/v2/health/ready").status_code == 200
            wait_for(lambda: read_metric(client, "colonnade_log_lines_lost") >= 20)
    assert server.errors == ""


def read_metric(client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_line_that_was_cut_is_ended(tmp_path, monkeypatch):
    """The disk takes half of a write, then nothing, then there is space: whole lines, one torn, the others counted."""
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    log.start()
    write, room = os.write, [70]

    def write_what_fits(descriptor, content):
        if descriptor != log._descriptor:
            return write(descriptor, content)
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        count = write(descriptor, content[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as full:
        full.setattr("colonnade.serve.access_log.os.write", write_what_fits)
        log.write("first", {"n": 1})
        log.write("second", {"n": 2})
        wait_for(lambda: log.num_lost == 1)
        log.write("third", {"n": 3})
        wait_for(lambda: log.num_lost == 2)
    log.write("fourth", {"n": 4})
    wait_for(lambda: "fourth" in path.read_text())
    log.close()
    lines = path.read_text().splitlines()
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    assert [line["event"] for line in whole] == ["first", "fourth", "lost"]
    assert whole[-1]["lines"] == 2 and len(lines) == 4


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_the_age_of_a_new_checkpoint_survives_jumps_of_the_clock(
    jump, trained, tmp_path, steps, monkeypatch
):
    """The time of day jumps by days between two checkpoints; the age stays what it is."""
    live = tmp_path / "live"
    publish(trained, live, steps[0])
    now = time.time
    with opened(live, tmp_path / "state") as client:
        model = client.service.model
        monkeypatch.setattr(versions.time, "time", lambda: now() + jump)
        began = time.monotonic()
        publish(trained, live, steps[1])
        wait_for(lambda: model.step == steps[1])
        assert 0 <= model.age_seconds <= time.monotonic() - began + 1
        text = client("GET", "/metrics").text
        age = next(line for line in text.splitlines() if line.startswith("colonnade_model_age_seconds "))  # fmt: skip
        assert 0 <= float(age.split()[-1]) < 30
        first = model.age_seconds
        monkeypatch.setattr(versions.time, "time", lambda: now() - jump)
        assert 0 <= model.age_seconds - first < 5


def test_the_first_checkpoint_after_a_wait_is_no_older_than_the_wait(trained, tmp_path, steps):
    """The file is dated an hour back, as by a host with a wrong clock."""
    live, part = tmp_path / "live", tmp_path / "part"
    publish(trained, part, steps[0])
    old = time.time() - HOUR
    os.utime(part / CURRENT, (old, old))
    with opened(live, tmp_path / "state") as client:
        wait_for(lambda: "no checkpoint yet" in (client.service.model.problem or ""))
        part.rename(live)
        wait_for(lambda: client.service.model.step == steps[0])
        assert client.service.model.age_seconds < 60


def test_an_age_is_that_of_the_file_within_what_is_known():
    assert estimate_age(HOUR, 100.0, None) == HOUR
    assert estimate_age(-HOUR, 100.0, None) == 0
    assert estimate_age(0.3, 100.0, 99.0) == 0.3
    assert estimate_age(HOUR, 100.0, 99.0) == 1.0
    assert estimate_age(-HOUR, 100.0, 99.0) == 0


def test_no_failure_ends_the_thread_that_follows(trained, tmp_path, steps, monkeypatch):
    """The note of a look fails, too: the next checkpoint is served all the same."""
    live = tmp_path / "live"
    publish(trained, live, steps[0])
    with opened(live, tmp_path / "state") as client:
        with monkeypatch.context() as broken:
            broken.setattr(client.service.metrics, "observe_model", refuse_space)
            wait_for(lambda: client.service.model.num_failures > 1)
        publish(trained, live, steps[1])
        wait_for(lambda: client.service.model.step == steps[1])
