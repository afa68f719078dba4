"""Exports and publications that were damaged, or made to do harm: a typed error, and never other scores."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import read_fields, reseal, small_blocks
from forked_script import run_script
from small_run import CONFIG, opened

from colonnade import Mesh, Predictor, export_run
from colonnade.cli import main
from colonnade.config.run import build_config, override_settings
from colonnade.errors import CheckpointError, ColonnadeError, CorruptionError, NonFiniteError
from colonnade.files.disk import Disk
from colonnade.files.durable import read_verified, write_durably
from colonnade.publish.deltas import CURRENT
from colonnade.publish.model_files import serialize_model_json
from colonnade.publish.model_writer import check_dense_finite
from colonnade.publish.transfer import build_fresh_records, store_records
from colonnade.run.run import open_run
from colonnade.store.mapped import MappedRows

EVIL = ("../../evil", "/etc/hostname", "..", ".", "", "a/b", ".hidden", "x\0y", "x\ny", "n" * 300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with RUN, an export of it and a publication. All tables have one shape, and files of one length."""
    place = tmp_path_factory.mktemp("whole")
    settings = {
        "train.epochs": 1, "train.max_steps": 8, "train.checkpoint_steps": 4, "train.publish": str(place / "published"),
        "data.options.cardinalities": [40, 40, 40],
    }  # fmt: skip
    config = override_settings(build_config(CONFIG), settings)
    run = open_run(config, Mesh(), place / "run", data=opened(config))
    run.train()
    run.close()
    export_run(place / "run", place / "export")
    return place


@pytest.fixture
def export(whole, tmp_path) -> Path:
    shutil.copytree(whole / "export", tmp_path / "export")
    return tmp_path / "export"


@pytest.fixture
def published(whole, tmp_path) -> Path:
    shutil.copytree(whole / "published", tmp_path / "published")
    return tmp_path / "published"


@pytest.fixture(scope="module")
def batch():
    config = override_settings(build_config(CONFIG), {"data.options.cardinalities": [40, 40, 40]})
    return next(iter(opened(config).train.batches(200)))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def swap(
    folder: Path, first: str = "rows-0.safetensors", second: str = "rows-1.safetensors"
) -> None:
    a, b = (folder / first).read_bytes(), (folder / second).read_bytes()
    assert len(a) == len(b) and a != b
    (folder / first).write_bytes(b)
    (folder / second).write_bytes(a)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def link_out(path: Path) -> None:
    shutil.copy(path, path.parent.parent / "outside")
    replace(path, lambda path: path.symlink_to(path.parent.parent / "outside"))


ROWS, DENSE, MODEL = "rows-1.safetensors", "dense.safetensors", "model.json"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "rows header": lambda out: flip(out / ROWS, 30),
    "rows ids": lambda out: flip(out / ROWS, 8 + int.from_bytes((out / ROWS).read_bytes()[:8], "little") + 9),
    "rows weights": lambda out: flip(out / ROWS, -100),
    "rows end": lambda out: flip(out / ROWS, -1),
    "dense header": lambda out: flip(out / DENSE, 20),
    "dense weights": lambda out: flip(out / DENSE, -3),
    "swapped": swap,
    "rows cut": lambda out: os.truncate(out / ROWS, 500),
    "rows empty": lambda out: os.truncate(out / ROWS, 0),
    "rows longer": lambda out: (out / ROWS).open("ab").write(b"x"),
    "dense cut": lambda out: os.truncate(out / DENSE, 500),
    "model cut": lambda out: os.truncate(out / MODEL, 500),
    "model empty": lambda out: os.truncate(out / MODEL, 0),
    "rows away": lambda out: (out / ROWS).unlink(),
    "dense away": lambda out: (out / DENSE).unlink(),
    "rows fifo": lambda out: replace(out / ROWS, os.mkfifo),
    "dense fifo": lambda out: replace(out / DENSE, os.mkfifo),
    "model fifo": lambda out: replace(out / MODEL, os.mkfifo),
    "rows folder": lambda out: replace(out / ROWS, Path.mkdir),
    "rows link": lambda out: link_out(out / ROWS),
    "dense link": lambda out: link_out(out / DENSE),
    "deep model": lambda out: (out / MODEL).write_text("[" * 100_000),
    "model no object": lambda out: (out / MODEL).write_text("[1]"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_is_scored(damage, export, batch, capsys, monkeypatch):
    DAMAGES[damage](export)
    with pytest.raises(ColonnadeError, match=str(export)):
        with Predictor.open(export) as predictor:
            predictor(batch)
    with pytest.raises(ColonnadeError, match=str(export)):
        Predictor.open(export, verify="full")
    monkeypatch.setattr(sys, "argv", ["colonnade", "verify", str(export)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and str(export) in capsys.readouterr().err


def test_every_byte_of_model_json_is_checked(export, batch):
    size = (export / MODEL).stat().st_size
    for at in range(0, size, size // 40):
        flip(export / MODEL, at)
        with pytest.raises(ColonnadeError, match=MODEL):
            Predictor.open(export)
        flip(export / MODEL, at)
    with Predictor.open(export, verify="full") as predictor:
        predictor(batch)


def edit(out: Path, **of_table) -> None:
    tables = read_fields(out)["tables"]
    tables[1].update(of_table)
    reseal(out, tables=tables)


def edit_ids(out: Path, change: Callable[[np.ndarray], None]) -> None:
    content = bytearray((out / ROWS).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    count = read_fields(out)["tables"][1]["count"]
    change(np.frombuffer(content, np.int64, count, begin))
    (out / ROWS).write_bytes(bytes(content))
    reseal(out)


def edit_header(out: Path, change: Callable[[dict], None]) -> None:
    content = (out / ROWS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    (out / ROWS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    reseal(out)


def edit_top(out: Path, widths: list[int]) -> None:
    config = read_fields(out)["config"]
    config["model"]["top"] = widths
    reseal(out, config=config)


def edit_join(out: Path, join: object) -> None:
    config = read_fields(out)["config"]
    config["data"]["options"]["join"] = join
    reseal(out, config=config)


def long_header(out: Path) -> None:
    (out / ROWS).write_bytes((2**62).to_bytes(8, "little") + (out / ROWS).read_bytes()[8:])
    reseal(out)


def drop(out: Path, name: str) -> None:
    fields = {k: v for k, v in read_fields(out).items() if k != name}
    (out / MODEL).write_bytes(serialize_model_json(fields))


FORGERIES: dict[str, Callable[[Path], object]] = {
    **{f"file {name[:20]!r}": lambda out, name=name: edit(out, file=name) for name in EVIL},
    "file number": lambda out: edit(out, file=7),
    **{
        f"join {name[:20]!r}": lambda out, name=name: edit_join(out, {"user": name})
        for name in EVIL
    },
    "join number": lambda out: edit_join(out, {"user": 7}),
    "join list": lambda out: edit_join(out, ["users.csv"]),
    "unknown field": lambda out: reseal(out, more=1),
    "unknown table field": lambda out: edit(out, more=1),
    "missing field": lambda out: drop(out, "schema"),
    "count word": lambda out: edit(out, count="40"),
    "count bool": lambda out: edit(out, count=True),
    "huge count": lambda out: edit(out, count=10**15),
    "huge dim": lambda out: edit(out, dim=10**12),
    "negative dim": lambda out: edit(out, dim=-4),
    "huge rows": lambda out: edit(out, rows=10**15),
    "huge network": lambda out: edit_top(out, [10**6, 10**6, 10**6]),
    "dtype": lambda out: edit(out, dtype="int8"),
    "step": lambda out: reseal(out, step=-1),
    "schema": lambda out: reseal(out, schema={"dense": [], "categorical": [{"nome": 1}], "labels": []}),
    "negative id": lambda out: edit_ids(out, lambda ids: ids.__setitem__(0, -1)),
    "id beyond": lambda out: edit_ids(out, lambda ids: ids.__setitem__(-1, 40)),
    "id twice": lambda out: edit_ids(out, lambda ids: ids.__setitem__(1, ids[0])),
    "long header": long_header,
    "huge shape": lambda out: edit_header(out, lambda h: h["weights"].update(shape=[10**15, 4])),
    "shape word": lambda out: edit_header(out, lambda h: h["ids"].update(shape="x")),
    "no ids": lambda out: edit_header(out, lambda h: h.pop("ids")),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forgeries_with_right_checksums_are_refused(forgery, export):
    FORGERIES[forgery](export)
    with pytest.raises(ColonnadeError, match="export"):
        Predictor.open(export)


def test_an_older_format_is_refused_with_both_versions(export):
    fields = json.loads((export / MODEL).read_text())
    (export / MODEL).write_text(json.dumps({**fields, "version": 1}))
    with pytest.raises(CheckpointError, match=r"version 1, this Colonnade reads .* version 2"):
        Predictor.open(export)


def test_the_scrub_names_what_no_lookup_has_read(export):
    """Tables of these files fit in one block, which opening reads; so the scrub's own reading is looked at."""
    with Predictor.open(export) as predictor:
        file = predictor.rows.tables[1].file.file
        predictor.rows._scrub.join()
        assert file.is_checked and predictor.problem is None
        file.checked[:] = 0
        flip(export / ROWS, -1)
        predictor.rows.start_scrub()
        predictor.rows._scrub.join()
        assert isinstance(predictor.problem, CorruptionError) and ROWS in str(predictor.problem)


def test_rows_are_checked_when_they_are_first_read(whole, tmp_path, monkeypatch):
    """A damaged row harms those alone that look it up; nothing else of the file is read."""
    small_blocks(monkeypatch)
    monkeypatch.setattr(MappedRows, "start_scrub", lambda self: None)
    out = tmp_path / "out"
    export_run(whole / "run", out)
    with Predictor.open(out) as predictor:
        file = predictor.rows.tables[1].file
        at = file.weights_begin + (file.num_rows - 1) * file.stride
        bad = int(file.read_ids(file.num_rows - 1, file.num_rows)[0])

        def look_up(*ids: int) -> torch.Tensor:
            requested = torch.tensor(ids)
            slots = predictor.rows.find_slots(
                requested, torch.tensor([0, len(ids)]), torch.tensor([1])
            )
            return slots

        block = file.file.num_bytes // 256
        assert not file.file.checked[block]
        before = file.file.checked.sum()
        good = int(file.read_ids(0, 1)[0])
        look_up(good)
        assert before <= file.file.checked.sum() <= before + 1 and not file.file.checked[block]
        flip(out / ROWS, at + 1)
        look_up(good)
        for _ in range(2):
            with pytest.raises(
                CorruptionError, match=rf"{ROWS}: got checksum .* of block {block} "
            ):
                look_up(good, bad)
        flip(out / ROWS, at + 1)
        look_up(good, bad)
        assert file.file.checked[block]


def test_nan_weights_are_not_exported(whole, tmp_path):
    with pytest.raises(NonFiniteError, match=r"top\.weight: got NaN or inf"):
        check_dense_finite({"top.weight": torch.tensor([1.0, torch.inf])})
    config = override_settings(
        build_config(CONFIG), {"data.options.cardinalities": [40, 40, 40], "train.max_steps": 4}
    )
    run = open_run(config, Mesh(), tmp_path / "run", data=opened(config))
    run.train()
    collection = run.trainer.collection
    table = collection.tables[1]
    records = build_fresh_records(table, torch.full((1, table.width), torch.nan))
    store_records(collection, 1, torch.tensor([7]), records)
    collection.step += 1
    run.checkpoints.save(run.trainer, ())
    run.close()
    with pytest.raises(
        NonFiniteError, match=rf"table '{table.name}': got NaN or inf in the row of id 7"
    ):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", EVIL)
def test_names_in_a_publication_lead_nowhere_else(name, published, tmp_path):
    """Names are checked by `open`, and by the copy of a URL."""
    word = json.loads(read_verified(published / CURRENT))
    word["bases"][0]["folder"] = name
    write_durably(Disk(), published / CURRENT, json.dumps(word).encode())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptionError, match=CURRENT):
        Predictor.open(published)
    with pytest.raises(CorruptionError, match=CURRENT):
        Predictor.open(f"file://{published}", copy=tmp_path / "copy")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", EVIL)
def test_names_in_a_bases_model_are_not_carried(name, published, tmp_path):
    base = next(published.glob("base-*"))
    fields = read_fields(base)
    fields["files"][name] = fields["files"].pop(ROWS)
    fields["tables"][1]["file"] = name
    (base / MODEL).write_bytes(serialize_model_json(fields))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptionError, match=MODEL):
        Predictor.open(f"file://{published}", copy=tmp_path / "copy")
    assert sorted(tmp_path.rglob("*")) == before


def test_links_out_of_a_publication_are_not_followed(published, tmp_path):
    base = next(published.glob("base-*"))
    shutil.move(base, tmp_path / "elsewhere")
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptionError, match="symbolic link"):
        Predictor.open(published)
    with pytest.raises(CorruptionError, match="symbolic link"):
        Predictor.open(f"file://{published}", copy=tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_damaged_copy_is_carried_again_and_a_damaged_source_is_not(published, tmp_path, batch):
    url, copy = f"file://{published}", tmp_path / "copy"
    with Predictor.open(url, copy=copy) as predictor:
        wanted = predictor(batch)
    base = next(copy.glob("base-*"))
    flip(base / ROWS, -1)
    with pytest.raises(CorruptionError, match=ROWS):
        Predictor.open(url, copy=copy)
    with Predictor.open(url, copy=copy) as predictor:
        assert torch.equal(predictor(batch), wanted)
    shutil.rmtree(copy)
    flip(published / base.name / ROWS, -1)
    with pytest.raises(CorruptionError, match=ROWS):
        Predictor.open(url, copy=copy)
    assert not (copy / CURRENT).exists() and not (base / ROWS).exists()


def test_verify_reads_a_publication(published, capsys, monkeypatch):
    def verify() -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["colonnade", "verify", str(published)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert not verify() and "intact" in capsys.readouterr().out
    changes = sorted(published.glob("change-*"))
    flip(changes[-1], 300)
    assert verify() == 2 and changes[-1].name in capsys.readouterr().out


CUT = """
import faulthandler, os, sys, torch
from pathlib import Path
from small_run import CONFIG, opened
from colonnade import Predictor
from colonnade.config.run import build_config, override_settings
from colonnade.errors import CorruptionError
out = Path(sys.argv[1])
config = override_settings(build_config(CONFIG), {"data.options.cardinalities": [40, 40, 40]})
batch = next(iter(opened(config).train.batches(200)))
predictor = Predictor.open(out)
wanted = predictor(batch)
predictor.rows._scrub.join()
if sys.argv[2] == "after":
    faulthandler.enable()
other = Predictor.open(Path(sys.argv[3]))
os.truncate(out / "rows-1.safetensors", 0)
for _ in range(3):
    try:
        predictor(batch)
    except CorruptionError as error:
        assert "rows-1.safetensors: got a file that was cut short" in str(error), error
        assert str(error) == str(predictor.problem)
    else:
        raise SystemExit("scored")
assert torch.equal(other(batch), wanted)
other.close(), predictor.close()
"""
OTHER_FAULT = """
import ctypes, mmap, os, sys, torch
if sys.argv[1] == "before":
    import faulthandler; faulthandler.enable()
from colonnade import _native
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096)
address, error = _native.map_file(fd, 0, 4096, 0)
assert not error
if sys.argv[1] == "after":
    import faulthandler; faulthandler.enable()
    _native.handle_faults()
other = mmap.mmap(fd, 4096)
os.ftruncate(fd, 0)
ours = ctypes.c_char.from_address(address)
assert ours.value == b"\\0" and _native.is_damaged(address) and _native.num_damaged() == 1
print("alive", flush=True)
other[0]
"""


@pytest.mark.parametrize("faulthandler", ["never", "after"])
def test_an_export_that_is_cut_short_while_it_is_mapped(faulthandler, export, whole, tmp_path):
    """No score from its rows, no dead process; other exports go on."""
    arguments = export, faulthandler, whole / "export"
    done = run_script(tmp_path, CUT, *arguments, environment=dict(os.environ))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("faulthandler", ["never", "before", "after"])
def test_faults_of_others_go_to_who_handled_them(faulthandler, tmp_path):
    arguments = faulthandler, tmp_path / "file"
    done = run_script(tmp_path, OTHER_FAULT, *arguments, environment=dict(os.environ))
    assert done.returncode == -signal.SIGBUS and done.stdout == "alive\n", done
    assert ("Bus error" in done.stderr) == (faulthandler != "never")
