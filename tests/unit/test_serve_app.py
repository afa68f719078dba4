"""The server in this process: answers to the bit, versions, rollback, limits, errors, damage, metrics."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import served
import torch
from in_process import (
    INFER,
    fields_of,
    infer,
    opened,
    publish,
    score_step,
    scores_of,
    wait_for,
)
from served import bearer, to_binary, to_json, to_tensors

from colonnade import Predictor, Recommender
from colonnade.checkpoint.header import list_checkpoints
from colonnade.errors import CheckpointError, ConfigError, StorageError
from colonnade.publish import deltas
from colonnade.publish.delivery import list_published_steps
from colonnade.publish.deltas import CURRENT, delta_file_name, read_current
from colonnade.serve.control import ControlFolder, ServeOrder, copy_published_step
from colonnade.serve.service import SharedResult
from colonnade.store import mapped


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run and its publication of four steps: one base, three changes."""
    folder = tmp_path_factory.mktemp("served")
    served.train(folder / "run", folder / "published")
    return folder


@pytest.fixture(scope="module")
def batch():
    return served.samples()[0]


@pytest.fixture
def client(trained, tmp_path):
    with opened(trained / "published", tmp_path / "state") as client:
        yield client


@pytest.fixture(scope="module")
def steps(trained) -> list[int]:
    return list_checkpoints(trained / "run")


def test_answers_are_the_predictors_to_the_bit(client, trained, batch, steps):
    expected = score_step(trained, batch, steps[-1])[:, 0].numpy()
    binary = infer(client, batch)
    text = client("POST", INFER, json=to_json(to_tensors(batch)))
    for answer in (binary, text):
        assert np.array_equal(scores_of(answer), expected)
        fields = fields_of(answer)
        assert fields["model_version"] == str(steps[-1]) and fields["parameters"]["run"]
    assert binary.headers["content-type"] == "application/octet-stream"


def test_each_published_step_answers_by_its_number(client, trained, batch, steps):
    for step in steps:
        answer = infer(client, batch, f"/v2/models/model/versions/{step}/infer")
        assert np.array_equal(scores_of(answer), score_step(trained, batch, step)[:, 0].numpy())
        assert fields_of(answer)["model_version"] == str(step)
    assert client.service.model.num_open_versions == client.service.options.max_versions
    missing = infer(client, batch, "/v2/models/model/versions/5/infer")
    assert missing.status_code == 404 and ", ".join(map(str, steps)) in missing.json()["error"]


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_gc():
    """Let reference counts alone free memory, as between two collections of the oldest generation."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_closed_versions_leave_no_descriptors(trained, tmp_path, batch, steps, no_gc):
    with opened(trained / "published", tmp_path / "state", max_versions=1) as client:
        infer(client, batch, f"/v2/models/model/versions/{steps[0]}/infer")
        before = count_descriptors()
        for step in steps[:-1] * 4:
            answer = infer(client, batch, f"/v2/models/model/versions/{step}/infer")
            assert answer.status_code == 200
        assert count_descriptors() <= before + 2


def test_a_publication_that_cannot_be_opened_leaves_no_descriptors(trained, tmp_path, steps, no_gc):
    """A server tries it again at each look."""
    copy_published_step(trained / "published", tmp_path / "part", steps[2])
    path = tmp_path / "part" / delta_file_name(2)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # it is a link to a file of another publication
    path.write_bytes(content)
    before, threads = count_descriptors(), threading.active_count()
    for at in (None, None, steps[2], steps[2]):
        with pytest.raises(StorageError):
            Predictor.open(tmp_path / "part", at=at)
    assert (count_descriptors(), threading.active_count()) == (before, threads)


def test_a_closed_fork_leaves_the_other_open(trained, batch, no_gc):
    """They share files, each by a descriptor of its own."""
    before = count_descriptors()
    with Predictor.open(trained / "published") as predictor:
        expected = predictor(batch)
        predictor.rows.tables[0].file.file.checked[:] = 0  # reads its file again
        predictor.rows.tables[0].file.file.is_checked = False
        other = predictor.fork()
        predictor.close()
        assert torch.equal(other(batch), expected)
        other.close()
    assert count_descriptors() == before


def test_an_older_step_has_the_bits_of_its_export(trained, batch, steps):
    for step in steps:
        with Predictor.open(trained / "published", at=step) as predictor:
            assert predictor.step == step and predictor.run
            assert torch.equal(predictor(batch), score_step(trained, batch, step))
            with pytest.raises(ConfigError):
                predictor.refresh()
    with pytest.raises(
        CheckpointError, match=f"got step 3, wanted one that is published still: {steps[0]}"
    ):
        Predictor.open(trained / "published", at=3)
    with pytest.raises(ConfigError, match="at='best', wanted a published step"):
        Predictor.open(trained / "published", at="best")


def test_steps_of_several_bases_are_listed(tmp_path, monkeypatch):
    """Each checkpoint outgrows the base: the two newest bases are there, and nothing before."""
    monkeypatch.setattr(deltas, "MIN_BYTES_FOR_BASE", 1)
    monkeypatch.setattr(deltas.DeltaPublisher, "_export_new_base", count_bases := CountBases())
    served.train(tmp_path / "run", tmp_path / "published", {"train.checkpoint_steps": 2})
    assert count_bases.number > 2
    current = read_current(tmp_path / "published")
    steps = list_checkpoints(tmp_path / "run")
    listed = list(list_published_steps(tmp_path / "published", current))
    assert len(current.bases) == 2 and listed == steps[-len(listed) :] and len(listed) < len(steps)
    for step in listed:
        with Predictor.open(tmp_path / "published", at=step) as predictor:
            assert predictor.step == step


class CountBases:
    """`_export_new_base` that counts."""

    def __init__(self) -> None:
        self.number, self.original = 0, deltas.DeltaPublisher._export_new_base

    def __get__(self, publisher, kind):
        def with_base(current):
            self.number += 1
            return self.original(publisher, current)

        return with_base


def test_metadata_and_health(client, steps):
    assert client("GET", "/v2").json()["extensions"] == [
        "binary_tensor_data",
        "model_configuration",
    ]
    model = client("GET", "/v2/models/model").json()
    assert model["versions"] == [str(step) for step in steps] and model["platform"] == "colonnade"
    assert model["inputs"][0] == {"name": "dense", "datatype": "FP32", "shape": [-1, 13]}
    version = f"/v2/models/model/versions/{steps[0]}/ready"
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/model/ready", version):
        assert client("GET", path).status_code == 200, path
    assert client("GET", "/v2/health/ready").json() == {
        "ready": True,
        "step": steps[-1],
        "problem": None,
    }
    wrong = ["/v2/models/other", "/nothing"]
    wrong += [f"/v2/models/model/versions/{end}" for end in ("1", "x", "1/ready", "-1", "1" * 40)]
    for path in wrong:
        answer = client("GET", path)
        assert answer.status_code == 404 and "wanted" in answer.json()["error"], path


def test_rollback_follow_pin_and_unpin(client, trained, batch, steps):
    expected = {step: score_step(trained, batch, step)[:, 0].numpy() for step in steps}

    def admin(action: str, step: int | None = None) -> httpx.Response:
        fields = {} if step is None else {"step": step}
        return client("POST", f"/admin/{action}", json=fields, headers=bearer())

    assert admin("rollback").json() == {
        "serve_step": steps[-2],
        "pins": [steps[-2]],
        "step": steps[-2],
    }
    assert np.array_equal(scores_of(infer(client, batch)), expected[steps[-2]])
    assert admin("rollback", steps[0]).json()["pins"] == [steps[-2], steps[0]]
    answer = infer(client, batch)
    assert fields_of(answer)["model_version"] == str(steps[0])
    assert np.array_equal(scores_of(answer), expected[steps[0]])
    assert admin("unpin", steps[0]).status_code == 400
    assert admin("follow").json()["step"] == steps[-1]
    assert np.array_equal(scores_of(infer(client, batch)), expected[steps[-1]])
    assert admin("unpin", steps[0]).status_code == 200
    assert admin("unpin", steps[0]).status_code == 404
    assert admin("pin", 3).status_code == 404 and admin("pin").status_code == 400
    assert admin("rollback", 3).status_code == 404 and admin("rollback", -1).status_code == 400
    assert admin("explode").status_code == 404
    assert client("POST", "/admin/follow").status_code == 401
    assert client("POST", "/admin/follow", headers=bearer("x" * 20)).status_code == 401


def test_a_step_that_is_unpinned_meanwhile_is_not_served(trained, tmp_path, steps):
    with opened(trained / "published", tmp_path / "state", poll_seconds=60) as client:
        model = client.service.model
        open_version = model.open_version
        model.open_version = lambda step: (open_version(step), model.unpin(step))
        with pytest.raises(CheckpointError, match="unpinned meanwhile"):
            model.roll_back(steps[0])
        assert model.step == steps[-1] and model.control.read().serve_step is None


def test_pins_and_unpins_at_once_are_all_answered(trained, tmp_path, batch, steps):
    """A worker may open the files of a step while they are removed."""
    with opened(trained / "published", tmp_path / "state", max_versions=0) as client:
        expected = score_step(trained, batch, steps[0])[:, 0].numpy()
        failures: list[BaseException] = []
        stop = time.monotonic() + 2

        def repeat(action) -> None:
            while time.monotonic() < stop:
                try:
                    action(steps[0])
                except CheckpointError:  # it is not pinned now
                    pass
                except BaseException as error:
                    failures.append(error)

        model = client.service.model
        threads = [threading.Thread(target=repeat, args=(a,)) for a in (model.pin, model.unpin) * 2]
        for thread in threads:
            thread.start()
        while time.monotonic() < stop:
            answer = infer(client, batch, f"/v2/models/model/versions/{steps[0]}/infer")
            assert np.array_equal(scores_of(answer), expected)
        for thread in threads:
            thread.join()
        assert not failures, failures[:3]


def test_scrapes_at_once_share_their_work():
    starts: list[float] = []

    def compute() -> float:
        starts.append(time.monotonic())
        time.sleep(0.05)
        return starts[-1]

    shared, results = SharedResult(compute), []

    def scrape() -> None:
        since = time.monotonic()
        results.append((since, shared.get(since)))

    threads = [threading.Thread(target=scrape) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 64 and all(since <= start for since, start in results)
    assert len(starts) <= 8  # two, where all threads start within 50 ms


def test_pins_are_limited(trained, tmp_path, steps):
    with opened(trained / "published", tmp_path / "state", max_pins=1) as client:
        assert (
            client("POST", "/admin/pin", json={"step": steps[0]}, headers=bearer()).status_code
            == 200
        )
        answer = client("POST", "/admin/pin", json={"step": steps[1]}, headers=bearer())
        assert answer.status_code == 400 and "--max-pins" in answer.json()["error"]


def test_a_pinned_step_survives_the_end_of_the_publication(trained, tmp_path, batch, steps):
    """Files are unlinked while they are mapped, and a later server has it still."""
    shutil.copytree(trained / "published", tmp_path / "published")
    expected = {step: score_step(trained, batch, step)[:, 0].numpy() for step in steps}
    with opened(tmp_path / "published", tmp_path / "state") as client:
        client.service.model.roll_back(steps[1])
        infer(client, batch, f"/v2/models/model/versions/{steps[2]}/infer")
        shutil.rmtree(tmp_path / "published")
        for step, path in ((steps[1], INFER), (steps[2], f"/v2/models/model/versions/{steps[2]}/infer"),
                           (steps[3], f"/v2/models/model/versions/{steps[3]}/infer")):  # fmt: skip
            answer = infer(client, batch, path)
            assert np.array_equal(scores_of(answer), expected[step])
    shutil.copytree(trained / "published", tmp_path / "published")
    for number in range(1, 4):
        (tmp_path / "published" / delta_file_name(number)).unlink()
    with opened(tmp_path / "published", tmp_path / "state") as client:
        wait_for(lambda: client.service.is_ready)  # the newest step cannot be opened
        ready = client("GET", "/v2/health/ready").json()
        assert ready["step"] == steps[1] and "change-000000000001" in ready["problem"]
        assert np.array_equal(scores_of(infer(client, batch)), expected[steps[1]])
        client.service.model.follow()
        assert client("GET", "/v2/health/ready").status_code == 503
        assert infer(client, batch).status_code == 503


def test_another_process_sees_an_order_at_once(trained, tmp_path, batch, steps):
    with opened(trained / "published", tmp_path / "state", poll_seconds=60) as client:
        other = ControlFolder(tmp_path / "state")
        other.pin(trained / "published", steps[0], 4)
        other.serve(steps[0])
        assert fields_of(infer(client, batch))["model_version"] == str(steps[0])
        other.serve(None)
        assert fields_of(infer(client, batch))["model_version"] == str(steps[-1])
        assert other.read() == ServeOrder(None, (steps[0],))


def test_a_server_follows_its_publication(trained, tmp_path, batch, steps):
    """Nothing published yet, then each step."""
    live = tmp_path / "live"
    with opened(live, tmp_path / "state") as client:
        assert client("GET", "/v2/health/live").status_code == 200
        assert client("GET", "/v2/health/ready").status_code == 503
        answer = infer(client, batch)
        assert answer.status_code == 503 and "no checkpoint yet" in answer.json()["error"]
        assert answer.headers["retry-after"] == "1"
        for step in steps:
            publish(trained, live, step)
            began = time.monotonic()
            wait_for(lambda step=step: client.service.model.step == step)
            assert time.monotonic() - began < 2
            answer = infer(client, batch)
            assert np.array_equal(scores_of(answer), score_step(trained, batch, step)[:, 0].numpy())
        assert client("GET", "/v2/health/ready").status_code == 200


def test_damage_is_named_and_never_served(trained, tmp_path, batch, steps):
    live = tmp_path / "live"
    publish(trained, live, steps[1])
    with opened(live, tmp_path / "state") as client:
        expected = scores_of(infer(client, batch))
        part = tmp_path / "part"
        copy_published_step(trained / "published", part, steps[2])
        content = bytearray((part / delta_file_name(2)).read_bytes())
        content[len(content) // 2] ^= 1
        (live / delta_file_name(2)).write_bytes(content)
        (part / CURRENT).rename(live / CURRENT)
        wait_for(lambda: client.service.model.problem)
        ready = client("GET", "/v2/health/ready")
        assert ready.status_code == 200 and "torn or altered" in ready.json()["problem"]
        metrics = client("GET", "/metrics").text
        assert "colonnade_problem 1.0" in metrics and "torn or altered" in metrics
        answer = infer(client, batch)
        assert fields_of(answer)["model_version"] == str(steps[1])
        assert np.array_equal(scores_of(answer), expected)
        content[len(content) // 2] ^= 1
        (live / "mended").write_bytes(content)
        (live / "mended").rename(live / delta_file_name(2))
        wait_for(lambda: client.service.model.problem is None)
        assert client.service.model.step == steps[2]


def test_another_runs_publication_is_named(trained, tmp_path, batch, steps):
    live = tmp_path / "live"
    publish(trained, live, steps[1])
    with opened(live, tmp_path / "state") as client:
        served.train(tmp_path / "other", tmp_path / "others", {"model.dim": 6})
        shutil.rmtree(live)
        shutil.copytree(tmp_path / "others", live)
        wait_for(lambda: "wanted run" in (client.service.model.problem or ""))
        answer = infer(client, batch)
        assert fields_of(answer)["model_version"] == str(steps[1])


def test_an_export_and_a_run_are_served(trained, tmp_path, batch, steps):
    with Predictor.open(trained / "run") as predictor:
        exported = predictor.folder
    for path in (trained / "run", exported):
        with opened(path, tmp_path / "state") as client:
            answer = infer(client, batch)
            assert fields_of(answer)["model_version"] == str(steps[-1])
            assert (
                client("POST", "/admin/pin", json={"step": 4}, headers=bearer()).status_code == 400
            )
            assert infer(client, batch, "/v2/models/model/versions/4/infer").status_code == 404


def test_bad_input_is_the_clients_error(client, batch):
    tensors = to_tensors(batch)
    outside = {**tensors, "C1": np.full_like(tensors["C1"], 50)}
    answer = client("POST", INFER, json=to_json(outside))
    assert answer.status_code == 400 and "got id 50, wanted 0 .. 49" in answer.json()["error"]
    answer = client(
        "POST", INFER, json=to_json({**tensors, "C1": tensors["C1"].astype(np.float32)})
    )
    assert answer.status_code == 400 and "wanted INT64" in answer.json()["error"]
    for body in (b"", b"{", b"[]", b'{"inputs": 3}', b"\xff\xfe", b"[" * 100_000):
        answer = client("POST", INFER, content=body)
        assert answer.status_code == 400 and answer.json()["error"], body[:10]
    assert client("GET", INFER).status_code == 405
    assert (
        client("POST", INFER, content=b"{}", headers={"content-encoding": "gzip"}).status_code
        == 415
    )
    assert client("POST", INFER, content=b"{}", headers={"host": "evil.example"}).status_code == 403
    assert (
        client("POST", INFER, content=b"{}", headers={"origin": "https://evil.example"}).status_code
        == 403
    )
    assert scores_of(infer(client, batch)).shape == (len(batch.dense),)


def test_large_bodies_and_requests_are_refused(trained, tmp_path, batch):
    with opened(
        trained / "published", tmp_path / "state", max_body_bytes=1000, max_candidates=10
    ) as client:
        assert infer(client, batch).status_code == 413

        async def stream():
            for _ in range(100):
                yield b" " * 100

        answer = client("POST", INFER, content=stream())
        assert answer.status_code == 413 and "more than 1,000 bytes" in answer.json()["error"]
    with opened(trained / "published", tmp_path / "state", max_candidates=10) as client:
        answer = infer(client, batch)
        assert answer.status_code == 413 and "--max-candidates" in answer.json()["error"]


def test_a_full_queue_refuses_and_loses_nothing(trained, tmp_path, batch):
    """Each of many requests is answered: scored, or refused with a time to come back."""
    with opened(trained / "published", tmp_path / "state", max_queue=2) as client:
        body, headers = to_binary(to_tensors(batch))
        release = threading.Event()
        score = client.service.model.score
        client.service.model.score = lambda *arguments: (release.wait(20), score(*arguments))[1]
        threading.Timer(0.5, release.set).start()
        answers = client.all([("POST", INFER, {"content": body, "headers": headers})] * 12)
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200, 200] + [503] * 10
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert (
            refused.headers["retry-after"] == "1" and "wanted at most 2" in refused.json()["error"]
        )


def test_a_slow_model_is_answered_for(trained, tmp_path, batch):
    with opened(trained / "published", tmp_path / "state", timeout_seconds=0.2) as client:
        release = threading.Event()
        score = client.service.model.score
        client.service.model.score = lambda *arguments: (release.wait(20), score(*arguments))[1]
        body, headers = to_binary(to_tensors(batch))
        answers = client.all([("POST", INFER, {"content": body, "headers": headers})] * 3)
        assert [answer.status_code for answer in answers] == [504] * 3
        release.set()
        wait_for(lambda: client.service.queue.num_waiting == 0)
        assert infer(client, batch).status_code == 200


def test_more_requests_than_allowed_are_refused(trained, tmp_path, batch):
    with opened(trained / "published", tmp_path / "state", max_requests=2) as client:
        body, headers = to_binary(to_tensors(batch))
        answers = client.all([("POST", INFER, {"content": body, "headers": headers})] * 8)
        codes = {answer.status_code for answer in answers}
        assert codes == {200, 503}


def test_micro_batches_answer_each_request_by_itself(trained, tmp_path, batch):
    """A bad request among them fails alone; different steps are not mixed."""
    batches = [b for b in served.samples(16)][:4]
    bad = {**to_tensors(batch), "C1": np.full(len(batch.dense), 50)}
    with opened(trained / "published", tmp_path / "state", micro_batch=8) as client:
        release = threading.Event()
        score = client.service.model.score
        sizes = []

        def score_later(merged, step):
            release.wait(20)
            sizes.append(merged.size)
            return score(merged, step)

        client.service.model.score = score_later
        threading.Timer(0.3, release.set).start()
        requests = []
        for one in [*batches, *batches]:
            body, headers = to_binary(to_tensors(one))
            requests.append(("POST", INFER, {"content": body, "headers": headers}))
        requests.append(("POST", INFER, {"json": to_json(bad)}))
        answers = client.all(requests)
        assert answers[-1].status_code == 400 and max(sizes) > 16
        client.service.model.score = score
        for one, answer in zip([*batches, *batches], answers, strict=False):
            np.testing.assert_allclose(scores_of(answer), scores_of(infer(client, one)), rtol=1e-6)


def test_metrics_count_and_the_page_shows(client, batch, steps):
    infer(client, batch)
    client("POST", INFER, content=b"{")
    text = client("GET", "/metrics").text
    assert "colonnade_requests_in_progress 1.0" in text  # the one that reads the metrics
    for line in (
        'colonnade_requests_total{route="infer",status="200"} 1.0',
        'colonnade_requests_total{route="infer",status="400"} 1.0',
        f"colonnade_model_step {float(steps[-1])}",
        "colonnade_ready 1.0",
        "colonnade_problem 0.0",
        f"colonnade_batch_samples_sum {float(len(batch.dense))}",
        f"colonnade_lookups_total {float(4 * len(batch.dense))}",
    ):
        assert line in text, line
    status = client("GET", "/status").json()
    assert status["step"] == steps[-1] and status["requests"] == {"200": 1, "400": 1}
    assert status["seconds"][-1] == ["+Inf", 2] and status["samples"] == len(batch.dense)
    page = client("GET", "/")
    assert page.status_code == 200 and "http://" not in page.text and "https://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_age_does_not_depend_on_the_clock(client, monkeypatch):
    before = client.service.model.age_seconds
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= client.service.model.age_seconds - before < 5


def test_each_request_is_a_line_of_json(trained, tmp_path, batch, steps):
    log = tmp_path / "access.log"
    with opened(trained / "published", tmp_path / "state", access_log=str(log)) as client:
        infer(client, batch)
        client("GET", "/no%0Asuch%1B[31mpath")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["event"] for line in lines} == {"step", "request"}
    requests = [line for line in lines if line["event"] == "request"]
    assert requests[0]["status"] == 200 and requests[0]["step"] == steps[-1]
    assert requests[0]["samples"] == len(batch.dense) and requests[0]["client"] == "127.0.0.1"
    assert requests[1]["status"] == 404 and requests[1]["path"] == "/no\nsuch\x1b[31mpath"


def test_versions_beyond_the_memory_limit_are_refused(trained, tmp_path, batch, steps):
    with opened(trained / "published", tmp_path / "state", max_version_bytes=1) as client:
        answer = infer(client, batch, f"/v2/models/model/versions/{steps[1]}/infer")
        assert answer.status_code == 400 and "--version-memory" in answer.json()["error"]
        assert infer(client, batch).status_code == 200


def test_no_file_stays_open(trained, tmp_path, batch, steps):
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with opened(trained / "published", tmp_path / "state") as client:
        for step in steps:
            infer(client, batch, f"/v2/models/model/versions/{step}/infer")
    before = count()
    for _ in range(3):
        with opened(trained / "published", tmp_path / "state") as client:
            for step in steps:
                infer(client, batch, f"/v2/models/model/versions/{step}/infer")
    assert count() <= before + 2


def test_one_user_and_many_candidates(client, trained, batch, steps):
    """Features that all candidates share are sent once, and scores have the bits of copies."""
    tensors = to_tensors(batch)
    shared = {**tensors, "C1": tensors["C1"][:1], "C3": tensors["C3"][:1]}
    copies = {**tensors, "C1": np.full_like(tensors["C1"], tensors["C1"][0])}
    copies["C3"] = np.full_like(tensors["C3"], tensors["C3"][0])
    one, many = (scores_of(client("POST", INFER, json=to_json(t))) for t in (shared, copies))
    assert np.array_equal(one, many) and len(one) == len(batch.dense)
    same_dense = {**tensors, "dense": tensors["dense"][:1]}
    assert scores_of(client("POST", INFER, json=to_json(same_dense))).shape == (len(batch.dense),)


def to_records(batch) -> list[dict]:
    """Samples of the synthetic data as records."""
    names = served.open_data().test.schema.dense
    records = []
    for i, row in enumerate(batch.dense.tolist()):
        ids = {name: int(ids.values[i]) for name, ids in batch.ids.items()}
        records.append({**dict(zip(names, row, strict=True)), **ids})
    return records


def test_records_are_scored_as_their_tensors(client, trained, batch, steps):
    expected = score_step(trained, batch, steps[-1])[:, 0].tolist()
    records = to_records(batch)
    for body in (records, {"records": records}):
        answer = client("POST", "/score", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["scores"] == expected and answer.json()["step"] == steps[-1]
        assert answer.json()["run"] and answer.json()["model"] == "model"
    (alone,) = client("POST", "/score", json=records[0]).json()["scores"]
    assert alone == client("POST", "/score", json=records[:1]).json()["scores"][0]
    user = {name: records[0][name] for name in ("C1", "C2")}
    candidates = [{k: v for k, v in record.items() if k not in user} for record in records]
    split = client("POST", "/score", json={"user": user, "candidates": candidates})
    joined = client("POST", "/score", json=[{**user, **candidate} for candidate in candidates])
    assert split.json()["scores"] == joined.json()["scores"]
    for body, words in (
        ([{**records[0], "C1": "x"}], "C1"),
        ([{**records[0], "nothing": 1}], "nothing"),
        ({"records": []}, "got 0 records"),
        ({"rows": []}, "wanted 'records'"),
        ({"C1": records[0]["C1"]}, "record 0: got no column"),
        ({"user": 3, "candidates": [{}]}, "wanted an object"),
        ([{}], "record 0: got no column"),
        ({}, "body: got {}, wanted"),
        ({"rows": []}, "got ['rows']"),
        ({"user": {}, "candidates": [{}]}, "candidate 0: got no column"),
        (
            [records[0], {k: v for k, v in records[1].items() if k != "C1"}],
            "record 1: got no column 'C1'",
        ),
    ):
        answer = client("POST", "/score", json=body)
        assert answer.status_code == 400 and words in answer.json()["error"], answer.text
    assert client("POST", "/recommend", json={"user": {}}).status_code == 404


@pytest.mark.parametrize("lost", ["config", "schema", "both", "fields"])
def test_a_model_that_does_not_describe_its_data_is_refused_in_words(client, batch, lost):
    """Raw records need the configuration and the schema; tensors need the schema."""
    predictor = client.service.model.get_any()
    records = to_records(batch)[:2]
    if lost in ("config", "both"):
        predictor.config = None
    if lost in ("schema", "both"):
        predictor.schema = None
    if (
        lost == "fields"
    ):  # an export by hand, of a file reader whose schema is a path of another machine
        options = {"schema": "/nowhere/schema.yaml"}
        predictor.config = SimpleNamespace(data=SimpleNamespace(name="csv", options=options))
    for _ in range(2):
        answer = client("POST", "/score", json=records)
        assert answer.status_code == 400 and answer.json()["error"], answer.text
    answer = infer(client, batch)
    assert answer.status_code == (400 if lost in ("schema", "both") else 200)
    for path in ("/v2/models/model", "/v2/models/model/config"):
        assert client("GET", path).status_code == answer.status_code


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A folder with a run of a retrieval model, and its publication."""
    folder = tmp_path_factory.mktemp("pairs")
    served.train_pairs(folder)
    return folder


def test_a_retrieval_model_opens_its_rows_once(pairs, tmp_path, monkeypatch):
    """Files are opened and indexed once for all predictors of a base, however many checkpoints follow it."""
    steps = list_checkpoints(pairs / "run")
    opened_files: list[Path] = []
    original = mapped.SlotIndex.__init__

    def note_file(index, file):
        opened_files.append(file.path)
        original(index, file)

    monkeypatch.setattr(mapped.SlotIndex, "__init__", note_file)
    live = tmp_path / "live"
    publish(pairs, live, steps[0])
    with opened(live, tmp_path / "state") as client:
        num_tables = len(opened_files)
        assert num_tables == len(set(opened_files)) > 0
        for step in steps[1:4]:
            publish(pairs, live, step)
            wait_for(lambda step=step: client.service.model.step == step)
            answer = client("POST", "/recommend", json={"user": {"user": 3}, "k": 4})
            assert answer.status_code == 200 and answer.json()["step"] == step
            with Recommender.open(pairs / "run", at=step) as recommender:
                best = recommender.recommend([{"user": 3}], 4)
            assert (answer.json()["items"], answer.json()["scores"]) == (
                best.items[0],
                best.scores[0],
            )
        assert len([path for path in opened_files if live in path.parents]) == num_tables
        assert answer.json()["by_popularity"] is False
        answer = client("POST", "/recommend", json={"user": {"user": 10**6}, "k": 4})
        assert answer.json()["by_popularity"] is True and len(answer.json()["items"]) == 4
        with Recommender.open(pairs / "run", at=steps[1]) as recommender:
            best = recommender.recommend([{"user": 3}], 4)
        admin = client("POST", "/admin/rollback", json={"step": steps[1]}, headers=bearer())
        assert admin.status_code == 200
        answer = client("POST", "/recommend", json={"user": {"user": 3}, "k": 4}).json()
        assert (answer["step"], answer["items"]) == (steps[1], best.items[0])


def test_a_retrieval_model_without_a_catalogue_is_refused_at_start(pairs, tmp_path):
    """The data is on another machine: one line says so, instead of a server that answers nothing."""
    data = pairs / "gowalla"
    data.rename(tmp_path / "elsewhere")
    try:
        with (
            pytest.raises(ConfigError, match="--items FILE"),
            opened(pairs / "published", tmp_path / "state"),
        ):
            raise AssertionError
        items = tmp_path / "items.json"
        schema = json.dumps([{"item": item, "log_q": 0.0} for item in range(30)])
        items.write_text(schema)
        settings = {"items_file": str(items)}
        with opened(pairs / "published", tmp_path / "state", **settings) as client:
            answer = client("POST", "/recommend", json={"user": {"user": 3}, "k": 4})
            assert answer.status_code == 200 and len(answer.json()["items"]) == 4, answer.text
    finally:
        (tmp_path / "elsewhere").rename(data)


def test_recommendations_follow_and_roll_back(pairs, tmp_path):
    body = {"user": {"user": 3}, "k": 4, "exclude": [1, 2]}
    with opened(pairs / "published", tmp_path / "state") as client:
        steps = client.service.model.list_steps()
        assert len(steps) > 1
        for step in (steps[-1], steps[0]):
            if step != steps[-1]:
                admin = client("POST", "/admin/rollback", json={"step": step}, headers=bearer())
                assert admin.status_code == 200, admin.text
            answer = client("POST", "/recommend", json=body)
            assert answer.status_code == 200, answer.text
            expected = answer.json()
            with Recommender.open(pairs / "run", at=step) as recommender:
                best = recommender.recommend([{"user": 3}], 4, exclude=[[1, 2]])
            assert (expected["items"], expected["scores"], expected["step"]) == (
                best.items[0],
                best.scores[0],
                step,
            )
            assert expected["run"] and not {1, 2} & set(expected["items"])
        for wrong in ({}, [], {"user": 3}, {"user": {}, "k": 0}, {"user": {"user": 3}, "n": 1}, {"user": {"x": 1}},
                      {"user": {}}, {"user": {"user": 3}, "exclude": 3},
                      {"user": {"user": 3}, "exclude_seen": 1}):  # fmt: skip
            answer = client("POST", "/recommend", json=wrong)
            assert answer.status_code == 400 and "got" in answer.json()["error"], answer.text
        assert client("POST", "/score", json=[{"user": 3}]).status_code == 400
