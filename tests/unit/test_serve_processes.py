"""Real server processes: tritonclient over HTTP and gRPC, drain, several workers, slow clients, TLS, ports."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import served
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from forked_command import ForkedCommand
from served import TOKEN, bearer, serving, to_binary, to_tensors
from tritonclient.utils import InferenceServerException

from colonnade import Predictor
from colonnade.serve.control import ControlFolder, remove_stale_folders
from colonnade.serve.workers import Supervisor, WorkerProcess

INFER = "/v2/models/ads/infer"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    served.train(folder / "run", folder / "published")
    (folder / "token").write_text(f"{TOKEN}\n")
    return folder


@pytest.fixture(scope="module")
def batch():
    return served.samples()[0]


@pytest.fixture(scope="module")
def server(trained):
    """One process with HTTP and gRPC."""
    with serving(
        trained / "published",
        "--name",
        "ads",
        "--grpc-port",
        "0",
        "--token-file",
        trained / "token",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A server of a model of a CSV file with texts, and with a list of them."""
    folder = tmp_path_factory.mktemp("shop")
    lines = ["click,city,tags,item"]
    lines += [f"{i * 7 % 3 // 2},c{i % 9},t{i % 5}|t{i % 7},{i % 30}" for i in range(600)]
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    command = ["train", "--data", "csv", "--path", folder / "clicks.csv", "--run", folder / "run"]
    settings = ["train.epochs=1", "train.batch_size=64", "model.dim=4"]
    arguments = [*map(str, command), *(a for s in settings for a in ("--set", s))]
    process = ForkedCommand(arguments)
    with process.stdout, process.stderr:
        assert process.wait(120) == 0, process.stderr.read()
    with serving(folder / "run", "--grpc-port", "0") as server:
        yield server


def test_tritonclient_sends_texts(shop):
    """The scores are those of the same records."""
    records = [
        {"city": "c3", "tags": "t1|t2", "item": 7},
        {"city": "Łódź", "tags": "t4", "item": 8},
    ]
    with shop.client() as client:
        expected = client.post("/score", json=records).json()["scores"]
        inputs = client.get("/v2/models/model").json()["inputs"]
    assert {(t["name"], t["datatype"]) for t in inputs} >= {("city", "BYTES"), ("tags", "BYTES")}
    values = {
        "city": (np.array(["c3", "Łódź"], object), "BYTES"),
        "tags": (np.array(["t1", "t2", "t4"], object), "BYTES"),
        "tags.lengths": (np.array([2, 1], np.int32), "INT32"),
        "item": (np.array([7, 8], np.uint64), "UINT64"),
    }
    http = triton_http.InferenceServerClient(f"127.0.0.1:{shop.port}")
    rpc = triton_grpc.InferenceServerClient(f"127.0.0.1:{shop.grpc_port}")
    for client, module, forms in (
        (http, triton_http, ({"binary_data": True}, {"binary_data": False})),
        (rpc, triton_grpc, ({},)),
    ):
        for form in forms:
            tensors = [module.InferInput(n, list(v.shape), kind) for n, (v, kind) in values.items()]
            for tensor, (value, _) in zip(tensors, values.values(), strict=True):
                tensor.set_data_from_numpy(value, **form)
            assert client.infer("model", tensors).as_numpy("score").tolist() == expected
        client.close()


@pytest.fixture(scope="module")
def expected(trained, batch) -> np.ndarray:
    with Predictor.open(trained / "published") as predictor:
        return predictor(batch)[:, 0].numpy()


def inputs_of(module, batch, **form):
    inputs = []
    for name, tensor in to_tensors(batch).items():
        kind = {"f": "FP32", "i": "INT64"}[tensor.dtype.kind]
        inputs.append(module.InferInput(name, list(tensor.shape), kind))
        inputs[-1].set_data_from_numpy(tensor, **form)
    return inputs


def test_tritonclient_over_http(server, batch, expected):
    client = triton_http.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ads")
    assert client.get_server_metadata()["name"] == "colonnade"
    metadata = client.get_model_metadata("ads")
    assert metadata["outputs"][0]["name"] == "score"
    config = client.get_model_config("ads")
    assert config["max_batch_size"] == 0 and config["name"] == "ads"
    types = [(t["name"], t["data_type"].removeprefix("TYPE_"), t["dims"]) for t in config["input"]]
    assert types == [(t["name"], t["datatype"], t["shape"]) for t in metadata["inputs"]]
    assert client.get_model_config("ads", metadata["versions"][0]) == config
    for binary in (True, False):
        wanted = [triton_http.InferRequestedOutput("score", binary_data=binary)]
        result = client.infer(
            "ads", inputs_of(triton_http, batch, binary_data=binary), outputs=wanted
        )
        assert np.array_equal(result.as_numpy("score"), expected)
        assert result.get_response()["model_version"] == metadata["versions"][-1]
    oldest = metadata["versions"][0]
    result = client.infer(
        "ads", inputs_of(triton_http, batch), model_version=oldest, request_id="r1"
    )
    assert result.get_response()["model_version"] == oldest and result.get_response()["id"] == "r1"
    with pytest.raises(InferenceServerException, match="wanted"):
        client.infer("ads", inputs_of(triton_http, batch)[:2])
    assert not client.is_model_ready("other")
    with pytest.raises(InferenceServerException, match="model: got 'other'"):
        client.get_model_config("other")
    # Extensions that this server does not have are refused in words.
    for call in (
        lambda: client.get_inference_statistics("ads"),
        lambda: client.get_system_shared_memory_status(),
        lambda: client.get_model_repository_index(),
        lambda: client.get_log_settings(),
        lambda: client.get_trace_settings("ads"),
    ):
        with pytest.raises(InferenceServerException, match=r"got .* wanted"):
            call()
    client.close()


def test_tritonclient_over_grpc(server, batch, expected):
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ads")
    metadata = client.get_model_metadata("ads")
    assert metadata.inputs[0].name == "dense" and metadata.outputs[0].datatype == "FP64"
    config = client.get_model_config("ads", as_json=True)["config"]
    assert config["name"] == "ads" and config["output"][0]["data_type"] == "TYPE_FP64"
    assert config["input"][0] == {"name": "dense", "data_type": "TYPE_FP32", "dims": ["-1", "13"]}
    result = client.infer("ads", inputs_of(triton_grpc, batch))
    assert np.array_equal(result.as_numpy("score"), expected)
    assert result.get_response().model_version == metadata.versions[-1]
    assert result.get_response().parameters["run"].string_param
    oldest = metadata.versions[0]
    assert (
        client.infer("ads", inputs_of(triton_grpc, batch), model_version=oldest)
        .get_response()
        .model_version
        == oldest
    )
    for wrong in ({"model_version": "99"}, {"inputs": inputs_of(triton_grpc, batch)[:2]}):
        with pytest.raises(InferenceServerException, match="wanted"):
            client.infer("ads", **{"inputs": inputs_of(triton_grpc, batch), **wrong})
    client.close()


def test_grpc_takes_typed_contents(server, batch, expected):
    """Contents in the form of clients other than Triton's."""
    import grpc

    from colonnade.serve.endpoints.grpc import SERVICE, build_message_types

    types = build_message_types()
    inputs = []
    for name, tensor in to_tensors(batch).items():
        field, kind = {"f": ("fp32_contents", "FP32"), "i": ("int64_contents", "INT64")}[
            tensor.dtype.kind
        ]
        contents = {field: tensor.ravel().tolist()}
        inputs.append(
            {"name": name, "datatype": kind, "shape": list(tensor.shape), "contents": contents}
        )
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=types["ModelInferRequest"].SerializeToString,
            response_deserializer=types["ModelInferResponse"].FromString,
        )
        answer = call(types["ModelInferRequest"](model_name="ads", inputs=inputs))
        assert np.array_equal(np.frombuffer(answer.raw_output_contents[0]), expected)
        inputs[0]["contents"]["fp32_contents"].pop()
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            call(types["ModelInferRequest"](model_name="ads", inputs=inputs))


def connect(server, text: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", server.port), 30)
    link.sendall(text)
    return link


def read_all(link: socket.socket) -> bytes:
    content = b""
    with link:
        while part := link.recv(65536):
            content += part
    return content


def test_slow_and_broken_clients_are_ended(trained):
    with serving(trained / "published", "--body-timeout", "0.5") as server:
        began = time.monotonic()
        host = f"Host: localhost:{server.port}\r\n".encode()
        silent = connect(server, b"")
        header = connect(server, b"GET /v2 HT")
        body = connect(server, b"POST /score HTTP/1.1\r\n" + host + b"Content-Length: 100\r\n\r\n[")
        large = connect(server, b"GET /v2 HTTP/1.1\r\n" + host + b"X: " + b"y" * 100_000)
        noise = connect(server, b"\x16\x03\x01 what is this\r\n\r\n")
        assert read_all(silent) == b""
        assert b"408" in (answer := read_all(header)) and b"no complete header" in answer
        assert b"408" in (answer := read_all(body)) and b"got 1 bytes of the body" in answer
        assert b"431" in (answer := read_all(large)) and b"65,536 bytes; send less" in answer
        assert b" 400 " in (answer := read_all(noise)) and b"not HTTP/1.1" in answer
        assert time.monotonic() - began < 10
        with server.client() as client:
            assert client.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
@pytest.mark.parametrize(
    "start, field",
    [
        ("1\r\n[\r\n0\r\n", "X-T: " + "y" * 90 + "\r\n"),
        ("1\r\n[\r\n0\r\nX-T: ", "y" * 97),
        ("1;e=", "y" * 97),
    ],
)
def test_endless_trailers_and_chunk_extensions_are_refused(server, host, start, field):
    """Many trailers, one that does not end, an extension of a chunk; the server keeps a limited part of each."""
    link = connect(
        server,
        f"POST /score HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n{start}".encode(),
    )
    sent, piece = 0, field.encode() * 300
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while sent < 100 << 20 and time.monotonic() - began < 5:
            link.sendall(piece)
            sent += len(piece)
    assert sent < 20 << 20, f"the server took {sent:,} bytes"
    with contextlib.suppress(ConnectionError):
        answer = read_all(link)
        wanted = b" 431 " if host == "localhost" else b" 403 "
        assert not answer or wanted in answer


def test_trailers_are_no_headers(server):
    """A Host or a token behind the body would get round what was checked before it."""
    head = f"POST /score HTTP/1.1\r\nHost: localhost:{server.port}\r\nConnection: close\r\n"
    chunks = "Transfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\nHost: evil.example\r\n\r\n"
    answer = read_all(connect(server, (head + chunks).encode()))
    assert b" 400 " in answer and b"got 0 records" in answer


def test_many_pipelined_requests_are_all_answered(server):
    """They are sent at once, and have more bytes than one header may."""
    request = f"GET /v2/health/live HTTP/1.1\r\nHost: localhost:{server.port}\r\nX: {'y' * 100}\r\n"
    count = 1000
    content = (request + "\r\n") * (count - 1) + request + "Connection: close\r\n\r\n"
    link = connect(server, b"")
    sender = threading.Thread(target=link.sendall, args=(content.encode(),), daemon=True)
    sender.start()
    assert read_all(link).count(b"HTTP/1.1 200 OK") == count
    sender.join(5)


def test_clients_that_do_not_read_are_ended(trained):
    """Each sends requests with large answers and reads nothing, or a byte now and then; none keeps its place."""
    limits = ("--body-timeout", "0.5", "--max-candidates", "30000")
    with serving(trained / "published", *limits) as server:
        tensors = to_tensors(served.samples(8)[0])
        request = {name: tensor[:1] for name, tensor in tensors.items()}
        request["C1"] = np.zeros(30_000, np.int64)
        body, headers = to_binary(request)
        fields = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
        fields["parameters"] = {"binary_data_output": False}  # answers of text: 0.6 MB each
        head = json.dumps(fields).encode()
        rest = body[int(headers["Inference-Header-Content-Length"]) :]
        content = (
            f"POST /v2/models/model/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(head) + len(rest)}\r\n"
            f"Inference-Header-Content-Length: {len(head)}\r\n\r\n"
        ).encode() + head + rest  # fmt: skip
        links = []
        for _ in range(3):
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", server.port))
            link.settimeout(0.2)
            try:
                for _ in range(20):
                    link.sendall(content)
            except TimeoutError:
                pass  # the server reads no more from it
            links.append(link)
        deadline = time.monotonic() + 20
        while count_connections(server) and time.monotonic() < deadline:
            assert len(links[0].recv(1)) == 1
            time.sleep(0.05)
        assert count_connections(server) == 0
        with server.client() as client:
            assert client.get("/v2/health/ready").status_code == 200
        for link in links:
            link.close()


def count_connections(server) -> int:
    """Return the number of the server's established connections."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    ends = [line.split()[1:4] for line in lines]
    return sum(own.endswith(f":{server.port:04X}") and state == "01" for own, _, state in ends)


def test_a_refused_body_is_answered_before_it_ends(server):
    """The client sends on, and can still read why."""
    host = f"Host: localhost:{server.port}\r\n".encode()
    link = connect(
        server, b"POST /score HTTP/1.1\r\n" + host + b"Content-Length: 1000000000\r\n\r\n"
    )
    link.sendall(b"x" * 300_000)
    answer = read_all(link)
    assert b" 413 " in answer and b"--max-body" in answer


def test_requests_in_progress_are_answered_on_sigterm(trained, batch):
    server = served.Server(trained / "published", "--name", "ads")
    body, headers = to_binary(to_tensors(batch))
    codes: list[object] = []

    def send() -> None:
        with server.client() as client:
            while True:
                try:
                    codes.append(client.post(INFER, content=body, headers=headers).status_code)
                except httpx.HTTPError as error:
                    codes.append(error)
                    return

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    while codes.count(200) < 40:
        time.sleep(0.01)
    # A body that is half sent when the server is expected to stop, and completed afterwards.
    host = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    link = connect(server, f"{host}{lines}\r\n".encode() + body[:100])
    time.sleep(0.2)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    link.sendall(body[100:])
    assert read_all(link).startswith(b"HTTP/1.1 200")
    assert server.stop() == 0, server.errors
    for thread in threads:
        thread.join(30)
    answered = [code for code in codes if not isinstance(code, Exception)]
    assert set(answered) <= {200, 503}
    # Idle connections are closed; none that had sent a request was left without an answer.
    assert all(
        isinstance(c, httpx.ConnectError | httpx.RemoteProtocolError | httpx.ReadError)
        for c in codes
        if c not in answered
    )


def read_metric(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def check_refused(arguments: list[object], words: str) -> None:
    code, errors = run(*arguments)
    assert code == 2 and words in errors, (arguments, errors)
    assert len(errors.strip().splitlines()) == 1, errors


def check_no_holes(folder: Path) -> None:
    """Files that processes map have their space on disk: a hole would end them by SIGBUS when the disk is full."""
    files = list(folder.glob("*.db"))
    assert len(files) >= 10
    for path in files:
        status = path.stat()
        assert status.st_blocks * 512 >= status.st_size, path.name


def test_workers_share_a_port_and_are_started_again(trained, batch, expected, tmp_path):
    with serving(
        trained / "published",
        "--name",
        "ads",
        "--workers",
        "2",
        "--grpc-port",
        "0",
        "--token-file",
        trained / "token",
        "--state",
        tmp_path / "state",
    ) as server:
        first = children_of(server.process.pid)
        assert len(first) == 2
        check_no_holes(tmp_path / "state" / "metrics")
        body, headers = to_binary(to_tensors(batch))

        def ask() -> httpx.Response:
            with server.client() as client:
                return client.post(INFER, content=body, headers=headers)

        for _ in range(10):
            answer = ask()
            length = int(answer.headers["Inference-Header-Content-Length"])
            assert np.array_equal(np.frombuffer(answer.content[length:]), expected)
        rpc = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        assert np.array_equal(
            rpc.infer("ads", inputs_of(triton_grpc, batch)).as_numpy("score"), expected
        )
        rpc.close()
        with server.client() as client:
            assert (
                read_metric(
                    client.get("/metrics").text,
                    'colonnade_requests_total{route="infer",status="200"}',
                )
                == 10
            )
            steps = [int(step) for step in client.get("/v2/models/ads").json()["versions"]]
            assert (
                client.post(
                    "/admin/rollback", json={"step": steps[0]}, headers=bearer()
                ).status_code
                == 200
            )
        for _ in range(10):  # in whichever worker
            assert f'"model_version": "{steps[0]}"'.encode() in ask().content
        os.kill(first[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = children_of(server.process.pid)
            if len(now) == 2 and first[0] not in now:
                break
            time.sleep(0.05)
        for _ in range(10):
            assert f'"model_version": "{steps[0]}"'.encode() in ask().content
        with server.client() as client:
            text = client.get("/metrics").text
            assert read_metric(text, "colonnade_worker_restarts_total") == 1
            answered = read_metric(text, 'colonnade_requests_total{route="infer",status="200"}')
            assert answered in (29, 30)  # the killed one may not have counted its last answer
            assert client.post("/admin/shutdown", headers=bearer()).status_code == 200
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_workers_end_with_their_supervisor(trained):
    server = served.Server(trained / "published", "--workers", "2")
    workers = children_of(server.process.pid)
    server.stop(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_that_are_starting_end_with_their_supervisor_in_silence(trained, number):
    """Kill it, or send what Ctrl-C in a terminal sends to every process of its group."""
    words = [str(trained / "published"), "--port", "0", "--workers", "2"]
    process = ForkedCommand(["serve", *words])
    with process.stdout, process.stderr:
        while len(workers := children_of(process.pid)) < 2:
            time.sleep(0.01)
        own = os.getpgid(process.pid)
        group = [pid for pid in (process.pid, *workers) if os.getpgid(pid) == own]
        for pid in group:
            with contextlib.suppress(ProcessLookupError):  # it ended with its supervisor
                os.kill(pid, number)
        code = process.wait(60)
        errors = process.stderr.read()  # until the last process has ended
    assert errors == "" and code == (0 if number == signal.SIGINT else -number)


def test_only_failed_starts_delay_the_next_one(trained, tmp_path):
    """A worker that has served and was killed is started again at once, however often."""
    supervisor = Supervisor(served.options(trained, tmp_path), socket.socket(), 1, print)
    supervisor.restarts = SimpleNamespace(note_death=lambda pid: None)

    def end_worker(is_ready: bool) -> float:
        reader, writer = os.pipe()
        os.close(writer)
        process = subprocess.Popen(["false"])
        supervisor.workers[0] = WorkerProcess(process, reader, is_ready=is_ready)
        supervisor._selector.register(reader, selectors.EVENT_READ, 0)
        assert supervisor._read_status(0) == 0
        return supervisor._restart_at[0] - time.monotonic()

    with supervisor.listener:
        assert all(end_worker(is_ready=True) <= 0 for _ in range(20))
        delays = [end_worker(is_ready=False) for _ in range(12)]
        assert delays[0] <= 0 < delays[1] < delays[2] and 4 < delays[-1] <= 5
        assert end_worker(is_ready=True) <= 0


@pytest.mark.slow
def test_a_worker_that_cannot_start_ends_the_server(trained, tmp_path):
    """End with status 2, not with that of a crash, after which the server would start it again for ever."""
    words = [trained / "published", "--port", "0", "--workers", "2"]
    code, errors = run(*words, "--network", f"{tmp_path}/none.py:build")
    lines = set(errors.splitlines())  # each worker writes it
    assert code == 2 and len(lines) == 1 and "none.py" in lines.pop(), errors


def test_sigterm_before_the_server_serves_leaves_no_folder(colonnade, trained, tmp_path, monkeypatch):  # fmt: skip
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)

    def be_stopped(options, *_) -> None:
        assert os.listdir(tmp_path) == [Path(options.state_folder).name]
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("colonnade.cli.serve.run_server", be_stopped)
    try:
        assert colonnade("serve", trained / "published") == (128 + signal.SIGTERM, "", "")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert os.listdir(tmp_path) == []


def test_temporary_folders_of_killed_servers_are_removed(tmp_path):
    stale, young, locked, link = (tmp_path / f"colonnade-serve-{name}" for name in ("a", "b", "c", "d"))  # fmt: skip
    other, target = tmp_path / "other", tmp_path / "target"
    for folder in (stale, young, locked, other, target):
        (folder / "metrics").mkdir(parents=True)
    link.symlink_to(target)
    then = time.time() - 3600
    with ControlFolder(locked).lock():
        for folder in (stale, locked, other, target):
            os.utime(folder, (then, then))
        remove_stale_folders(tmp_path)
    assert {path for path in tmp_path.iterdir()} == {young, locked, link, other, target}
    assert (target / "metrics").exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run(*arguments: object) -> tuple[int, str]:
    """Return the exit status of `colonnade serve`, and what it wrote to its error stream."""
    process = ForkedCommand(["serve", *map(str, arguments)], COLUMNS="300")
    with process.stdout, process.stderr:
        return process.wait(60), process.stderr.read()


def test_what_cannot_be_served_is_said_in_one_line(trained, server, tmp_path):
    (tmp_path / "short").write_text("abc")
    published, taken = trained / "published", tmp_path / "state"
    with ControlFolder(taken).lock():  # as by another server
        for arguments, words in (
            ([published, "--port", server.port], "--port: got 127.0.0.1"),
            ([published, "--port", server.port, "--workers", "2"], "Address already in use"),
            ([published, "--port", "0", "--grpc-port", server.grpc_port], "--grpc-port: got"),
            (
                [published, "--port", "0", "--grpc-port", server.grpc_port, "--workers", "2"],
                "Address already in use",
            ),
            ([published, "--port", "0", "--state", taken], "which another server uses"),
            ([published, "--port", "0", "--access-log", tmp_path / "no" / "log"], "No such file"),
            ([tmp_path / "nothing"], "has no model"),
            ([published, "--at", "4"], "leave --at out"),
            ([published, "--host", "0.0.0.0"], "--token-file"),
            ([published, "--token-file", tmp_path / "short"], "at least 16"),
            ([published, "--tls-key", tmp_path / "short"], "wanted both or none"),
            (
                [published, "--tls-key", tmp_path / "short", "--tls-cert", tmp_path / "no"],
                f"{tmp_path / 'no'} and {tmp_path / 'short'}: No such file",
            ),
            ([published, "--threads", "1000000"], "--threads: got 1,000,000, wanted at most"),
            (["s3://a/b"], "give --copy FOLDER"),
            ([published, "--max-body", "much"], "--max-body"),
        ):
            check_refused(arguments, words)


def test_tls(trained, tmp_path, batch):
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("there is no openssl")
    with serving(
        trained / "published",
        "--tls-cert",
        tmp_path / "cert.pem",
        "--tls-key",
        tmp_path / "key.pem",
    ) as server:
        assert server.url.startswith("https://")
        with server.client(verify=str(tmp_path / "cert.pem")) as client:
            assert client.get("/v2/health/ready").json()["ready"]


def test_curl_answers_a_person(server):
    ended = subprocess.run(
        ["curl", "-s", f"{server.url}/v2/models/ads"], capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout)["name"] == "ads"
