"""Messages of the Open Inference Protocol: what is parsed is what was sent, and anything else is refused in words."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade import Batch, Ids, build_encoder
from colonnade.config.run import build_config
from colonnade.data import Column, Schema
from colonnade.data.tabular.hashing import hash_text
from colonnade.errors import ConfigError
from colonnade.serve import protocol
from colonnade.serve.endpoints.grpc import build_message_types, parse_grpc_request
from colonnade.serve.protocol import (
    HEADER_LENGTH,
    MAX_LAYOUTS,
    InferRequest,
    RequestError,
    WantedOutput,
    format_infer_response,
    parse_infer_request,
    parse_request_json,
)
from colonnade.serve.scheduler import ScoreJob, group_batches
from colonnade.serve.security import build_policy, parse_host
from colonnade.serve.tensors import (
    ModelSignature,
    build_batch,
    build_signature,
    build_triton_config,
    concatenate_batches,
    describe_model,
    expand_shared,
    format_scores,
)
from colonnade.serve.versions import choose_evictions
from colonnade.serve.workers import compute_restart_delay

SCHEMA = Schema(("price", "age"), (Column("item", 9), Column("tags", None, "bag")))


def request(**tensors) -> dict:
    kinds = {"f": "FP32", "i": "INT64"}
    return {
        "inputs": [
            {
                "name": name.replace("_", "."), "datatype": kinds[t.dtype.kind], "shape": list(t.shape),
                "data": t.ravel().tolist(),
            }
            for name, t in tensors.items()
        ]
    }  # fmt: skip


def to_binary(fields: dict) -> tuple[bytearray, str]:
    """The same request with binary tensors."""
    parts = []
    for entry in fields["inputs"]:
        kind = {"FP32": np.float32, "INT64": np.int64}[entry["datatype"]]
        parts.append(np.array(entry.pop("data"), kind).tobytes())
        entry["parameters"] = {"binary_data_size": len(parts[-1])}
    header = json.dumps(fields).encode()
    return bytearray(b"".join([header, *parts])), str(len(header))


GOOD = {
    "dense": np.array([[1.0, 2.0], [0.1, -3.0]], np.float32),
    "item": np.array([3, 8]),
    "tags": np.array([5, -7, 2**62]),
    "tags_lengths": np.array([1, 2]),
}


def parse(fields: object) -> InferRequest:
    return parse_infer_request(bytearray(json.dumps(fields).encode()), None)


def test_json_and_binary_are_one_request():
    signature = build_signature(SCHEMA, 100)
    for body, length in (
        (bytearray(json.dumps(request(**GOOD)).encode()), None),
        to_binary(request(**GOOD)),
    ):
        batch = build_batch(signature, parse_infer_request(body, length).inputs)
        assert batch.size == 2 and torch.equal(batch.dense, torch.from_numpy(GOOD["dense"]))
        assert batch.ids["item"].values.tolist() == [3, 8] and batch.ids["item"].offsets is None
        assert batch.ids["tags"].values.tolist() == [5, -7, 2**62]
        assert batch.ids["tags"].offsets.tolist() == [0, 1, 3]


TEXT_CONFIG = build_config({
    "data": {"name": "csv", "options": {"schema": {"fields": {
        "city": {"type": "category", "dtype": "text"}, "tags": {"type": "bag", "dtype": "text"},
        "shop": {"type": "category", "dtype": "integer"},
    }}}},
})  # fmt: skip
TEXT_SCHEMA = Schema((), (Column("city"), Column("tags", None, "bag"), Column("shop")))
TEXT_INPUTS = {"city": ["Oslo", "東京"], "tags": ["a", "", "Łódź"]}


def text_signature() -> ModelSignature:
    return build_signature(TEXT_SCHEMA, 100, build_encoder(TEXT_CONFIG, TEXT_SCHEMA))


def check_texts(batch: Batch) -> None:
    wanted = {
        name: [hash_text(text.encode()) if text else -(2**63) for text in texts]
        for name, texts in TEXT_INPUTS.items()
    }
    assert {name: batch.ids[name].values.tolist() for name in wanted} == wanted
    assert batch.ids["shop"].values.tolist() == [5, -1]
    assert batch.ids["tags"].offsets.tolist() == [0, 1, 3]


@pytest.mark.parametrize("shop", [("INT32", "<i4"), ("INT64", "<i8"), ("UINT64", "<u8")])
@pytest.mark.parametrize("form", ["json", "binary", "grpc raw", "grpc typed"])
def test_texts_are_encoded_and_an_id_is_64_bits_of_any_datatype(form, shop):
    datatype, kind = shop
    ids = np.array([5, -1], np.int64).astype(kind)  # of UINT64: 2^64 - 1
    integers = {"shop": (datatype, ids), "tags.lengths": ("INT32", np.array([1, 2], np.int32))}
    inputs, raw = [], []
    for name, texts in TEXT_INPUTS.items():
        inputs.append({"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts})
        raw.append(
            b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in texts)
        )
    for name, (kind_name, values) in integers.items():
        entry = {"name": name, "datatype": kind_name, "shape": [2], "data": values.tolist()}
        inputs.append(entry)
        raw.append(values.tobytes())
    if form == "json":
        parsed = parse({"inputs": inputs})
    elif form == "binary":
        for entry, content in zip(inputs, raw, strict=True):
            del entry["data"]
            entry["parameters"] = {"binary_data_size": len(content)}
        head = json.dumps({"inputs": inputs}).encode()
        for _ in range(2):  # the JSON part is the same, the lengths of texts may not be
            parsed = parse_infer_request(bytearray(head + b"".join(raw)), str(len(head)))
    else:
        fields = {"BYTES": "bytes_contents", "INT32": "int_contents", "INT64": "int64_contents",
                  "UINT64": "uint64_contents"}  # fmt: skip
        for entry in inputs:
            data = entry.pop("data")
            if form == "grpc typed":
                values = [v.encode() if isinstance(v, str) else v for v in data]
                entry["contents"] = {fields[entry["datatype"]]: values}
        types = build_message_types()
        message = types["ModelInferRequest"](
            inputs=inputs, raw_input_contents=raw if form == "grpc raw" else []
        )
        parsed = parse_grpc_request(message)
    check_texts(build_batch(text_signature(), parsed.inputs))


def test_ids_are_taken_where_texts_are():
    entries = {"city": (2, [7, 8]), "tags": (1, [9]), "tags.lengths": (2, [0, 1]), "shop": (1, [3])}
    fields = {"inputs": [
        {"name": name, "datatype": "INT64", "shape": [n], "data": data} for name, (n, data) in entries.items()
    ]}  # fmt: skip
    batch = build_batch(text_signature(), parse(fields).inputs)
    assert batch.ids["city"].values.tolist() == [7, 8]
    names = [(t.name, t.datatype) for t in text_signature().inputs]
    assert names[:2] == [("city", "BYTES"), ("tags", "BYTES")] and names[-1] == ("shop", "INT64")
    config = build_triton_config(text_signature(), "m")
    assert config["input"][0]["data_type"] == "TYPE_STRING"


@pytest.mark.parametrize(
    ("name", "datatype", "content", "words"),
    [
        ("city", "BYTES", b"\1\0\0\0\xff", "wanted text in UTF-8"),
        ("city", "BYTES", b"\5\0\0\0ab", "got 6 bytes, wanted 1 elements, each after its length"),
        ("city", "BYTES", b"\1\0\0\0ab", "got 6 bytes, wanted 1 elements"),
        ("city", "BYTES", b"\1\0", "got 2 bytes, wanted 1 elements"),
        ("city", "BYTES", b"\xff\xff\xff\xff", "got 4 bytes, wanted 1 elements"),
        ("city", "FP32", b"\0\0\0\0", "got datatype FP32, wanted BYTES, or INT64"),
        ("shop", "BYTES", b"\1\0\0\0a", "got datatype BYTES, wanted INT64"),
        ("shop", "BOOL", b"\1", "got datatype BOOL, wanted INT64"),
    ],
)
def test_damaged_texts_are_refused(name, datatype, content, words):
    """The same words by HTTP and gRPC."""

    def read(inputs):
        others = {"tags": np.array(["a"], object), "tags.lengths": np.array([1])}
        build_batch(
            text_signature(), {"shop": np.array([1]), "city": np.array([1]), **others, **inputs}
        )

    entry = {"name": name, "datatype": datatype, "shape": [1]}
    head = json.dumps(
        {"inputs": [{**entry, "parameters": {"binary_data_size": len(content)}}]}
    ).encode()
    with pytest.raises(RequestError, match=words):
        read(parse_infer_request(bytearray(head + content), str(len(head))).inputs)
    message = build_message_types()["ModelInferRequest"](
        inputs=[entry], raw_input_contents=[content]
    )
    with pytest.raises(RequestError, match=words):
        read(parse_grpc_request(message).inputs)


def test_texts_in_json_are_strings():
    for data in ([1], ["a", "b"], [["a"], "b"], [None], "a", [[["a"], "b"], "c"], [["a"]]):
        entry = {"name": "city", "datatype": "BYTES", "shape": [1], "data": data}
        if data == [["a"]]:
            with pytest.raises(RequestError, match=r"data of shape \[1, 1\]"):
                parse({"inputs": [entry]})
            continue
        with pytest.raises(RequestError, match=r"got .* wanted"):
            parse({"inputs": [entry]})


@pytest.mark.parametrize("shape", [[2**61, 0], [0, 2**61], [2**40, 1], [2**20, 2**20, 0]])
@pytest.mark.parametrize("datatype", ["INT64", "BYTES"])
def test_shapes_beyond_any_memory_are_refused(shape, datatype):
    """numpy refuses them too, although some have no elements."""
    entry = {"name": "item", "datatype": datatype, "shape": shape, "data": []}
    with pytest.raises(RequestError, match="fewer than 1,099,511,627,776 values in all"):
        parse({"inputs": [entry]})


@settings(max_examples=examples(60, 20 * 60))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["<f4", "<i8", "?", "i1", "<f8", "<u2"]),
            st.lists(st.integers(0, 4), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32),
)
def test_any_tensors_survive_the_binary_form(kinds, seed):
    rng = np.random.default_rng(seed)
    outputs = {
        f"t{i}": rng.integers(0, 2, shape).astype(kind) for i, (kind, shape) in enumerate(kinds)
    }
    empty = InferRequest("", {}, (), True)
    body, length = format_infer_response(empty, outputs, model="m", step=1, run="r")
    fields = json.loads(body[:length])
    fields["inputs"] = fields.pop("outputs")
    header = json.dumps(fields).encode()
    again = parse_infer_request(bytearray(header + body[length:]), str(len(header))).inputs
    for name, tensor in outputs.items():
        assert np.array_equal(again[name], tensor) and again[name].dtype == tensor.dtype


@settings(max_examples=examples(200, 20 * 200))
@given(st.binary(max_size=200), st.one_of(st.none(), st.text(max_size=5), st.integers().map(str)))
def test_any_bytes_are_parsed_or_refused(body, length):
    try:
        parse_infer_request(bytearray(body), length)
    except RequestError as error:
        assert (error.status == 400 and "wanted" in str(error)) or "send" in str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=examples(300, 20 * 300))
@given(st.sampled_from(["id", "inputs", "outputs", "parameters"]), VALUES)
def test_any_value_in_a_field_is_parsed_or_refused(field, value):
    for fields in (
        {**request(**GOOD), field: value},
        {"inputs": [{**request(**GOOD)["inputs"][0], field: value}]},
    ):
        text = json.dumps(fields).replace("NaN", "0").replace("Infinity", "0")
        try:
            parsed = parse_infer_request(bytearray(text.encode()), None)
            build_batch(build_signature(SCHEMA, 100), parsed.inputs)
        except RequestError as error:
            assert 400 <= error.status < 500


@settings(max_examples=examples(300, 20 * 300))
@given(
    st.sampled_from(["dense", "item", "tags", "tags_lengths"]),
    st.sampled_from(["name", "datatype", "shape", "data", "parameters"]),
    VALUES,
)
def test_any_value_in_an_input_is_parsed_or_refused(name, field, value):
    fields = request(**GOOD)
    fields["inputs"][list(GOOD).index(name)][field] = value
    text = json.dumps(fields).replace("NaN", "0").replace("Infinity", "0")
    try:
        parsed = parse_infer_request(bytearray(text.encode()), None)
        build_batch(build_signature(SCHEMA, 100), parsed.inputs)
    except RequestError as error:
        assert 400 <= error.status < 500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"item": np.array([1, 2, 3])}, "'item': got 3 candidates, wanted 2 as in 'dense'"),
        ({"dense": np.zeros((2, 3), np.float32)}, "got shape [2, 3], wanted [N, 2]"),
        ({"item": np.array([1.0, 2.0], np.float32)}, "got datatype FP32, wanted INT64"),
        ({"tags_lengths": np.array([-1, 4])}, "a length outside 0 .. 3"),
        ({"tags_lengths": np.array([1, 1])}, "got lengths of 2 ids in all, wanted 3"),
        ({"tags_lengths": np.array([2**62, 2**62])}, "a length outside 0 .. 3"),
        ({"tags_weights": np.ones(2, np.float32)}, "got 2 weights, wanted one per id, 3"),
        ({"other": np.array([1])}, "'other': got an input that the model does not have"),
        ({"item": np.zeros((2, 2), np.int64)}, "got shape [2, 2], wanted [N] or [N, 1]"),
        ({"item": np.zeros(0, np.int64)}, "got 0 candidates"),
        ({"item": np.zeros(101, np.int64)}, "got 101 candidates, wanted 1 to 100"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(change, words):
    tensors = parse(request(**{**GOOD, **change})).inputs
    with pytest.raises(RequestError) as caught:
        build_batch(build_signature(SCHEMA, 100), tensors)
    assert words in str(caught.value)


def test_a_missing_input_is_named():
    tensors = parse(request(dense=GOOD["dense"])).inputs
    with pytest.raises(RequestError, match="'item': got none, wanted INT64"):
        build_batch(build_signature(SCHEMA, 100), tensors)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(RequestError, match="got NaN, which is not JSON"):
        parse_request_json(b'{"a": NaN}')
    bad = {**GOOD, "dense": np.array([[np.inf, 1.0], [1.0, 1.0]], np.float32)}
    body, length = to_binary(request(**bad))
    with pytest.raises(RequestError, match="'dense': got NaN or inf"):
        build_batch(build_signature(SCHEMA, 100), parse_infer_request(body, length).inputs)


@pytest.mark.parametrize("length", ["-1", "0", "99999", "1e2", "", "٣", "7" * 40, "12 "])
def test_a_header_that_lies_about_its_length_is_refused(length):
    body, _ = to_binary(request(**GOOD))
    with pytest.raises(RequestError, match=HEADER_LENGTH):
        parse_infer_request(body, length)


@pytest.mark.parametrize("size", [0, 15, 17, 10**30, -16, True, "16", None, 1.5])
def test_a_size_that_is_not_the_tensors_is_refused(size):
    body, length = to_binary({"inputs": request(dense=GOOD["dense"])["inputs"]})
    fields = json.loads(body[: int(length)])
    fields["inputs"][0]["parameters"]["binary_data_size"] = size
    header = json.dumps(fields).encode()
    with pytest.raises(RequestError, match="binary_data_size"):
        parse_infer_request(bytearray(header + body[int(length) :]), str(len(header)))


def test_too_few_and_too_many_bytes_are_refused():
    body, length = to_binary(request(**GOOD))
    with pytest.raises(RequestError, match="bytes left in the body"):
        parse_infer_request(body[:-1], length)
    with pytest.raises(RequestError, match="got 73 bytes of binary tensors, wanted 72"):
        parse_infer_request(body + b"x", length)


def test_outputs_are_in_the_form_that_was_asked_for():
    scores = format_scores(torch.tensor([[0.1], [0.7]], dtype=torch.float64))
    wanted = InferRequest("7", {}, (WantedOutput("score", False),), True)
    body, length = format_infer_response(wanted, scores, model="m", step=12, run="abc")
    assert length is None and json.loads(body) == {
        "model_name": "m", "model_version": "12", "id": "7", "parameters": {"run": "abc"},
        "outputs": [{"name": "score", "datatype": "FP64", "shape": [2], "data": [0.1, 0.7]}],
    }  # fmt: skip
    unknown = InferRequest("", {}, (WantedOutput("logit", False),), True)
    with pytest.raises(RequestError, match="wanted score"):
        format_infer_response(unknown, scores, model="m", step=12, run="abc")


def test_metadata_lists_what_build_batch_reads():
    two = Schema(("a",), (Column("b", 3),), ("click", "buy"))
    fields = describe_model(build_signature(two, 7), name="m", steps=[4], run="r")
    assert fields["outputs"] == [{"name": "score", "datatype": "FP64", "shape": [-1, 2]}]
    names = [
        spec["name"]
        for spec in describe_model(build_signature(SCHEMA, 7), name="m", steps=[4], run="r")[
            "inputs"
        ]
    ]
    assert names == ["dense", "item", "tags", "tags.lengths", "tags.weights"]
    with pytest.raises(ConfigError, match="two inputs called 'dense'"):
        build_signature(Schema(("a",), (Column("dense", 3),)), 7)


def test_shared_features_are_expanded_and_batches_joined():
    user = Batch(
        3, torch.ones(1, 2),
        {"item": Ids(torch.tensor([1, 2, 3])), "tags": Ids(torch.tensor([7, 8]), torch.tensor([0, 2]))},
    )  # fmt: skip
    full = expand_shared(user)
    assert full.dense.shape == (3, 2) and full.ids["tags"].values.tolist() == [7, 8, 7, 8, 7, 8]
    assert full.ids["tags"].offsets.tolist() == [0, 2, 4, 6]
    joined = concatenate_batches([user, user])
    assert joined.size == 6 and joined.ids["tags"].offsets.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert joined.ids["item"].values.tolist() == [1, 2, 3, 1, 2, 3]


def test_only_jobs_of_one_step_are_scored_together():
    def job(step):
        return ScoreJob(resolve=print, deadline=0, prepare=print, finish=print, step=step)

    batch = Batch(1, torch.ones(1, 1), {"a": Ids(torch.tensor([1]))})
    pairs = [(job(step), batch) for step in (None, 4, None, 4)]
    assert [[j.step for j, _ in group] for group in group_batches(pairs, 8)] == [
        [None, None],
        [4, 4],
    ]
    assert len(group_batches(pairs, 1)) == 4


def test_versions_are_evicted_within_both_limits():
    versions = {1: (10, 100), 2: (20, 100), 3: (5, 100), 4: (30, 100)}
    assert choose_evictions(versions, [3], 3, 1000) == []
    assert choose_evictions(versions, [3], 1, 1000) == [1, 2]
    assert choose_evictions(versions, [], 9, 250) == [3, 1]
    assert choose_evictions(versions, [1, 2, 3, 4], 0, 0) == []


@pytest.mark.parametrize(
    ("host", "name"),
    [("LocalHost:80", "localhost"), ("[::1]:8", "::1"), ("[::1]", "::1"), ("a.b", "a.b"), ("", ""), ("x:y", "x:y"),
     ("[::1]x", "[::1]x"), ("[::1]x:80", "[::1]x:80"), ("[::1", "[::1"), ("[::1]:80:80", "[::1]:80:80"),
     ("localhost]", "localhost]"), ("127.0.0.1:", "127.0.0.1")],
)  # fmt: skip
def test_hosts(host, name):
    assert parse_host(host) == name


def check(policy, path="/score", **headers) -> int:
    try:
        policy.check("POST", path, headers)
    except RequestError as error:
        return error.status
    return 200


def test_who_may_call():
    token = "t" * 20
    local = build_policy("127.0.0.1", token, (), ("https://shop.example",))
    assert check(local, host="localhost:8000") == 200
    assert check(local, host="evil.example") == 403 and check(local) == 400
    assert check(local, host="10.0.0.1") == check(local, host="[::1]x") == 403
    assert check(local, host="localhost:8000", origin="http://localhost:8000") == 200
    assert check(local, host="localhost:8000", origin="https://shop.example") == 200
    assert (
        check(local, host="localhost", origin="null")
        == check(local, host="localhost", origin="https://a.b")
        == 403
    )
    assert check(local, "/admin/pin", host="localhost") == 401
    for wrong in ("Bearer x", f"Basic {token}", f"Bearer {token}x", "", "Bearer é"):
        assert check(local, "/admin/pin", host="localhost", authorization=wrong) == 401
    assert check(local, "/admin/pin", host="localhost", authorization=f"bearer {token}") == 200
    assert check(build_policy("::1", None, (), ()), "/admin/pin", host="[::1]:8") == 403
    with pytest.raises(ConfigError, match="--token-file"):
        build_policy("0.0.0.0", None, (), ())
    outside = build_policy("0.0.0.0", token, ("model.example",), ())
    assert check(outside, host="10.1.2.3:80") == check(outside, host="model.example") == 401
    assert check(outside, "/v2/health/ready", host="10.1.2.3") == 200
    assert check(outside, host="evil.example") == 403
    assert check(outside, host="10.1.2.3", authorization=f"Bearer {token}") == 200


def test_restarts_wait_longer_and_longer():
    assert [compute_restart_delay(n) for n in range(5)] == [0.0, 0.0, 0.25, 0.5, 1.0]
    assert compute_restart_delay(1000) == 5.0


def test_a_known_json_part_is_read_as_a_new_one():
    """The same JSON part before other tensors, and before bodies that are too short and too long."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(3):
        tensors = {
            "dense": generator.standard_normal((4, 2)).astype(np.float32),
            "item": generator.integers(9, size=4),
        }
        fields = {**request(**tensors), "id": "r1", "outputs": [{"name": "score"}]}
        body, length = to_binary(fields)
        parsed = parse_infer_request(body, length)
        assert (parsed.id, parsed.outputs) == ("r1", (WantedOutput("score", False),))
        for name, tensor in tensors.items():
            assert np.array_equal(parsed.inputs[name], tensor)
            assert parsed.inputs[name].dtype == tensor.dtype and parsed.inputs[name].flags.writeable
        rows.append(tuple(parsed.inputs["item"].tolist()))
        for wrong in (body[:-8], body + bytes(8)):
            with pytest.raises(RequestError, match="wanted"):
                parse_infer_request(wrong, length)
    assert len(set(rows)) == 3, "the tensors of the first body were read again"


def test_tensors_in_json_are_not_remembered():
    fields = request(item=np.arange(3))
    content = json.dumps(fields).encode()
    first = parse_infer_request(content, None)
    first.inputs["item"][:] = 7
    assert parse_infer_request(content, None).inputs["item"].tolist() == [0, 1, 2]


def test_few_json_parts_are_remembered():
    for number in range(3 * MAX_LAYOUTS):
        body, length = to_binary({**request(item=np.arange(2)), "id": str(number)})
        assert parse_infer_request(body, length).id == str(number)
        assert len(protocol._layouts) <= MAX_LAYOUTS
