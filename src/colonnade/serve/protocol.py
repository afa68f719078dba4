"""Messages of the Open Inference Protocol v2: JSON, and its extension with binary tensors. Pure functions of bytes.

A body with binary tensors is JSON, whose length the header Inference-Header-Content-Length states, and then the bytes
of the tensors in the order of the JSON, little-endian and row-major.

Legend: N candidates of a request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HEADER_LENGTH = "Inference-Header-Content-Length"
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": "?",
        "UINT8": "u1",
        "UINT16": "<u2",
        "UINT32": "<u4",
        "UINT64": "<u8",
        "INT8": "i1",
        "INT16": "<i2",
        "INT32": "<i4",
        "INT64": "<i8",
        "FP16": "<f2",
        "FP32": "<f4",
        "FP64": "<f8",
        "BYTES": "O",
    }.items()
}
"""numpy's type of each datatype; BYTES are arrays of str."""
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
MAX_LAYOUTS = 64
MAX_LAYOUT_BYTES = 1 << 14
"""Limits on the remembered JSON parts: their number, and the length of each."""
Tensors = dict[str, np.ndarray]


class RequestError(Exception):
    """Request that is answered with an error: `status` of HTTP and one line (got / wanted / do this)."""

    def __init__(self, status: int, text: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_seconds = retry_seconds


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """Output that a request names, and whether it wants it binary."""

    name: str
    is_binary: bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Parsed request: input tensors by name, and what the answer is to contain."""

    id: str
    inputs: Tensors
    outputs: tuple[WantedOutput, ...]
    """Empty: all outputs, in the form that `is_binary` says."""
    is_binary: bool


@dataclass(slots=True)
class _Block:
    """Consecutive tensors of one type in a body: those bytes, and each tensor's shape and slice of the elements."""

    dtype: np.dtype[Any]
    begin: int
    count: int = 0
    tensors: list[tuple[str, slice, tuple[int, ...]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _BinaryLayout:
    """Accepted JSON part of a request with binary tensors only."""

    id: str
    blocks: tuple[_Block, ...]
    outputs: tuple[WantedOutput, ...]
    is_binary: bool

    def read(self, body: bytearray | bytes) -> InferRequest:
        """Return the request of a body that begins with this JSON part."""
        inputs: Tensors = {}
        for block in self.blocks:
            content = read_tensor(body, block.dtype, (block.count,), block.begin)
            for name, part, shape in block.tensors:
                tensor = content[part]
                inputs[name] = tensor if len(shape) == 1 else tensor.reshape(shape)
        return InferRequest(self.id, inputs, self.outputs, self.is_binary)


def _build_blocks(input_tensors: Tensors, first_byte: int) -> tuple[_Block, ...]:
    """Group the tensors that follow one another in a body from byte `first_byte` by their types."""
    blocks: list[_Block] = []
    for name, tensor in input_tensors.items():
        if not blocks or blocks[-1].dtype != tensor.dtype:
            blocks.append(_Block(tensor.dtype, first_byte))
        block = blocks[-1]
        end = block.count + tensor.size
        block.tensors.append((name, slice(block.count, end), tensor.shape))
        block.count = end
        first_byte += tensor.nbytes
    return tuple(blocks)


_layouts: dict[tuple[bytes, int], _BinaryLayout] = {}
"""Layouts by the JSON part and the length of the body, which determine them. Clients repeat the same JSON part."""


def parse_request_json(content: bytes | bytearray | memoryview) -> Any:
    """Parse JSON, NaN and infinities refused. Raises RequestError (400)."""
    try:
        return json.loads(bytes(content), parse_constant=_refuse_constant)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError(
            400, "body: got JSON nested too deep, wanted the documented objects"
        ) from None
    except ValueError as error:  # of JSON, UTF-8, and integers of too many digits
        raise RequestError(
            400,
            f"body: got {quote_value(str(error))}, wanted JSON in UTF-8; see docs/howto/serve.md",
        ) from None


def _refuse_constant(name: str) -> float:
    raise RequestError(
        400, f"body: got {name}, which is not JSON; leave the sample out, or send a number"
    )


def parse_infer_request(body: bytearray | bytes, header_length: str | None) -> InferRequest:
    """Parse the body of an inference request.

    header_length: value of the header Inference-Header-Content-Length; None if the body is JSON only. Tensors are views
    of `body` where its alignment permits. Raises RequestError (400).
    """
    length = _parse_header_length(header_length, len(body))
    header = bytes(memoryview(body)[:length])
    layout = _layouts.get((header, len(body)))
    if layout is not None:
        return layout.read(body)
    request = _parse_new_request(body, header)
    tensors = request.inputs.values()
    is_binary = length + sum(tensor.nbytes for tensor in tensors) == len(body)  # none is in JSON
    if is_binary and length <= MAX_LAYOUT_BYTES and all(t.dtype.kind != "O" for t in tensors):
        if len(_layouts) >= MAX_LAYOUTS:
            _layouts.clear()
        blocks = _build_blocks(request.inputs, length)
        _layouts[header, len(body)] = _BinaryLayout(
            request.id, blocks, request.outputs, request.is_binary
        )
    return request


def _parse_new_request(body: bytearray | bytes, header: bytes) -> InferRequest:
    """Parse a request whose JSON part is not known. Raises RequestError (400)."""
    length = len(header)
    fields = parse_request_json(header)
    if not isinstance(fields, dict):
        raise RequestError(400, f"body: got {quote_value(fields)}, wanted an object with 'inputs'")
    parameters = _get_object(fields, "parameters", "the request")
    inputs: Tensors = {}
    end = length
    for entry in _get_objects(fields, "inputs"):
        name, tensor, end = _parse_input(entry, body, end)
        if name in inputs:
            raise RequestError(400, f"input {quote_value(name)}: got it twice, wanted it once")
        inputs[name] = tensor
    if end != len(body):
        raise RequestError(
            400,
            f"body: got {len(body) - length:,} bytes of binary tensors, wanted {end - length:,}, the sum of "
            "binary_data_size of all inputs",
        )
    if not inputs:
        raise RequestError(
            400, "body: got no 'inputs', wanted the inputs that the model's metadata lists"
        )
    is_binary = parameters.get("binary_data_output", False) is True
    outputs = tuple(
        WantedOutput(
            _get_text(entry, "name", "an output"),
            _get_object(entry, "parameters", "an output").get("binary_data", is_binary) is True,
        )
        for entry in _get_objects(fields, "outputs")
    )
    request_id = fields.get("id", "")
    if not isinstance(request_id, str):
        raise RequestError(400, f"id: got {quote_value(request_id)}, wanted a string")
    return InferRequest(request_id, inputs, outputs, is_binary)


def _parse_header_length(text: str | None, num_bytes: int) -> int:
    """Return the length of the JSON part of a body."""
    if text is None:
        return num_bytes
    length = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1
    if not 0 < length <= num_bytes:
        raise RequestError(
            400,
            f"{HEADER_LENGTH}: got {quote_value(text)}, wanted the bytes of JSON at the beginning of the body, "
            f"1 to {num_bytes:,}",
        )
    return length


def _parse_input(
    input_entry: Mapping[str, Any], body: bytearray | bytes, first_byte: int
) -> tuple[str, np.ndarray, int]:
    """Return the name and the tensor of an input, and where the next one's bytes begin."""
    name = _get_text(input_entry, "name", "an input")
    label = f"input {quote_value(name)}"
    dtype = get_dtype(input_entry.get("datatype"), label)
    shape, count = check_shape(input_entry.get("shape"), label)
    parameters = _get_object(input_entry, "parameters", label)
    if "binary_data_size" not in parameters:
        return name, parse_data(input_entry.get("data"), dtype, shape, count, label), first_byte
    size = parameters["binary_data_size"]
    has_texts = dtype.kind == "O"
    is_right = type(size) is int and (size >= 0 if has_texts else size == count * dtype.itemsize)
    if "data" in input_entry or not is_right:
        wanted = "the" if has_texts else f"{count * dtype.itemsize:,}"
        raise RequestError(
            400,
            f"{label}: got binary_data_size {quote_value(size)}"
            f"{' and data' if 'data' in input_entry else ''}, wanted {wanted} bytes for its shape",
        )
    if first_byte + size > len(body):
        raise RequestError(
            400,
            f"{label}: got {max(len(body) - first_byte, 0):,} bytes left in the body, wanted {size:,} "
            "(binary_data_size); send all of it",
        )
    if has_texts:
        texts = split_texts(memoryview(body)[first_byte : first_byte + size], count, label)
        return name, build_texts(texts, shape, label), first_byte + size
    return name, read_tensor(body, dtype, shape, first_byte), first_byte + size


def split_texts(
    binary_content: memoryview | bytes, num_texts: int, input_label: str
) -> list[bytes]:
    """Split binary BYTES: before each element its length, 4 bytes. Raises RequestError."""
    texts: list[bytes] = []
    end = 0
    while end < len(binary_content):
        begin = end + 4
        end = begin + int.from_bytes(binary_content[end:begin], "little")
        texts.append(bytes(binary_content[begin:end]))
    if len(texts) != num_texts or end != len(binary_content):
        raise RequestError(
            400,
            f"{input_label}: got {len(binary_content):,} bytes, wanted {num_texts:,} elements, each after "
            "its length in 4 bytes",
        )
    return texts


def build_texts(texts: Sequence[bytes], shape: tuple[int, ...], label: str) -> np.ndarray:
    """Return the tensor of elements of BYTES. Raises RequestError for one that is not UTF-8."""
    try:
        return np.array([text.decode() for text in texts], object).reshape(shape)
    except UnicodeDecodeError as error:
        raise RequestError(
            400, f"{label}: got {quote_value(error.object)}, wanted text in UTF-8"
        ) from None


def read_tensor(
    binary_content: bytes | bytearray,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    first_byte: int = 0,
) -> np.ndarray:
    """View bytes as a tensor, or copy them where they are not aligned. The bytes must be there."""
    count = math.prod(shape)
    tensor = (
        np.frombuffer(binary_content, dtype, count, first_byte) if count else np.empty(0, dtype)
    )
    if not (tensor.flags.aligned and tensor.flags.writeable):
        tensor = tensor.copy()
    return tensor.reshape(shape)


def get_dtype(name: object, label: str) -> np.dtype[Any]:
    """Return numpy's type of a datatype. Raises RequestError for an unknown one."""
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise RequestError(
            400,
            f"{label}: got datatype {quote_value(name)}, wanted the one in the model's metadata",
        )
    return dtype


def check_shape(shape: object, label: str) -> tuple[tuple[int, ...], int]:
    """Return a tensor's shape and its number of elements. Raises RequestError."""
    is_valid = isinstance(shape, list | tuple) and 0 < len(shape) <= MAX_DIMENSIONS
    if is_valid:
        is_valid = all(type(n) is int and n >= 0 for n in shape)  # type: ignore[attr-defined]
    if is_valid:  # numpy refuses a large length beside one of 0, too
        is_valid = math.prod(n or 1 for n in shape) < MAX_ELEMENTS  # type: ignore[attr-defined]
    if not is_valid:
        raise RequestError(
            400,
            f"{label}: got shape {quote_value(shape)}, wanted a list of 1 to {MAX_DIMENSIONS} lengths of 0 or more, "
            f"fewer than {MAX_ELEMENTS:,} values in all",
        )
    lengths: tuple[int, ...] = tuple(shape)  # type: ignore[arg-type]
    return lengths, math.prod(lengths)


def parse_data(
    json_array: object,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    num_elements: int,
    input_label: str,
) -> np.ndarray:
    """Return the tensor of a JSON array, flat or nested. Raises RequestError."""
    if not isinstance(json_array, list):
        raise RequestError(
            400,
            f"{input_label}: got data {quote_value(json_array)}, wanted an array of {num_elements:,} "
            "numbers, or binary_data_size",
        )
    # A list of integers beyond INT64 would become floats, and texts become as long as the longest one.
    wanted_type = str if dtype.kind == "O" else int if dtype == DTYPES["UINT64"] else None
    try:
        tensor = np.array(json_array, object if wanted_type else None)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            400,
            f"{input_label}: got data of uneven rows ({error}), wanted {num_elements:,} numbers",
        ) from None
    if tensor.size == 0:
        tensor = tensor.astype(dtype)
    wanted_kinds = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "O": ""}[dtype.kind]
    if wanted_type is not None:
        wrong = [value for value in tensor.flat if type(value) is not wanted_type]
    elif tensor.dtype.kind not in wanted_kinds:
        values = np.array(json_array, object).flat
        wrong = [value for value in values if _has_other_kind(value, wanted_kinds)] or [json_array]
    else:
        wrong = []
    if wrong:
        raise RequestError(
            400,
            f"{input_label}: got {quote_value(wrong[0])} in data, wanted values of its datatype in its range",
        )
    if tensor.size != num_elements or tensor.ndim not in (1, len(shape)):
        raise RequestError(
            400,
            f"{input_label}: got data of shape {list(tensor.shape)}, wanted {list(shape)} or [{num_elements}]",
        )
    if dtype.kind in "iu" and tensor.size:
        limits = np.iinfo(dtype)
        if not (int(tensor.min()) >= limits.min and int(tensor.max()) <= limits.max):
            raise RequestError(
                400,
                f"{input_label}: got a value outside {limits.min} .. {limits.max}, wanted its datatype's range",
            )
    return tensor.astype(dtype).reshape(shape)


def _has_other_kind(value: object, kinds: str) -> bool:
    """Return whether a value is not of these kinds of numpy types, or too large for them."""
    kind = np.asarray(value).dtype.kind
    return kind not in kinds


def format_infer_response(
    request: InferRequest, outputs: Tensors, *, model: str, step: int, run: str
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON part (None: all of it is JSON).

    Raises RequestError (400) for an output that the model does not have.
    """
    wanted = request.outputs or tuple(WantedOutput(name, request.is_binary) for name in outputs)
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for output in wanted:
        tensor = outputs.get(output.name)
        if tensor is None:
            raise RequestError(
                400,
                f"output {quote_value(output.name)}: got no such output, wanted {' or '.join(outputs)}",
            )
        entry: dict[str, Any] = {
            "name": output.name,
            "datatype": get_datatype(tensor.dtype),
            "shape": list(tensor.shape),
        }
        if output.is_binary:
            parts.append(np.ascontiguousarray(tensor).tobytes())
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = tensor.ravel().tolist()
        entries.append(entry)
    fields = {
        "model_name": model,
        "model_version": str(step),
        "parameters": {"run": run},
        "outputs": entries,
    }
    if request.id:
        fields["id"] = request.id
    header = json.dumps(fields).encode()
    if not parts:
        return header, None
    return b"".join([header, *parts]), len(header)


def get_datatype(dtype: np.dtype[Any]) -> str:
    """Return the protocol's name of a numpy type."""
    return DATATYPES[dtype]


def quote_value(value: object) -> str:
    """Describe a value of a request on one line of at most 80 characters."""
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value):,} entries"
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _get_text(entry: Mapping[str, Any], field: str, label: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not value:
        raise RequestError(400, f"{field} of {label}: got {quote_value(value)}, wanted a string")
    return value


def _get_object(entry: Mapping[str, Any], field: str, label: str) -> Mapping[str, Any]:
    value = entry.get(field, {})
    if not isinstance(value, dict):
        raise RequestError(400, f"{field} of {label}: got {quote_value(value)}, wanted an object")
    return value


def _get_objects(fields: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    values = fields.get(field, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise RequestError(400, f"{field}: got {quote_value(values)}, wanted an array of objects")
    return values
