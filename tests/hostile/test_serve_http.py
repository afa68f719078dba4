"""Hostile requests, made from seeds: each is answered 4xx or 503 in words, and the server lives on."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import served
from served import TOKEN, Server, serving, to_binary, to_json, to_tensors

BODY_SECONDS = 0.4
SMALL, LARGE = 1_000, 10_000
INFER = "/v2/models/model/infer"
WEIRD = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1,
    10**400, 1e308, -0.0, 0.5, "", "0", "NaN", "dense", "C1",
    "\x00", "\ud800", "é" * 50, "a" * 5000, [], [[]], [[[]]], {}, {"a": {}}, [None], [True], ["1"], [1, [2]], [1e999],
    [10**9], [10**9, 10**9], [2**62, 4], [-1], [0], {"binary_data_size": 10**12}, {"binary_data_size": -8}, "FP32",
    "INT64",
    "BYTES", "FP16", {"data": 1}, [{}] * 50, list(range(1000)),
)  # fmt: skip
"""Values for any place of a request."""
Sent = tuple[bytes, bool]
"""Bytes of a request, and whether an answer 200 is right, too: a change at random may leave it valid."""


class Maker:
    """Maker of hostile requests to a model of `small_run`."""

    def __init__(self, seed: int, port: int) -> None:
        self.random, self.port = random.Random(seed), port
        self.tensors = to_tensors(served.samples(8)[0])
        self.kinds: tuple[Callable[[], Sent], ...] = (
            self.change_json, self.change_binary, self.put_weird_value, self.put_weird_input, self.put_shape,
            self.put_dtype, self.put_nan, self.claim_candidates, self.leave_vocabulary, self.lie_in_header,
            self.garbage, self.wrong_name, self.wrong_method, self.wrong_host, self.wrong_length, self.large_header,
            self.records, self.feedback, self.admin, self.slow_body, self.deep_json,
        )  # fmt: skip

    def make(self, number: int) -> tuple[str, Sent]:
        kind = self.kinds[number % len(self.kinds)]
        return kind.__name__, kind()

    def http(
        self, body: bytes, path: str = INFER, method: str = "POST", **headers: object
    ) -> bytes:
        fields = {
            "Host": f"localhost:{self.port}",
            "Connection": "close",
            "Content-Length": len(body),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = "".join(
            f"{name}: {value}\r\n" for name, value in fields.items() if value is not None
        )
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("utf-8", "surrogateescape") + body

    def damage(self, content: bytes) -> bytes:
        """Flip, cut, repeat or insert bytes."""
        data = bytearray(content)
        for _ in range(self.random.randint(1, 6)):
            at = self.random.randrange(len(data)) if data else 0
            match self.random.randrange(4):
                case 0 if data:
                    data[at] ^= 1 << self.random.randrange(8)
                case 1:
                    del data[at : at + self.random.randint(1, 40)]
                case 2:
                    data[at:at] = self.random.randbytes(self.random.randint(1, 20))
                case _:
                    data[at:at] = data[at : at + 30]
        return bytes(data)

    def change_json(self) -> Sent:
        return self.http(self.damage(json.dumps(to_json(self.tensors)).encode())), True

    def change_binary(self) -> Sent:
        body, headers = to_binary(self.tensors)
        return self.http(self.damage(body), **headers), True

    def weird(self) -> object:
        return self.random.choice(WEIRD)

    def send_json(self, fields: object, path: str = INFER) -> bytes:
        return self.http(json.dumps(fields).encode(), path)

    def put_weird_value(self) -> Sent:
        fields = to_json(self.tensors)
        fields[self.random.choice(["inputs", "outputs", "parameters", "id"])] = self.weird()
        return self.send_json(fields), True

    def put_weird_input(self) -> Sent:
        fields = to_json(self.tensors)
        entry = self.random.choice(fields["inputs"])
        place = self.random.choice(["name", "datatype", "shape", "data", "parameters"])
        if self.random.random() < 0.2:
            entry.pop(place, None)
        else:
            entry[place] = self.weird()
        if self.random.random() < 0.2:
            fields["inputs"].append(self.weird())
        return self.send_json(fields), True

    def put_shape(self) -> Sent:
        name = self.random.choice(list(self.tensors))
        shape = self.random.choice(
            [(3,), (8, 2), (0,), (8, 13, 1), (1, 1, 1, 1), (2, 8), (9,), (7, 13), (0, 13)]
        )
        dtype = self.tensors[name].dtype
        return self.send_json(to_json({**self.tensors, name: np.zeros(shape, dtype)})), False

    def put_dtype(self) -> Sent:
        name = self.random.choice(list(self.tensors))
        other = {"f": np.int64, "i": np.float32}[self.tensors[name].dtype.kind]
        return self.send_json(
            to_json({**self.tensors, name: self.tensors[name].astype(other)})
        ), False

    def put_nan(self) -> Sent:
        dense = self.tensors["dense"].copy()
        dense[self.random.randrange(8), self.random.randrange(13)] = self.random.choice(
            [np.nan, np.inf, -np.inf]
        )
        if self.random.random() < 0.5:
            body, headers = to_binary({**self.tensors, "dense": dense})
            return self.http(body, **headers), False
        return self.send_json(to_json({**self.tensors, "dense": dense})), False

    def claim_candidates(self) -> Sent:
        """10^9 candidates by header only, or in all inputs."""
        count = self.random.choice([10**9, 10_001, 2**40, 2**61])
        fields = json.loads(json.dumps(to_json(self.tensors)))
        for entry in fields["inputs"][: self.random.choice([1, None])]:
            entry["shape"][0] = count
            entry.pop("data")
            entry["parameters"] = {"binary_data_size": count * entry["shape"][-1] * 4}
        header = json.dumps(fields).encode()
        return self.http(header + b"\0" * 100, Inference_Header_Content_Length=len(header)), False

    def leave_vocabulary(self) -> Sent:
        name = self.random.choice([name for name in self.tensors if name != "dense"])
        ids = self.tensors[name].copy()
        ids[self.random.randrange(8)] = self.random.choice([-1, 3000, 2**31, 2**63 - 1, -(2**63)])
        return self.send_json(to_json({**self.tensors, name: ids})), False

    def lie_in_header(self) -> Sent:
        body, _ = to_binary(self.tensors)
        length = self.random.choice(
            ["0", "-1", "1e3", "x", "", str(len(body) + 1), "9" * 30, "12;34", "0x10", "5"]
        )
        return self.http(body, Inference_Header_Content_Length=length), False

    def garbage(self) -> Sent:
        return self.random.randbytes(self.random.randint(1, 300)) + b"\r\n\r\n", False

    def wrong_name(self) -> Sent:
        name = self.random.choice(["other", "model%00", "%F0%9F%98%80", "..%2f..%2fetc%2fpasswd", "a" * 3000,
                                   "model/versions/x",
                                   "model/versions/" + "9" * 30, "model/versions/-1", "%ff%fe"])  # fmt: skip
        return self.send_json(to_json(self.tensors), f"/v2/models/{name}/infer"), False

    def wrong_method(self) -> Sent:
        method = self.random.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"])
        return self.http(b"", INFER, method), False

    def wrong_host(self) -> Sent:
        if self.random.random() < 0.5:
            return self.http(
                b"{}",
                Origin=self.random.choice(
                    ["null", "https://evil.example", "http://localhost.evil.example"]
                ),
            ), False
        host = self.random.choice(
            [
                "evil.example",
                "localhost.evil.example",
                "",
                "127.0.0.1.evil.example",
                "[::2]",
                "8.8.8.8",
                None,
            ]
        )
        return self.http(b"{}", Host=host), False

    def wrong_length(self) -> Sent:
        """Lengths that are no numbers, negative, too large, or said twice in two ways."""
        request = self.http(b"{}")
        length = self.random.choice([b"-1", b"1e3", b"abc", b"99999999999", b"2\r\nContent-Length: 3", b"+2",
                                     b"2\r\nTransfer-Encoding: chunked"])  # fmt: skip
        return request.replace(b"Content-Length: 2", b"Content-Length: " + length), False

    def large_header(self) -> Sent:
        return self.http(b"{}", X="y" * self.random.choice([70_000, 300_000])), False

    def records(self) -> Sent:
        """Bodies of /score and /recommend that are none."""
        body = self.random.choice([{}, [], {"records": []}, {"records": 3}, {"records": [3]}, {"user": {}},
                                   {"user": 1, "candidates": [{}]},
                                   {"records": [{}], "user": {}}, [{"no such column": 1}], self.weird(),
                                   [{}] * 10_001])  # fmt: skip
        return self.send_json(body, self.random.choice(["/score", "/score", "/recommend"])), False

    def feedback(self) -> Sent:
        """Pairs that are none: other fields, lengths and values."""
        wrong = self.random.choice(
            [[], [0.5, 1], 0.5, None, [None], [True, "1"], {"a": 1}, [[1]], [10**400], ["é"]]
        )
        fields = {"scores": [0.25], "labels": wrong if self.random.random() < 0.9 else [1, 0, 1]}
        if self.random.random() < 0.5:
            fields = {"scores": wrong, "labels": [1, 0, 0]}
        if self.random.random() < 0.2:
            fields[self.random.choice(["step", "", "\ud800"])] = self.weird()
        return self.send_json(fields, "/feedback"), False

    def admin(self) -> Sent:
        action = self.random.choice(["rollback", "pin", "unpin", "follow", "shutdown", "x", ""])
        token = self.random.choice(
            [None, "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}0", "Bearer " + "é" * 9]
        )
        if self.random.random() < 0.3:
            body = json.dumps(
                {"step": self.random.choice(["4", -1, 1.5, 10**30, True, [4], 77])}
            ).encode()
            return self.http(body, "/admin/pin", Authorization=f"Bearer {TOKEN}"), False
        return self.http(b'{"step": 4}', f"/admin/{action}", Authorization=token), False

    def slow_body(self) -> Sent:
        """The end of the body never comes. Few: each takes as long as the limit."""
        if self.random.random() < 0.9:
            return self.wrong_name()
        return self.http(b'{"inputs": [', Content_Length=1000), False

    def deep_json(self) -> Sent:
        opener, depth = (
            self.random.choice([b"[", b'{"a":']),
            self.random.choice([100, 5000, 100_000]),
        )
        return self.http(opener * depth), False


def send(port: int, content: bytes) -> tuple[int, bytes]:
    """Send bytes and return the status and the body of the answer; 0: the server closed without one."""
    with socket.create_connection(("127.0.0.1", port), 30) as link:
        try:
            link.sendall(content)
        except OSError:
            pass  # answered before the end
        answer = b""
        try:
            while part := link.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0, body


def count_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def count_threads(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/task"))


def resident_bytes(server: Server) -> int:
    fields = Path(f"/proc/{server.process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def check_alive(server: Server, wanted: bytes) -> None:
    """The same request has the same answer as before."""
    body, headers = to_binary(to_tensors(served.samples(8)[0]))
    with server.client() as client:
        assert client.get("/v2/health/ready").status_code == 200
        answer = client.post(INFER, content=body, headers=headers)
        assert answer.status_code == 200 and answer.content == wanted


@pytest.fixture(scope="module")
def publication(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    served.train(folder / "run", folder / "published")
    (folder / "token").write_text(TOKEN)
    return folder / "published"


@pytest.mark.parametrize("count", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_each_hostile_request_is_answered_in_words(publication, count):
    token = publication.parent / "token"
    with serving(
        publication, "--token-file", token, "--body-timeout", BODY_SECONDS, "--max-body", "1MiB"
    ) as server:
        body, headers = to_binary(to_tensors(served.samples(8)[0]))
        with server.client() as client:
            wanted = client.post(INFER, content=body, headers=headers).content
        codes: Counter[str] = Counter()
        maker = Maker(count, server.port)
        for number in range(100):
            send(server.port, maker.make(number)[1][0])
        files, memory, threads = count_files(server), resident_bytes(server), count_threads(server)
        for number in range(count):
            kind, (content, may_be_right) = maker.make(number)
            code, answer = send(server.port, content)
            codes[f"{kind} {code}"] += 1
            about = (number, kind, code, content[:200], answer[:300])
            if code == 200:
                assert may_be_right, about
                continue
            assert 400 <= code < 500 or code in (501, 503), about
            if not content.startswith((b"HEAD", b"POST /v2 HEAD")):
                error = json.loads(answer)["error"]
                assert "got" in error and error.isprintable() and len(error) < 2000, about
        assert server.process.poll() is None and "Traceback" not in server.errors, server.errors[
            -3000:
        ]
        check_alive(server, wanted)
        deadline = time.monotonic() + 10
        while count_files(server) > files + 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert count_files(server) <= files + 3
        assert count_threads(server) <= threads + 3
        assert resident_bytes(server) < memory + (64 << 20)
        kinds = {name.split()[0] for name in codes}
        assert kinds == {kind.__name__ for kind in maker.kinds}
        print(dict(sorted(codes.items())))


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_each_hostile_recommendation_is_answered_in_words(count, tmp_path):
    """Send bodies to /recommend of a retrieval model, for which an unknown user or item is no error."""
    served.train_pairs(tmp_path)
    rng = random.Random(count)
    right: dict[str, object] = {"user": {"user": 3}, "k": 4, "exclude": [1, 2]}
    codes: Counter[int] = Counter()
    with serving(tmp_path / "published", "--max-body", "1MiB") as server, server.client() as client:
        wanted = client.post("/recommend", json=right).json()
        assert len(wanted["items"]) == 4
        for number in range(count):
            fields = dict(right)
            for _ in range(rng.randint(1, 2)):
                name = rng.choice(["user", "k", "exclude", "exclude_seen", "", "records"])
                fields[name] = rng.choice(WEIRD)
                if name == "user" and rng.random() < 0.7:
                    fields["user"] = {rng.choice(["user", "\ud800", "item"]): rng.choice(WEIRD)}
            answer = client.post("/recommend", content=json.dumps(fields).encode())
            codes[answer.status_code] += 1
            about = (number, str(fields)[:300], answer.text[:300])
            if answer.status_code == 200:
                assert len(answer.json()["items"]) <= fields["k"], about
            else:
                assert 400 <= answer.status_code < 500, about
                error = answer.json()["error"]
                assert "got" in error and error.isprintable() and len(error) < 2000, about
        assert client.post("/recommend", json=right).json() == wanted
    assert "Traceback" not in server.errors, server.errors[-3000:]
    assert codes[400] > count // 4, codes
    print(dict(codes))


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_flood_is_answered_and_forgotten(publication, count):
    """Connections from many threads, some of which send nothing: each that sends is answered, some with 503."""
    with serving(publication, "--max-queue", "4", "--body-timeout", "1") as server:
        body, headers = to_binary(to_tensors(served.samples(8)[0]))
        with server.client() as client:
            wanted = client.post(INFER, content=body, headers=headers).content
        request = Maker(0, server.port).http(body, **headers)
        files = count_files(server)
        silent = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(50)]
        codes: Counter[int] = Counter()

        def flood() -> None:
            for _ in range(count // 20):
                code, answer = send(server.port, request)
                codes[code] += 1
                if code == 503:
                    assert "again" in json.loads(answer)["error"]

        threads = [threading.Thread(target=flood) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(codes) <= {200, 503} and sum(codes.values()) == count // 20 * 20, codes
        for link in silent:
            assert link.recv(100) == b""
            link.close()
        check_alive(server, wanted)
        deadline = time.monotonic() + 10
        while count_files(server) > files + 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert count_files(server) <= files + 3
