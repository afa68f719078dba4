"""Requests of any transport: what to run for each, and the answer to each error."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from colonnade.errors import (
    CheckpointError,
    ColonnadeError,
    ConfigError,
    DataError,
    NonFiniteError,
    StorageError,
)
from colonnade.models.retriever import Retriever
from colonnade.serve.access_log import AccessLog
from colonnade.serve.feedback import FeedbackWindow, parse_feedback
from colonnade.serve.metrics import Metrics
from colonnade.serve.options import ServeOptions
from colonnade.serve.protocol import (
    InferRequest,
    RequestError,
    format_infer_response,
    parse_infer_request,
    parse_request_json,
    quote_value,
)
from colonnade.serve.records import RecordEncoder, build_encoder
from colonnade.serve.scheduler import ScoringQueue
from colonnade.serve.security import build_policy
from colonnade.serve.tensors import (
    ModelSignature,
    build_batch,
    build_signature,
    build_triton_config,
    describe_model,
    format_labelled_scores,
    format_scores,
)
from colonnade.serve.versions import NO_ITEMS, NotReady, Scored, ServedModel, check_finite_scores

if TYPE_CHECKING:
    from colonnade.batch import Batch

T = TypeVar("T")
RECOMMEND_FIELDS = frozenset(("user", "k", "exclude", "exclude_seen"))
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Errors of a disk without space."""
MODEL_FIELDS = "'records': [{...}, ...], or 'user': {...} with 'candidates': [{...}, ...]"


@dataclass(slots=True)
class RequestRecord:
    """Facts about a request for the metrics and the access log."""

    route: str = "none"
    samples: int = 0
    step: int | None = None


class SharedResult(Generic[T]):
    """Result of a slow function, which callers that wait at the same time share."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._result: tuple[float, T] | None = None

    def get(self, since: float) -> T:
        """Return a result whose computation began at `since` or later, by `time.monotonic`."""
        with self._lock:
            if self._result is None or self._result[0] < since:
                self._result = time.monotonic(), self._compute()
            return self._result[1]


class Service:
    """Served model with its queue, metrics, log and rules. One per process."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.policy = build_policy(
            options.host, options.token, options.allowed_hosts, options.allowed_origins
        )
        self.metrics = Metrics()
        self.log = AccessLog(options.access_log)
        self.model = ServedModel(options, report=self.log.write, on_poll=self.note_poll)
        self.queue = ScoringQueue(
            self.model, self.metrics, max_jobs=options.max_queue, micro_batch=options.micro_batch
        )
        self.feedback = FeedbackWindow(Path(options.state_folder) / "feedback")
        self.metrics_text = SharedResult(self.format_metrics)
        self.status = SharedResult(self.describe_status)
        self.is_draining = False
        self._signature: ModelSignature | None = None
        self._encoder: RecordEncoder | None = None
        self._lock = threading.Lock()  # protects what is built at the first use

    def start(self) -> None:
        """Open the model and start all threads. Raises ColonnadeError, OSError."""
        self.log.start()
        self.model.start()
        self.queue.start()

    def close(self) -> None:
        """Finish accepted requests, stop all threads and unmap the rows."""
        self.queue.close()
        self.model.close()
        self.log.close()

    @property
    def is_ready(self) -> bool:
        """True if requests are accepted and can be scored."""
        return self.model.is_ready and not self.is_draining

    @property
    def signature(self) -> ModelSignature:
        """Inputs and outputs of the model. Raises NotReady."""
        if self._signature is None:
            schema = self.model.get_any().schema
            if schema is None:
                raise ConfigError(
                    "the model has no schema of its data; serve a model that `colonnade train` trained"
                )
            encoder = None
            with suppress(ConfigError):  # without an encoder, no texts
                encoder = self.get_encoder()
            self._signature = build_signature(schema, self.options.max_candidates, encoder)
        return self._signature

    def check_name(self, name: str) -> None:
        """Raise RequestError (404) for another model's name."""
        own, _, rest = name.partition("/")
        if rest and own == self.options.name:
            raise RequestError(
                404,
                f"path: got {quote_value(rest)} of model {own!r}, wanted infer, ready, config or versions/STEP",
            )
        if name != self.options.name:
            raise RequestError(
                404,
                f"model: got {quote_value(name)}, wanted {self.options.name!r}, the one served here (--name)",
            )

    def parse_version(self, text: str | None) -> int | None:
        """Return the step that a version names; None: the newest. Raises RequestError (404)."""
        if not text:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise RequestError(
                404,
                f"version: got {quote_value(text)}, wanted a step; the model's metadata lists them",
            )
        return int(text)

    def describe_model(self, step: int | None = None) -> dict[str, Any]:
        """Return the model's metadata. Raises NotReady, RequestError (404) for an unknown step."""
        signature = self.signature
        steps = self.model.list_steps()
        if step is not None and step not in steps:
            raise RequestError(404, f"version: got {step}, wanted one of {steps}")
        return describe_model(signature, name=self.options.name, steps=steps, run=self.model.run)

    def describe_config(self) -> dict[str, Any]:
        """Return the configuration that clients of Triton ask for. Raises NotReady."""
        return build_triton_config(self.signature, self.options.name)

    def describe_status(self) -> dict[str, Any]:
        """Return what the live page shows."""
        model = self.model
        return {
            "model": self.options.name,
            "run": model.run,
            "step": model.step,
            "age_seconds": model.age_seconds,
            "is_ready": self.is_ready,
            "problem": model.problem,
            "waiting": self.queue.num_waiting,
            "order": {
                "serve_step": model.control.read().serve_step,
                "pins": list(model.control.read().pins),
            },
            "feedback": self.feedback.summarise().to_dict(),
            **self.metrics.summarise(),
        }

    def describe_readiness(self) -> dict[str, Any]:
        """Return the body of a readiness check."""
        return {"ready": self.is_ready, "step": self.model.step, "problem": self.model.problem}

    def plan_infer(
        self, body: bytearray, header_length: str | None, record: RequestRecord
    ) -> tuple[Callable[[], Batch], Callable[[Scored], tuple[bytes, int | None]]]:
        """Return what builds the batch of an inference request, and what formats the answer's body."""
        request: list[InferRequest] = []

        def prepare() -> Batch:
            request.append(parse_infer_request(body, header_length))
            return self.note_samples(build_batch(self.signature, request[0].inputs), record)

        def finish(scored: Scored) -> tuple[bytes, int | None]:
            record.step = scored.step
            return format_infer_response(
                request[0],
                format_scores(scored.scores),
                model=self.options.name,
                step=scored.step,
                run=scored.run,
            )

        return prepare, finish

    def plan_score(
        self, body: bytearray, record: RequestRecord
    ) -> tuple[Callable[[], Batch], Callable[[Scored], bytes]]:
        """Return what builds the batch of a request with raw records, and what formats the answer's body."""

        def prepare() -> Batch:
            return self.note_samples(self.encode_records(parse_request_json(body)), record)

        def finish(scored: Scored) -> bytes:
            record.step = scored.step
            scores = format_labelled_scores(scored.scores, self.signature.labels)
            return json.dumps(
                {
                    "scores": scores,
                    "step": scored.step,
                    "run": scored.run,
                    "model": self.options.name,
                }
            ).encode()

        return prepare, finish

    def note_samples(self, batch: Batch, record: RequestRecord) -> Batch:
        record.samples = batch.size
        return batch

    def encode_records(self, fields: Any) -> Batch:
        """Build the batch of a request with raw records. Raises RequestError, DataError."""
        encoder = self.get_encoder()
        if isinstance(fields, dict) and not fields.keys() & {"records", "candidates"}:
            if fields.keys() & set(encoder.columns):  # one record, without its list
                fields = [fields]
        if isinstance(fields, list):
            fields = {"records": fields}
        if not isinstance(fields, dict) or set(fields) not in ({"records"}, {"user", "candidates"}):
            names = list(fields) if isinstance(fields, dict) and fields else fields
            raise RequestError(400, f"body: got {quote_value(names)}, wanted {MODEL_FIELDS}")
        is_shared = "user" in fields
        records = fields["candidates" if is_shared else "records"]
        if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
            raise RequestError(400, f"body: got {quote_value(records)}, wanted an array of objects")
        if not 0 < len(records) <= self.options.max_candidates:
            raise RequestError(
                413 if records else 400,
                f"body: got {len(records):,} records, wanted 1 to {self.options.max_candidates:,}; send several "
                "requests, or raise --max-candidates",
            )
        if not is_shared:
            return encoder.encode(records)
        if not isinstance(fields["user"], dict):
            raise RequestError(400, f"user: got {quote_value(fields['user'])}, wanted an object")
        return encoder.encode_candidates(fields["user"], records)

    def get_encoder(self) -> RecordEncoder:
        """Return the encoder of raw records, built at the first use."""
        with self._lock:
            if self._encoder is None:
                predictor = self.model.get_any()
                if predictor.config is None or predictor.schema is None:
                    raise ConfigError(
                        "the model has no configuration of its data; send tensors to /v2 instead"
                    )
                self._encoder = build_encoder(predictor.config, predictor.schema)
            return self._encoder

    def recommend(self, body: bytearray, record: RequestRecord) -> bytes:
        """Answer a request for recommendations. Raises RequestError, DataError."""
        fields = parse_request_json(body)
        unknown = set(fields) - RECOMMEND_FIELDS if isinstance(fields, dict) else {"no object"}
        if unknown or not isinstance(fields.get("user"), dict):
            names = list(fields) if isinstance(fields, dict) and fields else fields
            raise RequestError(
                400,
                f"body: got {quote_value(names)}, wanted 'user': {{...}}, and 'k', 'exclude': [...], 'exclude_seen'",
            )
        exclude = fields.get("exclude", [])
        exclude_seen = fields.get("exclude_seen", True)
        if not isinstance(exclude_seen, bool):
            raise RequestError(
                400, f"exclude_seen: got {quote_value(exclude_seen)}, wanted true or false"
            )
        if not isinstance(self.model.get_any().model, Retriever):
            raise RequestError(404, NO_ITEMS)
        try:
            best = self.model.recommend(
                [fields["user"]], fields.get("k", 10), exclude=[exclude], exclude_seen=exclude_seen
            )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"model {self.options.name!r}, step {self.model.step}: {error}"
            ) from None
        check_finite_scores(torch.tensor(best.scores), best.step, self.options.name)
        record.samples = 1
        record.step = best.step
        answer = {"items": best.items[0], "scores": best.scores[0], "step": best.step}
        answer["by_popularity"] = best.by_popularity[0]
        return json.dumps({**answer, "run": self.model.run, "model": self.options.name}).encode()

    def add_feedback(self, body: bytearray, record: RequestRecord) -> dict[str, Any]:
        """Add the pairs of score and label of a request to the window. Raises RequestError, StorageError."""
        pairs = parse_feedback(parse_request_json(body), self.options.max_candidates)
        self.feedback.add_pairs(pairs)
        self.metrics.count_feedback(len(pairs), int(pairs["label"].sum()))
        record.samples = len(pairs)
        return {"pairs": len(pairs)}

    def format_metrics(self) -> bytes:
        """Return all workers' metrics in Prometheus' text format."""
        self.metrics.observe_feedback(self.feedback.summarise())
        return self.metrics.format_text(self.model)

    def note_poll(self, model: ServedModel) -> None:
        """Note the state of the model and of the log in the metrics."""
        self.metrics.observe_model(model)
        self.metrics.lost_lines.set(self.log.num_lost)

    def administrate(self, action: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an administrative call in all workers; return the order that is now in force.

        Raises RequestError, ConfigError, CheckpointError.
        """
        step = fields.get("step")
        if step is not None and (type(step) is not int or step < 0):
            raise RequestError(400, f"step: got {quote_value(step)}, wanted a step, 0 or more")
        if step is None and action in ("pin", "unpin"):
            raise RequestError(400, 'step: got none, wanted the step: {"step": 1200}')
        if action == "rollback":
            self.model.roll_back(step)
        elif action == "follow":
            self.model.follow()
        elif action == "pin":
            self.model.pin(int(step))  # type: ignore[arg-type]
        elif action == "unpin":
            self.model.unpin(int(step))  # type: ignore[arg-type]
        elif action == "shutdown":
            self.model.control.stop()
        order = self.model.control.read()
        self.log.write("admin", {"action": action, "step": step})
        return {"serve_step": order.serve_step, "pins": list(order.pins), "step": self.model.step}


def describe_error(error: BaseException) -> tuple[int, str, int | None]:
    """Return the status, the text and the seconds of Retry-After (None: no use) that answer an error."""
    if isinstance(error, RequestError):
        return error.status, str(error), error.retry_seconds
    if isinstance(error, NotReady):
        return 503, str(error), 1
    if isinstance(error, OSError) and error.errno in FULL:
        disk_error = error.strerror if isinstance(error, StorageError) else None
        text = (
            f"got {error.strerror} while {error.filename or 'a file of the server'} was written; free some space on "
            "its disk"
        )
        return 507, disk_error or text, None
    if isinstance(error, StorageError):
        return 503, str(error.strerror or error), 1
    if isinstance(error, CheckpointError):
        return 404, str(error), None
    if isinstance(error, DataError | ConfigError):
        return 400, str(error), None
    if isinstance(error, ColonnadeError):
        return 500, str(error), None
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    if isinstance(error, OSError) and error.filename:
        return (
            500,
            f"{error.filename}: got {error.strerror}; check the path and its permissions",
            None,
        )
    return (
        500,
        f"got {type(error).__name__} in the server, wanted an answer; its log has the details",
        None,
    )
