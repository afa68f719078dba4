"""gRPC: the Open Inference Protocol's service, with the same queue and answers as HTTP.

The message types are built from the table below instead of generated code, in a pool of their own, so that a client's
generated types for the same messages can be in the same process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from colonnade import __version__
from colonnade.errors import ConfigError
from colonnade.serve.protocol import (
    InferRequest,
    RequestError,
    Tensors,
    WantedOutput,
    build_texts,
    check_shape,
    get_datatype,
    get_dtype,
    parse_data,
    quote_value,
    read_tensor,
    split_texts,
)
from colonnade.serve.scheduler import ScoreJob
from colonnade.serve.service import RequestRecord, Service, describe_error
from colonnade.serve.tensors import build_batch, format_scores
from colonnade.serve.versions import Scored

SERVICE = "inference.GRPCInferenceService"
MESSAGES: dict[str, Mapping[str, Any]] = {
    "InferParameter": {
        "fields": "bool_param:bool int64_param:int64 string_param:string double_param:double uint64_param:uint64",
        "oneof": "parameter_choice",
    },
    "InferTensorContents": {
        "fields": "bool_contents:*bool int_contents:*int32 int64_contents:*int64 uint_contents:*uint32 "
        "uint64_contents:*uint64 fp32_contents:*float fp64_contents:*double bytes_contents:*bytes",
    },
    "ServerLiveRequest": {"fields": ""},
    "ServerLiveResponse": {"fields": "live:bool"},
    "ServerReadyRequest": {"fields": ""},
    "ServerReadyResponse": {"fields": "ready:bool"},
    "ModelReadyRequest": {"fields": "name:string version:string"},
    "ModelReadyResponse": {"fields": "ready:bool"},
    "ServerMetadataRequest": {"fields": ""},
    "ServerMetadataResponse": {"fields": "name:string version:string extensions:*string"},
    "ModelMetadataRequest": {"fields": "name:string version:string"},
    "TensorMetadata": {"fields": "name:string datatype:string shape:*int64"},
    "ModelMetadataResponse": {
        "fields": "name:string versions:*string platform:string inputs:*TensorMetadata outputs:*TensorMetadata",
    },
    "ModelConfigRequest": {"fields": "name:string version:string"},
    "ModelInput": {"fields": "name:string data_type:int32 format:int32 dims:*int64"},
    "ModelOutput": {"fields": "name:string data_type:int32 dims:*int64"},
    "ModelVersionPolicy": {"fields": ""},
    "ModelConfig": {
        "fields": "name:string platform:string version_policy:ModelVersionPolicy max_batch_size:int32 "
        "input:*ModelInput output:*ModelOutput",
    },
    "ModelConfigResponse": {"fields": "config:ModelConfig"},
    "InferInputTensor": {
        "fields": "name:string datatype:string shape:*int64 parameters:%InferParameter contents:InferTensorContents",
    },
    "InferRequestedOutputTensor": {"fields": "name:string parameters:%InferParameter"},
    "ModelInferRequest": {
        "fields": "model_name:string model_version:string id:string parameters:%InferParameter "
        "inputs:*InferInputTensor outputs:*InferRequestedOutputTensor raw_input_contents:*bytes",
    },
    "InferOutputTensor": {
        "fields": "name:string datatype:string shape:*int64 parameters:%InferParameter contents:InferTensorContents",
    },
    "ModelInferResponse": {
        "fields": "model_name:string model_version:string id:string parameters:%InferParameter "
        "outputs:*InferOutputTensor raw_output_contents:*bytes",
    },
}
"""Fields of each message as NAME:TYPE, numbered from 1; * before a type: repeated; %: a map from strings to it."""
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}  # fmt: skip
"""Field of InferTensorContents of each datatype."""
TRITON_TYPES = {"TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_FP64": 12, "TYPE_STRING": 13}
"""Numbers of Triton's datatypes."""
THREADS = 16


def build_message_types() -> dict[str, Any]:
    """Return a class for each message."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="colonnade/inference.proto", package="inference", syntax="proto3"
    )
    for name, content in MESSAGES.items():
        message = file.message_type.add(name=name)
        if "oneof" in content:
            message.oneof_decl.add(name=content["oneof"])
        for number, text in enumerate(content["fields"].split(), 1):
            _add_field(message, number, *text.split(":"), is_in_oneof="oneof" in content)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))
        for name in MESSAGES
    }


def _add_field(message: Any, number: int, name: str, kind: str, *, is_in_oneof: bool) -> None:
    """Add a field to the description of a message."""
    field = message.field.add(name=name, number=number, label=1)
    if is_in_oneof:
        field.oneof_index = 0
    if kind[0] == "%":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=9)
        entry.field.add(
            name="value", number=2, label=1, type=11, type_name=f".inference.{kind[1:]}"
        )
        field.label = 3
        field.type = 11
        field.type_name = f".inference.{message.name}.{entry.name}"
        return
    if kind[0] == "*":
        field.label = 3
        kind = kind[1:]
    if kind in MESSAGES:
        field.type = 11
        field.type_name = f".inference.{kind}"
    else:
        field.type = {
            "double": 1,
            "float": 2,
            "int64": 3,
            "uint64": 4,
            "int32": 5,
            "bool": 8,
            "string": 9,
            "bytes": 12,
            "uint32": 13,
        }[kind]


class GrpcServer:
    """gRPC server of a service."""

    def __init__(self, service: Service, host: str, port: int, *, is_shared: bool) -> None:
        """is_shared: other workers listen on the same port. Raises ConfigError if it is taken."""
        import grpc

        self.service = service
        self.types = build_message_types()
        self.codes = grpc.StatusCode
        limit = service.options.max_body_bytes
        options = [
            ("grpc.so_reuseport", int(is_shared)),
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_metadata_size", 16384),
        ]
        self.server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="grpc"),
            options=options,
            maximum_concurrent_rpcs=service.options.max_requests,
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                partial(self._answer, name, handler),
                response_serializer=self.types[f"{name}Response"].SerializeToString,
            )
            for name, handler in self._handlers().items()
        }
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._bind(grpc, address)
        except RuntimeError as error:
            raise ConfigError(
                f"--grpc-port: got {address}, which cannot be used ({error}); give a free port"
            ) from None

    def start(self) -> None:
        """Start to answer."""
        self.server.start()

    def close(self, seconds: float) -> None:
        """Refuse new calls and finish those in progress."""
        self.server.stop(seconds).wait()

    def _bind(self, grpc: Any, address: str) -> int:
        options = self.service.options
        if options.tls_certificate is None or options.tls_key is None:
            return self.server.add_insecure_port(address)
        pair = (Path(options.tls_key).read_bytes(), Path(options.tls_certificate).read_bytes())
        return self.server.add_secure_port(address, grpc.ssl_server_credentials([pair]))

    def _handlers(self) -> dict[str, Callable[[Any, RequestRecord], Any]]:
        return {
            "ServerLive": lambda request, record: {"live": True},
            "ServerReady": lambda request, record: {"ready": self.service.is_ready},
            "ServerMetadata": lambda request, record: {
                "name": "colonnade",
                "version": __version__,
                "extensions": ["model_configuration"],
            },
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelInfer": self._model_infer,
        }

    def _answer(
        self,
        method_name: str,
        handler: Callable[[Any, RequestRecord], Any],
        request_bytes: bytes,
        call_context: Any,
    ) -> Any:
        """Answer a call; errors become the protocol's status codes."""
        started = time.perf_counter()
        record = RequestRecord("grpc")
        status = 200
        policy = self.service.policy
        try:
            if not policy.is_loopback and method_name not in ("ServerLive", "ServerReady"):
                policy.check_token(dict(call_context.invocation_metadata()).get("authorization"))
            fields = handler(self._parse(method_name, request_bytes), record)
        except Exception as error:
            status, text, _ = describe_error(error)
            call_context.abort(getattr(self.codes, CODES.get(status, "INTERNAL")), text)
        finally:
            seconds = time.perf_counter() - started
            self.service.metrics.observe_request("grpc", status, seconds)
            self.service.log.write(
                "request",
                {
                    "method": "GRPC",
                    "path": method_name,
                    "status": status,
                    "route": "grpc",
                    "ms": round(1000 * seconds, 3),
                    "samples": record.samples,
                    "step": record.step,
                    "client": call_context.peer(),
                },
            )
        return self.types[f"{method_name}Response"](**fields)

    def _parse(self, method_name: str, request_bytes: bytes) -> Any:
        """Parse the message of a call. Raises RequestError (400)."""
        from google.protobuf.message import DecodeError

        try:
            return self.types[f"{method_name}Request"].FromString(request_bytes)
        except DecodeError as error:
            raise RequestError(
                400,
                f"message: got {quote_value(str(error))}, wanted an inference.{method_name}Request",
            ) from None

    def _model_ready(self, request: Any, record: RequestRecord) -> dict[str, Any]:
        self._resolve(request.name, request.version)
        return {"ready": self.service.is_ready}

    def _model_metadata(self, request: Any, record: RequestRecord) -> dict[str, Any]:
        fields = self.service.describe_model(self._resolve(request.name, request.version))
        for group in ("inputs", "outputs"):
            fields[group] = [
                {k: spec[k] for k in ("name", "datatype", "shape")} for spec in fields[group]
            ]
        del fields["parameters"]
        return fields

    def _model_config(self, request: Any, record: RequestRecord) -> dict[str, Any]:
        self._resolve(request.name, request.version)
        config = self.service.describe_config()
        for group in ("input", "output"):
            config[group] = [
                {"name": t["name"], "data_type": TRITON_TYPES[t["data_type"]], "dims": t["dims"]}
                for t in config[group]
            ]
        return {"config": config}

    def _model_infer(self, request: Any, record: RequestRecord) -> dict[str, Any]:
        service = self.service
        seconds = self.service.options.timeout_seconds
        step = self._resolve(request.model_name, request.model_version)
        service.model.open_version(step)
        future: Future[dict[str, Any]] = Future()

        def resolve(result: Any, error: BaseException | None) -> None:
            future.set_result(result) if error is None else future.set_exception(error)

        def prepare() -> Any:
            parsed.append(parse_grpc_request(request))
            return service.note_samples(build_batch(service.signature, parsed[0].inputs), record)

        def finish(scored: Scored) -> dict[str, Any]:
            record.step = scored.step
            return format_grpc_response(parsed[0], scored, service.options.name)

        parsed: list[InferRequest] = []
        service.queue.submit(
            ScoreJob(
                resolve=resolve,
                deadline=time.monotonic() + seconds,
                prepare=prepare,
                finish=finish,
                step=step,
            )
        )
        try:
            return future.result(seconds)
        except FutureTimeout:
            raise RequestError(
                504, f"got no result in {seconds:g} s; send fewer candidates, or raise --timeout"
            ) from None

    def _resolve(self, name: str, version: str) -> int | None:
        self.service.check_name(name)
        return self.service.parse_version(version)


CODES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    413: "INVALID_ARGUMENT", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED", 507: "RESOURCE_EXHAUSTED",
}  # fmt: skip
"""Status code of gRPC for each of HTTP."""


def parse_grpc_request(request: Any) -> InferRequest:
    """Parse a ModelInferRequest with raw or typed contents. Raises RequestError (400)."""
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(
            400,
            f"raw_input_contents: got {len(raw)}, wanted one for each of {len(request.inputs)} inputs, or none",
        )
    inputs: Tensors = {}
    for number, entry in enumerate(request.inputs):
        label = f"input {quote_value(entry.name)}"
        dtype = get_dtype(entry.datatype, label)
        shape, count = check_shape(list(entry.shape), label)
        if entry.name in inputs:
            raise RequestError(400, f"{label}: got it twice, wanted it once")
        if raw and dtype.kind == "O":
            texts = split_texts(raw[number], count, label)
            inputs[entry.name] = build_texts(texts, shape, label)
            continue
        if raw:
            if len(raw[number]) != count * dtype.itemsize:
                raise RequestError(
                    400,
                    f"{label}: got {len(raw[number]):,} bytes, wanted {count * dtype.itemsize:,} for its shape",
                )
            inputs[entry.name] = read_tensor(raw[number], dtype, shape)
            continue
        field = CONTENTS.get(entry.datatype)
        values = list(getattr(entry.contents, field)) if field else []
        if len(values) != count:
            raise RequestError(
                400, f"{label}: got {len(values):,} values in contents.{field}, wanted {count:,}"
            )
        if dtype.kind == "O":
            inputs[entry.name] = build_texts(values, shape, label)
        else:
            inputs[entry.name] = parse_data(values, dtype, shape, count, label)
    outputs = tuple(WantedOutput(output.name, True) for output in request.outputs)
    return InferRequest(request.id, inputs, outputs, True)


def format_grpc_response(request: InferRequest, scored: Scored, model: str) -> dict[str, Any]:
    """Return the fields of a ModelInferResponse. Raises RequestError (400) for an output that does not exist."""
    tensors = format_scores(scored.scores)
    names = [output.name for output in request.outputs] or list(tensors)
    unknown = next((name for name in names if name not in tensors), None)
    if unknown is not None:
        raise RequestError(
            400,
            f"output {quote_value(unknown)}: got no such output, wanted {' or '.join(tensors)}",
        )
    outputs = [
        {
            "name": name,
            "datatype": get_datatype(tensors[name].dtype),
            "shape": list(tensors[name].shape),
        }
        for name in names
    ]
    contents = [np.ascontiguousarray(tensors[name]).tobytes() for name in names]
    assert all(
        len(content) == 8 * math.prod(o["shape"])
        for content, o in zip(contents, outputs, strict=True)
    )
    return {
        "model_name": model,
        "model_version": str(scored.step),
        "id": request.id,
        "parameters": {"run": {"string_param": scored.run}},
        "outputs": outputs,
        "raw_output_contents": contents,
    }
