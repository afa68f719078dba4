"""Programs of torch beside an export's weights.

EXPORT/model.pt2         whole model, ids to scores: torch.export.load, after `import colonnade.export`
EXPORT/dense.pt2         dense part, vectors to scores: torch.export.load alone
EXPORT/model_aoti.pt2    whole model, compiled by AOTInductor for this processor
EXPORT/dense_aoti.pt2    dense part, compiled in the same way
EXPORT/lookup.cpp        the operator of the lookups, for C++ programs that load model_aoti.pt2
EXPORT/program.json      inputs of both, and checksums of the files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from colonnade.embedding import find_collection
from colonnade.errors import ConfigError
from colonnade.export.program import (
    decompose,
    export_dense_program,
    export_program,
    map_rows,
)
from colonnade.export.tensors import ProgramInput, list_dense_inputs, list_inputs
from colonnade.files.checksums import FileChecksums, compute_checksums, open_checked
from colonnade.files.durable import VerifiedFile, verify_file
from colonnade.files.untrusted import (
    FileName,
    StrictRecord,
    check_file_name,
    parse_json,
    read_regular,
)
from colonnade.predict.predictor import Predictor
from colonnade.publish.model_files import read_export

MODEL_PROGRAM = "model.pt2"
DENSE_PROGRAM = "dense.pt2"
MODEL_PACKAGE = "model_aoti.pt2"
DENSE_PACKAGE = "dense_aoti.pt2"
DESCRIPTION = "program.json"
OPERATOR_SOURCE = "lookup.cpp"
REMEDY = "export the run again, or restore the folder from a copy"
MAX_ROW_BYTES = 1 << 30
"""Bytes of rows up to which they are also in model.pt2."""


@dataclass(frozen=True, slots=True)
class Programs(StrictRecord):
    """Content of program.json."""

    version: Literal[1]
    torch: str
    has_rows: bool
    """True if the rows are in model.pt2, too; else it reads them from the export's files."""
    inputs: tuple[ProgramInput, ...]
    dense_inputs: tuple[ProgramInput, ...]
    labels: tuple[str, ...]
    files: dict[FileName, FileChecksums]


def write_programs(
    folder: Path, predictor: Predictor, *, aoti: bool = False, max_row_bytes: int = MAX_ROW_BYTES
) -> Programs:
    """Trace a predictor and write its programs to `folder`, an export of the same checkpoint.

    aoti: also compile both. Raises ConfigError for a model that cannot be traced, or without a compiler.
    """
    if aoti and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError("got --aoti and no C++ compiler; install g++, or leave --aoti out")
    export = read_export(folder)
    row_bytes = sum(checksums.bytes for _, checksums in export.row_files)
    has_rows = row_bytes <= max_row_bytes
    if aoti and not has_rows:
        raise ConfigError(
            f"got --aoti and {row_bytes:,} bytes of rows, wanted at most {max_row_bytes:,}, which a compiled program "
            "holds; give --torch instead: its model.pt2 reads the rows from their files"
        )
    whole = export_program(predictor, with_rows=has_rows)
    dense = export_dense_program(predictor)
    torch.export.save(whole, folder / MODEL_PROGRAM)
    torch.export.save(dense, folder / DENSE_PROGRAM)
    names = [MODEL_PROGRAM, DENSE_PROGRAM]
    if aoti:
        for program, name in ((decompose(whole), MODEL_PACKAGE), (dense, DENSE_PACKAGE)):
            torch._inductor.aoti_compile_and_package(program, package_path=str(folder / name))
            names.append(name)
        shutil.copyfile(Path(__file__).parent / "cpp" / OPERATOR_SOURCE, folder / OPERATOR_SOURCE)
        names.append(OPERATOR_SOURCE)
    declaration = find_collection(predictor.model).declaration
    schema = export.schema
    programs = Programs(
        1,
        torch.__version__,
        has_rows,
        tuple(list_inputs(schema, declaration)),
        tuple(list_dense_inputs(schema, declaration)),
        schema.labels,
        {name: compute_checksums(folder / name) for name in names},
    )
    (folder / DESCRIPTION).write_text(json.dumps(asdict(programs), indent=2), encoding="utf-8")
    return programs


def read_programs(folder: Path) -> Programs:
    """Read program.json. Raises CorruptionError, StorageError."""
    path = folder / DESCRIPTION
    return parse_json(Programs, read_regular(path), path, REMEDY)


def verify_programs(folder: Path) -> Iterator[VerifiedFile]:
    """Read every byte of an export's programs and yield each file; nothing if it has none."""
    path = folder / DESCRIPTION
    if not (path.exists() or any(folder.glob("*.pt2"))):
        return
    files: dict[FileName, FileChecksums] = {}
    yield verify_file(path, lambda: files.update(read_programs(folder).files))
    for name, checksums in files.items():

        def check(name: str = name, checksums: FileChecksums = checksums) -> None:
            open_checked(folder, name, checksums).check_all()

        yield verify_file(folder / check_file_name(name, path), check)


def load_program(
    folder: Path | str, *, verify: bool = True
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Load model.pt2 of an export: a function from inputs by name to scores (B, labels) float64.

    Rows that are not in model.pt2 are mapped from the export's files, so processes share them. verify: read and check
    every byte first. Raises CorruptionError for damaged files, StorageError for files that cannot be read.
    """
    folder = Path(folder)
    programs = read_programs(folder)
    if verify:
        open_checked(folder, MODEL_PROGRAM, programs.files[MODEL_PROGRAM]).check_all()
    module = torch.export.load(folder / MODEL_PROGRAM).module()
    if not programs.has_rows:
        for t, table in enumerate(map_rows(folder, read_export(folder), verify=verify)):
            setattr(module, f"keys_{t}", table.keys)
            setattr(module, f"rows_{t}", table.weights)

    @torch.no_grad()
    def score(inputs: Mapping[str, Tensor]) -> Tensor:
        return module(dict(inputs))

    return score
