"""`colonnade serve`: answer requests with a trained model, and follow its training."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from colonnade.cli.predict import AtOption
from colonnade.errors import ConfigError
from colonnade.serve import run_server
from colonnade.terminal import print_text

if TYPE_CHECKING:
    from colonnade.serve.options import ServeOptions

EXAMPLES = (
    "Speaks the Open Inference Protocol v2 (/v2), for Triton's and KServe's clients, and takes raw records (/score). "
    "A publication (train.publish) is followed: each new checkpoint is served as soon as it is published.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade serve runs/mine\n\n"
    "  colonnade serve published --workers 2 --grpc-port 8001 --token-file token.txt\n\n"
    "  colonnade serve s3://bucket/live --copy /local/live\n\n"
    '  curl localhost:8000/score -d \'[{"user": "ann", "item": 7}]\''
)


EXIT_TERMINATED = 128 + signal.SIGTERM
"""Exit status of a server that SIGTERM ended before it served."""

ModelArgument = Annotated[
    str, typer.Argument(help="Run folder, exported folder, or publication (train.publish).")
]
HostOption = Annotated[
    str, typer.Option(help="Address; others than this machine's own need a token.")
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0: any.")]
GrpcPortOption = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of gRPC; default: no gRPC.")
]
NameOption = Annotated[str, typer.Option(help="Name of the model in /v2/models/NAME.")]
ItemsOption = Annotated[
    Path | None,
    typer.Option(help="File of all items that may be recommended; default: those of the data."),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(help="FILE.py:FUNCTION that builds the network of a run of colonnade.fit."),
]
CopyOption = Annotated[str | None, typer.Option(help="Folder on this host for a URL's files.")]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait for a folder that a run will publish to.")
]
PollOption = Annotated[
    float, typer.Option(min=0.05, help="Seconds between looks for a newer checkpoint.")
]
WorkersOption = Annotated[
    int, typer.Option(min=1, max=256, help="Processes; they share mapped rows.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Threads per process; default: processors / workers."),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(help="File with the token of administrative calls; or set COLONNADE_TOKEN."),
]
AllowedHostOption = Annotated[
    list[str] | None, typer.Option(help="Further name of this server in the header Host.")
]
AllowedOriginOption = Annotated[
    list[str] | None, typer.Option(help="Web page that may call, e.g. https://shop.example.")
]
TlsCertOption = Annotated[Path | None, typer.Option(help="Certificate for HTTPS, PEM.")]
TlsKeyOption = Annotated[Path | None, typer.Option(help="Key of --tls-cert, PEM.")]
MaxCandidatesOption = Annotated[int, typer.Option(min=1, help="Candidates of a request.")]
MaxBodyOption = Annotated[str, typer.Option(help="Size of a body, e.g. 16MiB.")]
MaxQueueOption = Annotated[
    int, typer.Option(min=1, help="Waiting requests per process; more are answered 503.")
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, help="Seconds until a request is answered 504.")
]
BodyTimeoutOption = Annotated[
    float,
    typer.Option(min=0.01, help="Seconds for a request's header, and for its body; then 408."),
]
MicroBatchOption = Annotated[
    int,
    typer.Option(
        min=1, help="Requests scored together; above 1, scores may differ in the last bit."
    ),
]
RowMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for rows per process, e.g. 4GiB, if not all fit; the others are read from files."
    ),
]
MaxVersionsOption = Annotated[int, typer.Option(min=0, help="Open older steps per process.")]
VersionMemoryOption = Annotated[
    str, typer.Option(help="Memory for rows of open older steps per process, e.g. 1GiB.")
]
MaxPinsOption = Annotated[int, typer.Option(min=0, help="Pinned steps.")]
DrainOption = Annotated[
    float, typer.Option(min=0, help="Seconds for requests in progress when stopped.")
]
AccessLogOption = Annotated[
    str | None, typer.Option(help="File for one JSON object per request; -: standard output.")
]
StateOption = Annotated[
    Path | None,
    typer.Option(help="Folder that keeps rollbacks and pins over restarts; default: none."),
]


def serve(
    model: ModelArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    grpc_port: GrpcPortOption = None,
    name: NameOption = "model",
    at: AtOption = None,
    items: ItemsOption = None,
    network: NetworkOption = None,
    copy: CopyOption = None,
    wait: WaitOption = False,
    poll: PollOption = 0.5,
    workers: WorkersOption = 1,
    threads: ThreadsOption = None,
    token_file: TokenFileOption = None,
    allowed_host: AllowedHostOption = None,
    allowed_origin: AllowedOriginOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    max_candidates: MaxCandidatesOption = 10_000,
    max_body: MaxBodyOption = "16MiB",
    max_queue: MaxQueueOption = 64,
    timeout: TimeoutOption = 5.0,
    body_timeout: BodyTimeoutOption = 10.0,
    micro_batch: MicroBatchOption = 1,
    row_memory: RowMemoryOption = None,
    max_versions: MaxVersionsOption = 2,
    version_memory: VersionMemoryOption = "1GiB",
    max_pins: MaxPinsOption = 4,
    drain: DrainOption = 30.0,
    access_log: AccessLogOption = None,
    state: StateOption = None,
) -> None:
    """Serve a trained model over HTTP and gRPC.

    Stops on SIGTERM or Ctrl-C after answering the requests in progress."""
    check_packages(grpc_port is not None)
    from colonnade.serve.options import ServeOptions
    from colonnade.serve.security import read_token

    check_serve_settings(model, copy, at, wait, tls_cert, tls_key)
    options = ServeOptions(
        path=model,
        name=name,
        copy=copy,
        network=network,
        at=at,
        poll_seconds=poll,
        host=host,
        token=read_token(token_file),
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        tls_certificate=None if tls_cert is None else str(tls_cert),
        tls_key=None if tls_key is None else str(tls_key),
        grpc_port=grpc_port,
        is_grpc_shared=workers > 1,
        max_body_bytes=parse_size("--max-body", max_body),
        max_candidates=max_candidates,
        max_queue=max_queue,
        timeout_seconds=timeout,
        body_seconds=body_timeout,
        micro_batch=micro_batch,
        row_memory_bytes=None if row_memory is None else parse_size("--row-memory", row_memory),
        max_versions=max_versions,
        max_version_bytes=parse_size("--version-memory", version_memory),
        max_pins=max_pins,
        drain_seconds=drain,
        threads=choose_thread_count(threads, workers),
        access_log=access_log,
        state_folder="",
    )
    serve_until_stopped(options, port, workers, items, state)


def check_serve_settings(
    model: str,
    copy: str | None,
    at: str | None,
    wait: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> None:
    """Check settings of the model and its certificate; else raise ConfigError."""
    check_model_path(model, copy, at, wait)
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert, --tls-key: got one of the two, wanted both or none")
    if tls_cert is not None and tls_key is not None:
        check_certificate(tls_cert, tls_key)


def choose_thread_count(threads: int | None, workers: int) -> int:
    """Return the threads of each worker: by default, an equal part of the usable processors."""
    from colonnade.machine import check_worker_count
    from colonnade.processors import count_usable_processors

    return check_worker_count("--threads", threads or max(1, count_usable_processors() // workers))


def serve_until_stopped(
    options: ServeOptions, port: int, workers: int, items: Path | None, state: Path | None
) -> None:
    """Serve until a signal stops the server. Raises typer.Exit with its status if that is not 0."""
    from colonnade.serve.control import lock_server_folder

    signal.signal(signal.SIGTERM, exit_at_once)
    with lock_server_folder(state) as folder:
        items_file = convert_items_to_json(items, folder)
        options = replace(options, state_folder=str(folder), items_file=items_file)

        def print_address(url: str, fields: dict[str, Any]) -> None:
            step = fields["step"]
            rpc = f", gRPC on port {fields['grpc_port']}" if fields["grpc_port"] else ""
            served = "waiting for the first checkpoint" if step is None else f"step {step}"
            print_text(f"serving {options.path} ({served}) on {url}{rpc}")
            sys.stdout.flush()

        status = run_server(options, port, workers, print_address)
    if status:
        raise typer.Exit(status)


def check_certificate(certificate: Path, key: Path) -> None:
    """Raise ConfigError for files that HTTPS cannot use; the errors of ssl name no file."""
    import ssl

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=str)  # asks nobody for a password
    except OSError as error:
        raise ConfigError(
            f"--tls-cert, --tls-key: got {certificate} and {key}: {error.strerror or error}; give a certificate and "
            "its key in PEM, without a password"
        ) from None


def exit_at_once(*_: object) -> NoReturn:
    """Handle SIGTERM before there is anything to drain, so that no temporary folder is left."""
    raise SystemExit(EXIT_TERMINATED)


def convert_items_to_json(items_path: Path | None, folder: Path) -> str | None:
    """Write the records of a file of items as items.json in `folder`, for the workers; return its path."""
    if items_path is None:
        return None
    from colonnade.cli.record_files import read_records

    path = folder / "items.json"
    path.write_text(json.dumps(list(read_records(items_path))), encoding="utf-8")
    return str(path)


def check_packages(needs_grpc: bool) -> None:
    """Raise ConfigError if an optional package is missing."""
    from importlib.util import find_spec

    names = ["starlette", "uvicorn", "uvloop", "httptools", "prometheus_client"]
    names += ["grpc"] if needs_grpc else []
    missing = [name for name in names if not _is_installed(find_spec, name)]
    if missing:
        raise ConfigError(
            f"colonnade serve needs {', '.join(missing)}; install them: pip install 'colonnade[serve]'"
        )


def _is_installed(find_spec: Any, name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a missing parent package
        return False


def check_model_path(model: str, copy: str | None, at: str | None, wait: bool) -> None:
    """Raise ConfigError for a path without a model, and for options that do not fit it."""
    if "://" in model:
        if copy is None:
            raise ConfigError(
                f"{model} is a URL, and rows are mapped from files; give --copy FOLDER"
            )
        return
    if copy is not None:
        raise ConfigError(f"--copy: got a folder for {model}, which is no URL; leave it out")
    from colonnade.checkpoint.header import suggest_group

    path = Path(model)
    is_publication = (path / "published.json").exists()
    if is_publication and at is not None:
        raise ConfigError(
            f"{model} is a publication, and its newest checkpoint is served; leave --at out, and ask for older "
            "steps by /v2/models/NAME/versions/STEP"
        )
    has_model = is_publication or (path / "model.json").exists() or (path / "checkpoints").exists()
    if not has_model and not wait:
        raise ConfigError(
            f"{model} has no model: wanted a run folder, an exported folder or a publication; give --wait if a run "
            f"will publish there{suggest_group(path)}"
        )


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size such as 16MiB. Raises ConfigError."""
    from colonnade.sizes import parse_positive_bytes

    try:
        return int(parse_positive_bytes(text))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
