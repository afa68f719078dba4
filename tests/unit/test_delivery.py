"""A predictor that follows a run has the bits of an export of the same step, through deletes, restarts and damage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from exports import small_blocks
from ranks import console_of, run_ranks
from safetensors.torch import save
from small_run import CONFIG, opened

from colonnade import Mesh, Predictor
from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import build_config, override_settings
from colonnade.errors import (
    CheckpointError,
    ColonnadeError,
    ConfigError,
    CorruptionError,
    StorageError,
)
from colonnade.files.checksums import CheckedFile
from colonnade.files.disk import Disk
from colonnade.files.durable import read_verified, write_durably
from colonnade.publish import delivery, deltas
from colonnade.publish.deltas import (
    CURRENT,
    delta_file_name,
    read_current,
    read_delta,
    verify_publication,
)
from colonnade.publish.model_writer import export_run
from colonnade.run.run import open_run

STEPS = {"train.epochs": 1, "train.checkpoint_steps": 4, "train.keep_checkpoints": 20}
OPEN = {"embedding.eviction.max_rows": 300, "embedding.eviction.by": "recency"}


def train(mesh, folder: Path, published: Path, settings: dict) -> int | None:
    config = override_settings(
        build_config(CONFIG), {**STEPS, "train.publish": str(published), **settings}
    )
    run = open_run(config, mesh, folder, data=opened(config), console=console_of(mesh))
    run.train()
    run.close()
    return run.resumed_at


def batches(settings: dict) -> list:
    config = override_settings(build_config(CONFIG), settings)
    data = opened(config)
    return [*data.test.batches(64), *data.train.batches(256)]


def scores(predictor: Predictor, samples: list) -> list[torch.Tensor]:
    return [predictor(batch) for batch in samples]


def equal(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def wanted(folder: Path, step: int, samples: list, place: Path) -> list[torch.Tensor]:
    """Return the scores of an export of the step."""
    if not place.exists():
        export_run(folder, place, at=step)
    with Predictor.open(place) as predictor:
        return scores(predictor, samples)


@pytest.fixture
def snapshots(monkeypatch):
    """The publication as it was after each checkpoint, by step."""
    results: dict[int, dict[str, bytes]] = {}
    send = deltas.DeltaPublisher.send

    def send_and_keep(self, step, retained, say):
        send(self, step, retained, say)
        assert self.problem is None
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        results[step] = {str(p.relative_to(self.folder)): p.read_bytes() for p in files}

    monkeypatch.setattr(deltas.DeltaPublisher, "send", send_and_keep)
    return results


def lay(files: dict[str, bytes], folder: Path) -> None:
    """The folder as it was."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if str(path.relative_to(folder)) not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists() or (folder / name).read_bytes() != content:
            # Beside, then put in place: a mapped file must not change under its readers, nor a follower find none.
            beside = folder / f"{name}.beside"
            beside.write_bytes(content)
            os.replace(beside, folder / name)


@pytest.mark.parametrize("settings", [{}, OPEN], ids=["vocabulary", "evicting"])
@pytest.mark.parametrize("least", [1, 1 << 30], ids=["bases", "changes"])
def test_every_checkpoint_has_the_bits_of_its_export(
    settings, least, snapshots, tmp_path, monkeypatch
):
    """Newborn rows, rows that were evicted, one that comes back; predictors that look at each checkpoint, at some,
    late."""
    monkeypatch.setattr(deltas, "MIN_BYTES_FOR_BASE", least)
    settings = {**settings, "plan.memory.dram": 120_000} if not settings else settings
    folder, live, samples = tmp_path / "run", tmp_path / "live", batches(settings)
    train(Mesh(), folder, tmp_path / "published", settings)
    steps = list_checkpoints(folder)
    assert sorted(snapshots) == steps and len(steps) == 4
    lay(snapshots[steps[0]], live)
    with Predictor.open(live) as every, Predictor.open(live) as several:
        for number, step in enumerate(steps):
            lay(snapshots[step], live)
            assert every.refresh() == (number > 0) and every.refresh() == 0
            expected = wanted(folder, step, samples, tmp_path / f"at-{step}")
            assert every.step == step and equal(scores(every, samples), expected)
            with Predictor.open(live) as late:
                assert late.step == step and equal(scores(late, samples), expected)
        assert several.refresh() == 3 and equal(scores(several, samples), expected)
    word = read_current(live)
    assert len(word.bases) == (2 if least == 1 else 1)
    if least > 1:
        sent = [read_delta(live, number) for number in range(1, word.number + 1)]
        assert not [change for change in sent if not sum(len(t.ids) for t in change.tables)]
        assert bool(settings.get("embedding.eviction.max_rows")) == any(
            len(table.gone) for change in sent for table in change.tables
        )


def test_of_several_ranks_whatever_their_shardings_and_number(tmp_path):
    """Slices, hot rows, copies, servers of another world: what is published does not know them. Ranks that change start
    from a base."""
    folder, published = tmp_path / "run", tmp_path / "published"
    samples = batches({})
    shardings = {
        "embedding.optimizer": "adagrad",
        "plan.tables": {
            "C1": {"sharding": "column_wise"},
            "C2": {"sharding": "replicated"},
            "C4": {"sharding": "table_wise"},
        },
    }
    run_ranks(2, train, folder, published, {**shardings, "train.max_steps": 9})
    step = list_checkpoints(folder)[-1]
    with Predictor.open(published) as predictor:
        assert predictor.step == step and read_current(published).bases[-1].number == 0
        assert equal(scores(predictor, samples), wanted(folder, step, samples, tmp_path / "one"))
        assert train(Mesh(), folder, published, {"embedding.optimizer": "adagrad"}) == step
        assert predictor.refresh() > 1  # a base, and changes after it
        step = list_checkpoints(folder)[-1]
        assert predictor.step == step and read_current(published).bases[-1].number > 0
        assert equal(scores(predictor, samples), wanted(folder, step, samples, tmp_path / "two"))


def test_goes_on_where_it_was_and_names_what_is_wrong(snapshots, tmp_path):
    folder, live, samples = tmp_path / "run", tmp_path / "live", batches({})
    train(Mesh(), folder, tmp_path / "published", {})
    first, second, third, last = list_checkpoints(folder)
    lay(snapshots[first], live)
    with Predictor.open(live) as predictor:
        before = scores(predictor, samples)
        lay(snapshots[third], live)
        torn = live / delta_file_name(2)
        content = torn.read_bytes()
        for damage in (content[:-7], content[:100] + bytes([content[100] ^ 1]) + content[101:]):
            torn.write_bytes(damage)
            with pytest.raises(CorruptionError, match=delta_file_name(2)):
                predictor.refresh()
            assert predictor.step == second  # the first of the two was whole
        expected = wanted(folder, second, samples, tmp_path / "second")
        assert equal(scores(predictor, samples), expected) and not equal(expected, before)
        torn.unlink()
        with pytest.raises(StorageError, match=delta_file_name(2)):
            predictor.refresh()
        torn.write_bytes((live / delta_file_name(1)).read_bytes())
        with pytest.raises(CheckpointError, match="another publication's"):
            predictor.refresh()
        assert predictor.step == second and equal(scores(predictor, samples), expected)
        lay(snapshots[last], live)
        assert predictor.refresh() == 2
        expected = wanted(folder, last, samples, tmp_path / "last")
        assert equal(scores(predictor, samples), expected)


@pytest.mark.parametrize("name", ["shardings", "num_ranks", "model"])
def test_a_checkpoint_with_another_header_is_published_as_a_base(name, tmp_path, monkeypatch):
    """Rows of stores that are divided otherwise, or of other tables, are not compared: a delta would mix them up."""
    run, published = tmp_path / "run", tmp_path / "published"
    train(Mesh(), run, published, {"train.max_steps": 4})
    read_header, before = deltas.read_header, read_current(published)

    def read_changed_header(folder: Path, step: int):
        header = read_header(folder, step)
        return {**header, name: "changed"} if step == before.step else header

    monkeypatch.setattr(deltas, "read_header", read_changed_header)
    train(Mesh(), run, published, {"train.max_steps": 8})
    current = read_current(published)
    assert (before.step, current.step, len(current.bases)) == (4, 8, 2)
    assert current.bases[-1].number == current.number
    assert not (published / delta_file_name(current.number)).exists()


def test_two_models_are_not_mixed_up(tmp_path):
    published, other = tmp_path / "published", tmp_path / "other"
    train(Mesh(), tmp_path / "one", published, {"train.max_steps": 4})
    train(Mesh(), tmp_path / "two", other, {"train.max_steps": 8, "train.seed": 1})
    with pytest.raises(ConfigError, match="a folder of its own"):
        train(Mesh(), tmp_path / "two", published, {"train.max_steps": 12, "train.seed": 1})
    with Predictor.open(published) as predictor:
        for path in other.iterdir():
            if path.is_file():
                (published / path.name).write_bytes(path.read_bytes())
        with pytest.raises(CheckpointError, match="wanted run"):
            predictor.refresh()
        assert predictor.step == 4
    with pytest.raises(CheckpointError, match="wanted one that is published still: none"):
        Predictor.open(published, at=4)
    export_run(tmp_path / "one", tmp_path / "export")
    with Predictor.open(tmp_path / "export") as predictor:
        with pytest.raises(ConfigError, match="is no publication"):
            predictor.follow()


def test_a_run_that_went_back_is_followed(tmp_path):
    """Checkpoints that were given up and made anew under other settings: what was published of them is taken back
    whole."""
    folder, published, samples = tmp_path / "run", tmp_path / "published", batches({})
    train(Mesh(), folder, published, {})
    config = override_settings(
        build_config(CONFIG),
        {**STEPS, "train.publish": str(published), "dense.lr": 0.1, "train.max_steps": 12},
    )
    with Predictor.open(published) as predictor:
        run = open_run(config, Mesh(), folder, at=4, data=opened(config))
        run.train()
        run.close()
        assert predictor.refresh() > 0 and predictor.step == 12
        expected = wanted(folder, 12, samples, tmp_path / "out")
        assert equal(scores(predictor, samples), expected)
        shutil.rmtree(published)  # begun anew, with other numbers
        deltas.DeltaPublisher(folder, published, Disk()).send(8, [8], print)
        assert predictor.refresh() < 0 and predictor.step == 8
        expected = wanted(folder, 8, samples, tmp_path / "eight")
        assert equal(scores(predictor, samples), expected)


def test_a_publication_that_was_removed_and_overtook_its_followers(tmp_path):
    """Numbers begin anew with the folder, so a change of the number that comes next may be of other checkpoints."""
    folder, published, samples = tmp_path / "run", tmp_path / "published", batches({})
    train(Mesh(), folder, tmp_path / "unused", {})
    steps = list_checkpoints(folder)
    writer = deltas.DeltaPublisher(folder, published, Disk())
    for step in steps[:2]:
        writer.send(step, steps, print)
    with Predictor.open(published) as predictor:
        assert predictor.step == steps[1]
        shutil.rmtree(published)
        for step in steps[1:]:
            writer.send(step, steps, print)
        predictor.refresh()
        assert predictor.step == steps[-1]
        expected = wanted(folder, steps[-1], samples, tmp_path / "out")
        assert equal(scores(predictor, samples), expected)


def test_a_disk_with_room_for_changes_only(tmp_path, monkeypatch):
    """A base that cannot be written holds no change back; a killed writer's half of one is cleared away."""
    monkeypatch.setattr(deltas, "MIN_BYTES_FOR_BASE", 1)
    folder, published, samples = tmp_path / "run", tmp_path / "published", batches({})
    train(Mesh(), folder, tmp_path / "unused", {})
    steps = list_checkpoints(folder)
    writer = deltas.DeltaPublisher(folder, published, Disk())
    writer.send(steps[0], steps, print)
    whole = read_current(published).bases[0].num_bytes
    full = StorageError(28, "No space left on device")

    def no_room(*_, **__):
        raise full

    with monkeypatch.context() as disk, Predictor.open(published) as predictor:
        disk.setattr(deltas, "export_run", no_room)
        for step in steps[1:]:
            writer.send(step, steps, print)
            grown = read_current(published).change_bytes
            assert (writer.problem is full) == (grown > whole)
            predictor.refresh()
            assert predictor.step == step
        assert writer.problem is full
        expected = wanted(folder, steps[-1], samples, tmp_path / "out")
        assert equal(scores(predictor, samples), expected)
    residuals = published / ".base-000000000009-0123456789abcdef.4711.tmp"
    residuals.mkdir()
    writer._write_current(writer._export_new_base(read_current(published)))
    assert not residuals.exists() and len(read_current(published).bases) == 2


class Dead(StorageError):
    pass


class DyingDisk(Disk):
    """Does nothing any more from change number `dies_at` on, as after SIGKILL."""

    def __init__(self, dies_at: int) -> None:
        self.remaining = dies_at

    def perform(self, change, action):
        self.remaining -= 1
        if self.remaining <= 0:
            raise Dead(change.verb)
        return action()


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_writer_that_dies_at_any_change_is_made_up_for(stride, tmp_path, monkeypatch):
    """One whole checkpoint is visible at every moment; the next writer publishes the missing ones."""
    monkeypatch.setattr(deltas, "MIN_BYTES_FOR_BASE", 8000)  # two changes and a base are cut
    folder, samples = tmp_path / "run", batches({})[:3]
    train(Mesh(), folder, tmp_path / "unused", {"train.max_steps": 12})
    steps = list_checkpoints(folder)
    dies_at, survived = 1 - stride, False
    while not survived:
        dies_at += stride
        published = tmp_path / f"published-{dies_at}"
        writer = deltas.DeltaPublisher(folder, published, DyingDisk(dies_at))
        for step in steps:
            if writer.problem is None:
                writer.send(step, steps, lambda _: None)
        survived = writer.problem is None
        is_published = (published / CURRENT).exists()
        predictor = Predictor.open(published) if is_published else None
        if predictor is not None:
            expected = wanted(folder, predictor.step, samples, tmp_path / str(predictor.step))
            assert equal(scores(predictor, samples), expected)
        again = deltas.DeltaPublisher(folder, published, Disk())
        again.send(steps[-1], steps, lambda _: None)
        assert again.problem is None
        if predictor is not None:
            predictor.refresh()
        with predictor or Predictor.open(published) as following:
            assert following.step == steps[-1]
            assert equal(scores(following, samples), wanted(folder, 12, samples, tmp_path / "12"))
    assert dies_at > 20


def test_a_url_is_followed_as_a_folder_is(tmp_path, monkeypatch):
    """Written and read by URL: changes, bases, a reader that begins again on its copy, a source that goes away."""
    monkeypatch.setattr(deltas, "MIN_BYTES_FOR_BASE", 8000)
    folder, url, copy = tmp_path / "run", f"memory://{tmp_path}/live", tmp_path / "copy"
    samples = batches({})[:3]
    train(Mesh(), folder, url, {"train.max_steps": 4})
    with pytest.raises(ConfigError, match="copy=folder"):
        Predictor.open(url)
    with Predictor.open(url, copy=copy) as predictor:
        steps_seen = [predictor.step]
        for steps in (8, 12):
            train(Mesh(), folder, url, {"train.max_steps": steps})
            assert predictor.refresh() == 1 and predictor.refresh() == 0
            steps_seen.append(predictor.step)
            expected = wanted(folder, steps, samples, tmp_path / str(steps))
            assert steps_seen[-1] == steps and equal(scores(predictor, samples), expected)
            with Predictor.open(url, copy=copy) as again, Predictor.open(copy) as beside:
                assert equal(scores(again, samples), expected) and equal(
                    scores(beside, samples), expected
                )
        with pytest.raises(ConfigError, match="a folder of its own"):
            train(Mesh(), tmp_path / "three", url, {"train.max_steps": 4, "train.seed": 1})
        assert not list((tmp_path / "three").rglob("rank-0"))  # nothing was trained for it
        place = delivery.open_location(url)
        names = {os.path.basename(path) for path in place.files.ls(place.root, detail=False)}
        assert CURRENT in names <= {path.name for path in (folder / "published").iterdir()}
        word = place.path(CURRENT)
        content = place.files.cat_file(word)
        place.files.pipe_file(word, content[:-3])
        with pytest.raises(CorruptionError, match=CURRENT):
            predictor.refresh()
        delivery.copy_publication(
            delivery.open_location(folder / "published"), place
        )  # as at the next checkpoint
        assert place.files.cat_file(word) == content
        (copy / CURRENT).write_bytes(content[:-3])
        assert predictor.refresh() == 0 and (copy / CURRENT).read_bytes() == content
        place.files.rm(word)
        with pytest.raises(CheckpointError, match="holds no publication"):
            predictor.refresh()
        assert predictor.step == 12 and equal(scores(predictor, samples), expected)
    train(Mesh(), tmp_path / "two", tmp_path / "other", {"train.max_steps": 4, "train.seed": 1})
    with pytest.raises(ConfigError, match="a folder of its own"):
        delivery.copy_publication(
            delivery.open_location(tmp_path / "other"), delivery.open_location(copy)
        )
    (copy / CURRENT).write_bytes(content[:-3])  # whose it was, its bases say
    before = sorted(copy.iterdir())
    with pytest.raises(CorruptionError, match=CURRENT):
        delivery.copy_publication(
            delivery.open_location(tmp_path / "other"), delivery.open_location(copy)
        )
    assert sorted(copy.iterdir()) == before


@pytest.mark.slow
def test_a_killed_run_goes_on_publishing(tmp_path):
    """SIGKILL of the whole process before a change of the disk."""
    samples = batches({})
    settings = {**STEPS, "train.keep_checkpoints": 2, "train.max_steps": 12}
    small_run = Path(__file__).parents[1] / "faults" / "small_run.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": "0"}
    folder, published = tmp_path / "run", tmp_path / "published"
    message = json.dumps({**settings, "train.publish": str(published)})
    for kill_at in (60, 80, 80, 0):
        command = [sys.executable, str(small_run), str(folder), message, str(kill_at)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stderr
        if (published / CURRENT).exists():
            with Predictor.open(published) as predictor:
                step = predictor.step
                expected = wanted(folder, step, samples, tmp_path / f"{kill_at}-{step}")
                assert equal(scores(predictor, samples), expected)
    assert step == 12


def test_follows_by_itself_while_the_run_goes_on(tmp_path, monkeypatch):
    """Within a second or so of a checkpoint by the clock, in a thread, with calls in another."""
    folder, published, samples = tmp_path / "run", tmp_path / "published", batches({})
    train(Mesh(), folder, published, {"train.max_steps": 4})
    with Predictor.open(published) as predictor:
        predictor.follow(0.02)
        clock = {"train.checkpoint_steps": 0, "train.checkpoint_seconds": 0.05, "train.epochs": 8}
        trained = threading.Thread(target=train, args=(Mesh(), folder, published, clock))
        trained.start()
        steps_seen = {4}
        while trained.is_alive():
            predictor(samples[0])
            steps_seen.add(predictor.step)
        trained.join()
        deadline = time.monotonic() + 10
        while (
            predictor.step < (step := list_checkpoints(folder)[-1]) and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert predictor.problem is None and len(steps_seen) > 2
        expected = wanted(folder, step, samples, tmp_path / "out")
        assert equal(scores(predictor, samples), expected)
        monkeypatch.setattr(delivery, "read_current", refused)
        while predictor.problem is None and time.monotonic() < deadline + 10:
            time.sleep(0.02)
        assert isinstance(predictor.problem, PermissionError)
        monkeypatch.undo()
        while predictor.problem is not None and time.monotonic() < deadline + 10:
            time.sleep(0.02)
        (published / CURRENT).write_bytes(b"torn")
        while predictor.problem is None and time.monotonic() < deadline + 10:
            time.sleep(0.02)
        assert isinstance(predictor.problem, ColonnadeError) and CURRENT in str(predictor.problem)
        assert "remove the publication's folder" in str(predictor.problem)
        assert equal(scores(predictor, samples), expected)


def without_bases(word: dict) -> None:
    word["bases"] = []


def with_a_field(word: dict) -> None:
    word["more"] = 1


def with_a_word_for_a_number(word: dict) -> None:
    word["number"] = "7"


def without_a_run(word: dict) -> None:
    del word["run"]


def of_format_one(word: dict) -> None:
    word["version"] = 1


def test_no_damage_ends_a_follower(snapshots, tmp_path, monkeypatch):
    """Named, counted and tried again; it goes on when the publication is right again."""
    folder, live = tmp_path / "run", tmp_path / "live"
    train(Mesh(), folder, tmp_path / "published", {"train.max_steps": 12})
    steps = list_checkpoints(folder)
    lay(snapshots[steps[0]], live)
    with Predictor.open(live) as predictor:
        predictor.follow(0.01)
        for damage in (
            without_bases, with_a_field, with_a_word_for_a_number, without_a_run, of_format_one, None,
        ):  # fmt: skip
            failures = predictor.num_failures
            word = json.loads(read_verified(live / CURRENT))
            content = (live / CURRENT).read_bytes()
            if damage is None:
                monkeypatch.setattr(delivery, "read_current", panics)
            else:
                damage(word)
                write_durably(Disk(), live / CURRENT, json.dumps(word).encode())
            wait_until(lambda before=failures: predictor.num_failures > before + 1)
            problem = predictor.problem
            assert isinstance(problem, Panic if damage is None else ColonnadeError)
            assert damage is None or CURRENT in str(problem)
            monkeypatch.setattr(delivery, "read_current", read_current)
            (live / f"{CURRENT}.new").write_bytes(content)
            os.replace(live / f"{CURRENT}.new", live / CURRENT)
            wait_until(lambda: predictor.problem is None)
        assert predictor.step == steps[0]
        flipped = dict(snapshots[steps[1]])
        name = delta_file_name(1)
        flipped[name] = flipped[name][:90] + bytes([flipped[name][90] ^ 1]) + flipped[name][91:]
        lay(flipped, live)
        wait_until(lambda: predictor.problem is not None)
        assert name in str(predictor.problem) and predictor.step == steps[0]
        lay(snapshots[steps[-1]], live)
        wait_until(lambda: predictor.step == steps[-1])
        expected = wanted(folder, steps[-1], batches({})[:2], tmp_path / "out")
        assert equal(scores(predictor, batches({})[:2]), expected)


def flip(path: Path) -> bytes:
    """Flip a bit in the middle of a file; return what it was."""
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    return content


def damaged_files(published: Path) -> set[Path]:
    return {file.path for file in verify_publication(published) if file.problem}


def rewrite(published: Path, change) -> None:
    """Change the fields of the pointer, with a checksum that fits."""
    word = json.loads(read_verified(published / CURRENT))
    change(word)
    write_durably(Disk(), published / CURRENT, json.dumps(word).encode())


@pytest.fixture(scope="module")
def two_bases(tmp_path_factory):
    """A publication with changes after each of two bases."""
    place = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        send = deltas.DeltaPublisher.send

        def send_with_bases(self, step, retained, say):
            current = read_current(self.folder)
            least = 1 << 40 if current is not None and len(current.bases) > 1 else 1
            patch.setattr(deltas, "MIN_BYTES_FOR_BASE", least)
            send(self, step, retained, say)

        patch.setattr(deltas.DeltaPublisher, "send", send_with_bases)
        settings = {"train.checkpoint_steps": 2, "train.publish_at": "last"}
        train(Mesh(), place / "run", place / "published", settings)
    current = read_current(place / "published")
    assert (
        len(current.bases) == 2
        and current.bases[0].number < current.bases[1].number < current.number
    )
    return place / "published"


def test_verify_reads_each_step_that_is_published(two_bases, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(two_bases, published)
    current = read_current(published)
    files = {path for path in published.rglob("*") if path.is_file()}
    assert {file.path for file in verify_publication(published)} == files
    assert not damaged_files(published)
    for path in files - {published / CURRENT}:
        content = flip(path)
        assert path in damaged_files(published), path
        path.unlink()
        # A missing change of an older base ends what is offered from there.
        is_needed = "base" in path.parent.name or path.name > delta_file_name(
            current.bases[1].number
        )
        assert (path in damaged_files(published)) == is_needed, path
        path.write_bytes(content)
    assert not damaged_files(published)
    # A follower's copy may lack an older base, and what leads from there to the newest.
    shutil.rmtree(published / current.bases[0].folder)
    assert not damaged_files(published)
    assert (
        min(delivery.list_published_steps(published, current).values()) == current.bases[1].number
    )


def test_a_step_behind_a_missing_change_is_not_offered(two_bases, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(two_bases, published)
    current = read_current(published)
    numbers = set(delivery.list_published_steps(published, current).values())
    missing = current.bases[1].number + 1
    (published / delta_file_name(missing)).unlink()
    offered = delivery.list_published_steps(published, current)
    assert set(offered.values()) == {number for number in numbers if number < missing}
    assert published / delta_file_name(missing) in damaged_files(published)


def swap_tag(word: dict) -> None:
    word["tag"] = "0123456789abcdef"


def at_the_base(word: dict) -> None:
    word["number"] = word["bases"][-1]["number"]


def behind_the_base(word: dict) -> None:
    word["number"] = word["bases"][-1]["number"] - 1


def far_ahead(word: dict) -> None:
    word["number"] = 10**15


@pytest.mark.timeout(20)
@pytest.mark.parametrize("forge", [swap_tag, at_the_base, behind_the_base])
def test_forged_pointers_end_in_an_error(forge, two_bases, tmp_path):
    """Followers stay at their checkpoint, and go on when the pointer is right again."""
    published = tmp_path / "published"
    shutil.copytree(two_bases, published)
    content, step = (published / CURRENT).read_bytes(), read_current(published).step
    with Predictor.open(published) as predictor:
        rewrite(published, forge)
        for _ in range(2):
            with pytest.raises((CorruptionError, CheckpointError)):
                predictor.refresh()
        with pytest.raises((CorruptionError, CheckpointError)):
            Predictor.open(published)
        with pytest.raises((CorruptionError, CheckpointError)):
            refuse(published)
        os.replace(write_beside(published / CURRENT, content), published / CURRENT)
        predictor.refresh()
        assert predictor.step == step


@pytest.mark.timeout(20)
def test_a_pointer_with_a_number_far_ahead_is_not_counted_up_to(two_bases, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(two_bases, published)
    number = read_current(published).number
    steps = delivery.list_published_steps(published, read_current(published))
    rewrite(published, far_ahead)
    assert damaged_files(published) == {published / delta_file_name(number + 1)}
    assert delivery.list_published_steps(published, read_current(published)) == steps


def refuse(published: Path) -> None:
    if damaged_files(published):
        raise CorruptionError("damaged")


def write_beside(path: Path, content: bytes) -> Path:
    beside = path.with_name(f"{path.name}.beside")
    beside.write_bytes(content)
    return beside


def test_a_change_of_another_checkpoint_is_named(two_bases, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(two_bases, published)
    current = read_current(published)
    first, last = current.bases[1].number + 1, current.number
    assert first < last
    (published / delta_file_name(first)).write_bytes(
        (published / delta_file_name(last)).read_bytes()
    )
    assert published / delta_file_name(first) in damaged_files(published)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t["rows/0/weights"].fill_(float("nan")),
        lambda t: t["rows/0/gone"].copy_(t["rows/0/ids"][:1]),
    ],
)
def test_a_change_that_no_run_writes_is_refused(damage, tmp_path):
    tensors = {
        "rows/0/ids": torch.tensor([1, 5]),
        "rows/0/weights": torch.ones(2, 4),
        "rows/0/gone": torch.tensor([2]),
        "dense/bias": torch.zeros(3),
    }
    header = {"run": "r", "number": 1, "before": "a", "tag": "b", "step": 2}

    def write():
        content = save(tensors, metadata={"change": json.dumps(header)})
        write_durably(Disk(), tmp_path / delta_file_name(1), content)

    write()
    assert read_delta(tmp_path, 1).header.step == 2
    damage(tensors)
    write()
    with pytest.raises(CorruptionError, match=r"no change of a publication .*(NaN|gone)"):
        read_delta(tmp_path, 1)


def test_a_copy_that_is_damaged_under_a_follower_heals(tmp_path):
    """Base is cut short while rows of it are mapped: no score until it was carried again."""
    folder, published, copy = tmp_path / "run", tmp_path / "published", tmp_path / "copy"
    train(Mesh(), folder, published, {"train.max_steps": 8})
    samples = batches({})[:2]
    with Predictor.open(f"file://{published}", copy=copy) as predictor:
        reported = scores(predictor, samples)
        predictor.rows._scrub.join()
        victim = predictor.rows.tables[3].file.path
        os.truncate(victim, 0)
        with pytest.raises(CorruptionError, match=victim.name):
            scores(predictor, samples)
        assert victim.name in str(predictor.problem)
        predictor.refresh()
        assert predictor.problem is None and equal(scores(predictor, samples), reported)


def test_a_base_that_was_checked_is_not_checked_again(tmp_path, monkeypatch):
    small_blocks(monkeypatch)
    folder, published = tmp_path / "run", tmp_path / "published"
    train(Mesh(), folder, published, {"train.max_steps": 4})
    with Predictor.open(published, verify="full") as predictor:
        before = predictor.rows.tables
        assert all(table.file.file.checked.all() for table in before)
        monkeypatch.setattr(CheckedFile, "check_block", None)
        predictor._subscriber.mark_base_damaged()
        predictor.refresh()
        assert predictor.rows.tables is not before
        assert all(table.file.file.checked.all() for table in predictor.rows.tables)


def wait_until(is_done) -> None:
    deadline = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Panic(BaseException):
    """Panic as libraries in Rust raise it: no Exception."""


def panics(folder):
    raise Panic("of a library")


def refused(folder):
    raise PermissionError(13, "Permission denied", str(folder))
