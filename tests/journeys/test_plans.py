"""Runs with rows on disk, servers, late reads, cached rows and readers: killed, and resumed to the same bits."""

from __future__ import annotations

import pytest
from click_files import write_shop
from shell import Process

TRAIN = "colonnade train clicks.yaml --run"
LATE = "--set plan.staleness_steps=3"


@pytest.mark.slow
@pytest.mark.budget(80)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(LATE, id="late reads"),
        pytest.param("--set plan.cache.size=40 --set plan.cache.staleness=10", id="cached rows"),
        pytest.param("--set data.readers=1 --dram 6KiB", id="readers, rows on disk"),
        pytest.param("--set plan.exchange=pooled --set plan.sharding=table_wise", id="pooled"),
    ],
)
def test_killed_run_resumes_to_the_same_bits_on_two_ranks(shell, settings):
    write_shop(shell)
    shell.run(f"{TRAIN} whole --ranks 2 {settings}")
    shell.stop_training(f"{TRAIN} run --ranks 2 {settings}", "run")
    shell.resume(f"{TRAIN} run --ranks 2 {settings}", "run")
    shell.check_same_metrics("whole", "run")


@pytest.mark.slow
@pytest.mark.budget(50)
def test_rows_on_disk_have_the_bits_of_rows_in_memory(shell):
    """Each call has another budget of memory, and the second one another folder of rows."""
    write_shop(shell)
    shell.run(f"{TRAIN} whole")
    shell.stop_training(f"{TRAIN} run --dram 4KiB", "run")
    shell.stop_training(f"{TRAIN} run --dram 6KiB --set plan.memory.ssd=rows", "run")
    output = shell.resume(f"{TRAIN} run --dram 4KiB", "run")
    assert "read from files" in output, output
    shell.run("colonnade verify run")
    shell.check_same_metrics("whole", "run")


@pytest.mark.slow
@pytest.mark.budget(150)
def test_servers_store_the_rows_of_two_trainers(shell):
    """The bits are those of two ranks without a server. The run goes on without servers, and then with two.

    The last pass over the test part is shared by all ranks, servers too: in parts of other sizes, so equal to rounding.
    """
    write_shop(shell)
    shell.run(f"{TRAIN} whole --ranks 2")
    one = f"{TRAIN} run --ranks 3 --set plan.servers=1"
    shell.stop_training(one, "run")
    shell.stop_training(one, "run", Process.press_ctrl_c)
    shell.stop_training(f"{TRAIN} run --ranks 2 --set plan.servers=0", "run")
    shell.resume(f"{TRAIN} run --ranks 4 --set plan.servers=2 --dram 6KiB", "run")
    shell.run("colonnade verify run")
    shell.check_same_scores("whole", "run")
    shell.check_equal_losses("whole", "run", 1e-8)


@pytest.mark.slow
@pytest.mark.budget(150)
def test_trainers_with_cached_rows_beside_a_server(shell):
    """The bits are those of two ranks with caches and no server. Killed, interrupted and resumed, it predicts."""
    write_shop(shell)
    cached = "--set plan.cache.size=40 --set plan.cache.staleness=10"
    shell.run(f"{TRAIN} whole --ranks 2 {cached}")
    roles = f"{TRAIN} run --ranks 3 --set plan.servers=1 {cached} --dram 6KiB"
    shell.stop_training(roles, "run")
    shell.stop_training(roles, "run", Process.press_ctrl_c)
    shell.resume(roles, "run")
    shell.run("colonnade verify run")
    shell.check_same_scores("whole", "run")
    shell.check_equal_losses("whole", "run", 1e-8)


@pytest.mark.slow
@pytest.mark.budget(80)
def test_late_reads_move_to_another_number_of_ranks(shell):
    """Reads three steps late are as late on one rank as on two, before and after the move."""
    write_shop(shell)
    shell.run(f"{TRAIN} whole {LATE}")
    shell.stop_training(f"{TRAIN} run --ranks 2 {LATE}", "run")
    shell.stop_training(f"{TRAIN} run {LATE}", "run")
    shell.resume(f"{TRAIN} run --ranks 3 {LATE}", "run")
    shell.check_equal_losses("whole", "run")


@pytest.mark.slow
@pytest.mark.budget(150)
def test_interrupted_run_of_all_roles_resumes(shell):
    """Two trainers with late reads and reader processes, and a server with rows on disk: Ctrl-C, then SIGTERM."""
    write_shop(shell)
    roles = (
        "--ranks 3 --set plan.servers=1 --set data.readers=1 --dram 8KiB "
        "--set plan.staleness_steps=2 --set plan.tables.item.staleness_steps=0"
    )
    shell.run(f"{TRAIN} whole {roles}")
    shell.stop_training(f"{TRAIN} run {roles}", "run", Process.press_ctrl_c)
    shell.stop_training(f"{TRAIN} run {roles}", "run", Process.terminate)
    shell.resume(f"{TRAIN} run {roles}", "run")
    shell.check_same_metrics("whole", "run")
