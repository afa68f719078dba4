"""Ranks that differ in their calls are caught, and the callers of both are named."""

from __future__ import annotations

import call_records
import pytest
import ranks
import torch
from call_records import END, find_differences
from ranks import run_ranks

from colonnade import Mesh
from colonnade.comm.mesh import Scope

SUM, GATHER = "all_reduce float32 x 4", "all_gather int64 x 1"


def write(folder, **calls: list[tuple[str, str] | str]) -> list[str]:
    """Write the calls of ranks r0, r1, ... of one world, each a channel and an operation; return the differences."""
    for name, lines in calls.items():
        text = "".join(
            f"{line}\n" if isinstance(line, str) else f"1\t0,1\t{line[0]}\t{line[1]}\tfile.py:{at}\n"
            for at, line in enumerate(lines, 1)
        )  # fmt: skip
        (folder / f"11-12 {name[1:]}").write_text(text)
    return find_differences(folder)


def test_calls_are_compared_in_the_order_of_each_channel(tmp_path):
    push, dense = ("push", SUM), ("dense", SUM)
    assert write(tmp_path, r0=[push, dense, push, END], r1=[dense, push, push, END]) == []
    (text,) = write(tmp_path, r0=[push, dense, END], r1=[("push", GATHER), dense, END])
    assert "ranks [0, 1] differ in call 1 of channel 'push'" in text
    assert f"rank 0:\n    1. {SUM} from file.py:1\n" in text
    assert f"rank 1:\n    1. {GATHER} from file.py:1" in text


def test_a_rank_may_be_behind_until_both_have_ended(tmp_path):
    push = "push", SUM
    assert write(tmp_path, r0=[push, push], r1=[push]) == []
    assert write(tmp_path, r0=[push, push, END], r1=[push]) == []  # the other one was killed
    (tmp_path / "11-12 1").open("a").write("1\t0,1\tpush\tall_")  # while it wrote this
    assert find_differences(tmp_path) == []
    (text,) = find_differences(tmp_path, are_stuck=True)
    assert "call 2" in text and "rank 1: made no such call\n    1. " in text
    (text,) = write(tmp_path, r0=[push, END], r1=[END])
    assert "rank 1: made no such call" in text


def test_ranks_that_are_started_again_are_another_world(tmp_path):
    write(tmp_path, r0=[("push", SUM)], r1=[("push", SUM)])
    (tmp_path / "13-14 0").write_text(f"1\t0,1\tpush\t{GATHER}\tfile.py:1\n")
    assert find_differences(tmp_path) == []


def call_on_rank_0(mesh: Mesh) -> None:
    if mesh.rank == 0:
        mesh.all_to_all("push", torch.zeros(2), [1, 1], [1, 1], wait=False)


def gather_on_rank_0(mesh: Mesh) -> None:
    """Rank 0 makes a call more: a gather meets the other ranks' sum."""
    if mesh.rank == 0:
        mesh.all_gather("control", torch.zeros(1))
    mesh.all_reduce("control", torch.zeros(3))


def gather_in_the_second_block(mesh: Mesh) -> None:
    from colonnade.comm.process_groups import open_tower_scopes

    open_tower_scopes(mesh, 2)
    send = torch.zeros(2)
    for _ in range(2 if mesh.rank == 3 else 1):
        mesh.all_to_all("fetch", send, [1, 1], [1, 1], scope=Scope(2), wait=False)


@pytest.mark.parametrize(
    ("function", "num_ranks", "words"),
    [
        (call_on_rank_0, 2, ["rank 1: made no such call", ". all_to_all_single from"]),
        (gather_on_rank_0, 2, [". all_gather float32 x 1 from", ". all_reduce float32 x 3 from"]),
        (gather_in_the_second_block, 4, ["ranks [2, 3] differ in call 2", "rank 2: made no such"]),
    ],
)
def test_ranks_that_differ_fail(function, num_ranks, words, monkeypatch):
    monkeypatch.setattr(ranks, "FIRST_CHECK_SECONDS", 0.5)
    with pytest.raises(AssertionError) as error:
        run_ranks(num_ranks, function, timeout=60, fresh=True)
    for word in [*words, f"{__file__}:"]:
        assert word in str(error.value)


def test_what_children_leave_is_compared_after_each_test():
    folder = call_records.children_folder()
    write(folder, r0=[("push", SUM), END], r1=[("push", GATHER), END])
    with pytest.raises(AssertionError, match="differ in call 1 of channel 'push'"):
        call_records.check_children()
    assert list(folder.iterdir()) == []
