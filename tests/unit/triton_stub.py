"""The part of Triton's Python API (triton_python_backend_utils) that a model.py uses, for tests."""

from __future__ import annotations

import sys
import types

import numpy as np


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(array, np.ndarray) and array.flags.c_contiguous
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        array = self._array.view()
        array.flags.writeable = False  # requests lie in memory that Triton shares
        return array


class InferenceRequest:
    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._inputs = [Tensor(name, np.ascontiguousarray(a)) for name, a in tensors.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = range(4)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class InferenceResponse:
    def __init__(self, output_tensors=None, error=None) -> None:
        assert (output_tensors is None) != (error is None)
        self._outputs, self._error = output_tensors or [], error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError:
        return self._error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs


def install(monkeypatch) -> None:
    """Let `import triton_python_backend_utils` find the stub."""
    module = types.ModuleType("triton_python_backend_utils")
    for kind in (Tensor, InferenceRequest, InferenceResponse, TritonError):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
