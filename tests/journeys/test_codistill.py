"""Two groups of one command: stopped, killed and continued, they have the bits of a pair that nobody disturbed."""

from __future__ import annotations

import os
import signal

import pytest
from click_files import CONFIG, LAST_STEP, write_shop
from shell import Process, Shell

TRAIN = "colonnade train pair.yaml --run run"


def write_pair(shell: Shell, **settings: object) -> None:
    """Write the files of a shop, and pair.yaml with two groups. settings: of train.codistill."""
    write_shop(shell)
    words = "".join(f", {name}: {value}" for name, value in settings.items())
    codistill = f"codistill: {{groups: 2, every_steps: 25{words}}}"
    shell.write("pair.yaml", CONFIG.replace("train: {", f"train: {{{codistill}, "))


def kill_group(shell: Shell) -> str:
    """Kill group 1 some steps after the start, as by a system without memory; return what the command printed."""
    process = shell.start_training(TRAIN, "run/group-1")
    os.kill(process.list_workers()[-1], signal.SIGKILL)
    output = process.wait(status=2)
    assert "group 1 with status -9" in output and "train again with --run run" in output, output
    return output


@pytest.mark.slow
@pytest.mark.budget(200)
def test_pair_survives_ctrl_c_and_a_killed_group(shell):
    """Two commands that name each other's folders train the same pair."""
    write_pair(shell)
    shell.run("colonnade train pair.yaml --run whole")
    shell.stop_training(TRAIN, "run/group-1", Process.press_ctrl_c)
    kill_group(shell)
    newest = [shell.list_checkpoints(f"run/group-{group}")[-1] for group in (0, 1)]
    assert max(newest) < LAST_STEP
    output = shell.run("colonnade train --run run")
    assert f"resuming run/group-0 at step {newest[0]}" in output, output
    by_hand = (
        "colonnade train pair.yaml --set train.codistill.groups=1 --set train.codistill.peer=../"
    )
    processes = [
        shell.start(f"{by_hand}{peer} --seed {seed} --run {run}")
        for seed, (run, peer) in enumerate((("a", "b"), ("b", "a")))
    ]
    for process in processes:
        process.wait()
    for group, run in enumerate("ab"):
        shell.run(f"colonnade verify run/group-{group}")
        shell.check_same_metrics(f"whole/group-{group}", f"run/group-{group}")
        shell.check_same_metrics(f"whole/group-{group}", run)
    shell.check_same_scores("whole/group-1", "run/group-1")
    assert "one of its groups, whole/group-0" in shell.run("colonnade evaluate whole", status=2)


@pytest.mark.slow
@pytest.mark.budget(100)
def test_a_group_goes_on_alone_and_the_other_one_follows(shell):
    write_pair(shell, on_lost="alone")
    shell.write("pair.yaml", (shell.folder / "pair.yaml").read_text().replace("120", "3"))
    assert "Training continues on the labels alone" in kill_group(shell)
    assert shell.list_checkpoints("run/group-0")[-1] == LAST_STEP
    shell.run(TRAIN)
    assert shell.read_summary("run/group-1")["step"] == LAST_STEP
