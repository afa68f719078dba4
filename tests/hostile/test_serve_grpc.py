"""Hostile calls by gRPC, made from seeds: each is refused in words, and the server lives on."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import served
from served import serving, to_tensors
from test_serve_http import count_files, count_threads, resident_bytes

from colonnade.serve.endpoints.grpc import SERVICE, build_message_types

SMALL, LARGE = 280, 4_000
REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip
OF_THE_LIBRARY = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Codes that grpcio answers before this server sees the call."""
NAMES = ("", "other", "é" * 50, "\x00", "a" * 5000, "../model", "model/versions/4", "😀", "MODEL")
Sent = tuple[str, bytes, bool]
"""Method, message, and whether an answer without an error is right, too."""


class Maker:
    """Maker of hostile calls to a model of `small_run`."""

    def __init__(self, seed: int) -> None:
        self.random, self.types = random.Random(seed), build_message_types()
        self.tensors = to_tensors(served.samples(8)[0])
        self.kinds: tuple[Callable[[], Sent], ...] = (
            self.garbage, self.damage, self.wrong_model, self.wrong_shape, self.wrong_type, self.wrong_range,
            self.wrong_contents, self.not_finite, self.leave_vocabulary, self.claim_candidates, self.wrong_inputs,
            self.wrong_output, self.too_large, self.other_method,
        )  # fmt: skip

    def make(self, number: int) -> tuple[str, Sent]:
        kind = self.kinds[number % len(self.kinds)]
        return kind.__name__, kind()

    def fields(self, is_typed: bool = False) -> dict[str, Any]:
        """Return the fields of a right request."""
        inputs, raw = [], []
        for name, tensor in self.tensors.items():
            is_float = tensor.dtype.kind == "f"
            kind = "FP32" if is_float else "INT64"
            entry = {"name": name, "datatype": kind, "shape": list(tensor.shape)}
            if is_typed:
                field = "fp32_contents" if is_float else "int64_contents"
                entry["contents"] = {field: tensor.ravel().tolist()}
            else:
                raw.append(tensor.tobytes())
            inputs.append(entry)
        return {"model_name": "model", "inputs": inputs, "raw_input_contents": raw}

    def infer(self, fields: dict[str, Any], may_be_right: bool = False) -> Sent:
        return "ModelInfer", self.types["ModelInferRequest"](**fields).SerializeToString(), may_be_right  # fmt: skip

    def change(self, name: str, tensor: np.ndarray) -> dict[str, Any]:
        """Return the fields of a request with another tensor."""
        fields = self.fields()
        number = list(self.tensors).index(name)
        fields["inputs"][number]["shape"] = list(tensor.shape)
        fields["raw_input_contents"][number] = tensor.tobytes()
        return fields

    def choose_ids(self) -> str:
        return self.random.choice([name for name in self.tensors if name != "dense"])

    def garbage(self) -> Sent:
        return "ModelInfer", b"\xff" + self.random.randbytes(self.random.randint(1, 300)), False

    def damage(self) -> Sent:
        """Flip, cut or insert bytes."""
        data = bytearray(self.infer(self.fields(self.random.random() < 0.5))[1])
        for _ in range(self.random.randint(1, 5)):
            at = self.random.randrange(len(data))
            match self.random.randrange(3):
                case 0:
                    data[at] ^= 1 << self.random.randrange(8)
                case 1:
                    del data[at : at + self.random.randint(1, 40)]
                case _:
                    data[at:at] = self.random.randbytes(self.random.randint(1, 20))
        return "ModelInfer", bytes(data), True

    def wrong_model(self) -> Sent:
        fields = self.fields()
        if self.random.random() < 0.5:
            return self.infer({**fields, "model_name": self.random.choice(NAMES)})
        version = self.random.choice(["-1", "x", "9" * 30, "٣", "1.5", "77", "4 ", "\x00"])
        return self.infer({**fields, "model_version": version})

    def wrong_shape(self) -> Sent:
        fields = self.fields(self.random.random() < 0.5)
        entry = self.random.choice(fields["inputs"])
        entry["shape"] = self.random.choice(
            [[], [-1], [-8, -1], [0], [9], [2**62, 4], [2**63 - 1], [1] * 20, [-(2**63)], [8, 0]]
        )
        return self.infer(fields)

    def wrong_type(self) -> Sent:
        fields = self.fields(self.random.random() < 0.5)
        entry = self.random.choice(fields["inputs"])
        entry["datatype"] = self.random.choice(["", "BYTES", "FP16", "INT8", "BOOL", "é", "fp32"])
        return self.infer(fields)

    def wrong_range(self) -> Sent:
        """Typed contents beyond the type that the request names."""
        fields = self.fields(is_typed=True)
        entry = self.random.choice([e for e in fields["inputs"] if e["name"] != "dense"])
        datatype, field, value = self.random.choice(
            [
                ("INT8", "int_contents", 300),
                ("INT16", "int_contents", -40000),
                ("UINT8", "uint_contents", 256),
                ("UINT16", "uint_contents", 2**31),
            ]
        )
        entry["datatype"], entry["contents"] = datatype, {field: [value] * 8}
        return self.infer(fields)

    def wrong_contents(self) -> Sent:
        fields = self.fields(is_typed=True)
        entry = self.random.choice(fields["inputs"])
        entry["contents"] = self.random.choice(
            [{}, {"bytes_contents": [b"x"] * 8}, {"bool_contents": [True] * 8}, {"fp64_contents": [0.5]},
             {"int64_contents": [1] * 9}]
        )  # fmt: skip
        return self.infer(fields)

    def not_finite(self) -> Sent:
        dense = self.tensors["dense"].copy()
        dense[self.random.randrange(8), self.random.randrange(13)] = self.random.choice(
            [np.nan, np.inf, -np.inf]
        )
        return self.infer(self.change("dense", dense))

    def leave_vocabulary(self) -> Sent:
        name = self.choose_ids()
        ids = self.tensors[name].copy()
        ids[self.random.randrange(8)] = self.random.choice([-1, 3000, 2**31, 2**63 - 1, -(2**63)])
        return self.infer(self.change(name, ids))

    def claim_candidates(self) -> Sent:
        if self.random.random() < 0.3:
            return self.infer(self.change(self.choose_ids(), np.zeros(10_001, np.int64)))
        fields = self.fields()
        for entry in fields["inputs"][: self.random.choice([1, None])]:
            entry["shape"][0] = self.random.choice([10**9, 2**40, 2**61])
        return self.infer(fields)

    def wrong_inputs(self) -> Sent:
        fields = self.fields(is_typed=True)
        match self.random.randrange(4):
            case 0:
                fields["inputs"].pop(self.random.randrange(len(fields["inputs"])))
            case 1:
                fields["inputs"].append(dict(fields["inputs"][0]))
            case 2:
                self.random.choice(fields["inputs"])["name"] = self.random.choice(NAMES)
            case _:
                fields["raw_input_contents"] = [self.random.randbytes(n) for n in range(3)]
        return self.infer(fields)

    def wrong_output(self) -> Sent:
        return self.infer({**self.fields(), "outputs": [{"name": self.random.choice(NAMES)}]})

    def too_large(self) -> Sent:
        return self.infer({**self.fields(), "id": "y" * (2 << 20)})

    def other_method(self) -> Sent:
        method = self.random.choice(["ModelMetadata", "ModelConfig", "ModelReady"])
        message = self.types[f"{method}Request"](name=self.random.choice(NAMES), version="x")
        if self.random.random() < 0.4:
            return method, b"\xff" + self.random.randbytes(20), False
        if self.random.random() < 0.3:
            method = self.random.choice(["ModelLoad", "RepositoryIndex", "é", ""])
        return method, message.SerializeToString(), False


def call(channel: grpc.Channel, method: str, content: bytes) -> tuple[grpc.StatusCode, str, bytes]:
    """Return the status, the details of an error and the answer of a call."""
    try:
        return grpc.StatusCode.OK, "", channel.unary_unary(f"/{SERVICE}/{method}")(content, timeout=30)  # fmt: skip
    except grpc.RpcError as error:
        return error.code(), error.details(), b""


@pytest.mark.parametrize("count", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_each_hostile_call_is_refused_in_words(count, tmp_path):
    served.train(tmp_path / "run", tmp_path / "published")
    words = (tmp_path / "published", "--grpc-port", 0, "--max-body", "1MiB")
    maker = Maker(count)
    _, right, _ = maker.infer(maker.fields())
    codes: Counter[str] = Counter()
    with (
        serving(*words) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        code, text, wanted = call(channel, "ModelInfer", right)
        assert code == grpc.StatusCode.OK, text
        for number in range(100):
            call(channel, *maker.make(number)[1][:2])
        before = count_files(server), count_threads(server), resident_bytes(server)
        for number in range(count):
            kind, (method, content, may_be_right) = maker.make(number)
            code, text, _ = call(channel, method, content)
            codes[f"{kind} {code.name}"] += 1
            about = (number, kind, code, text, content[:200])
            if code == grpc.StatusCode.OK:
                assert may_be_right, about
                continue
            assert code in REFUSED, about
            assert code in OF_THE_LIBRARY or "got" in text, about
            assert text.isprintable() and len(text) < 2000, about
        assert call(channel, "ModelInfer", right) == (grpc.StatusCode.OK, "", wanted)
        time.sleep(0.5)
        assert count_files(server) <= before[0] + 3
        assert count_threads(server) <= before[1] + 3
        assert resident_bytes(server) < before[2] + (64 << 20)
    assert "Traceback" not in server.errors, server.errors[-3000:]
    assert {name.split()[0] for name in codes} == {kind.__name__ for kind in maker.kinds}
    print(dict(sorted(codes.items())))
