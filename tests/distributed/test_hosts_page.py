"""docs/howto/hosts.md: what it says to type is typed here, on two namespaces; scripts have the right form."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from hosts_here import PATHS, ROOT, need_hosts, open_hosts
from torch.distributed.run import get_args_parser

from colonnade.config.run import build_config

PAGE = (ROOT / "docs" / "howto" / "hosts.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


def block(title: str, language: str = "") -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section(title), re.DOTALL | re.MULTILINE)
    (results,) = [text for kind, text in blocks if kind == language]
    return results


def torchrun_arguments(words: list[str]):
    """Parse arguments as torchrun does; it ends the process where it cannot."""
    return get_args_parser().parse_args(words)


def check_command(result) -> None:
    assert result.rdzv_backend == "static" and result.rdzv_endpoint.endswith(":29400")
    assert result.module and result.training_script == "colonnade"
    assert result.training_script_args == ["train", "clicks.yaml", "--run", "runs/clicks"]


def test_what_is_typed_on_two_hosts():
    """The form of it; `test_what_is_typed_on_two_hosts_trains_one_model` types it, and takes long."""
    build_config(yaml.safe_load(block("By hand", "yaml")))
    lines = block("By hand").replace("\\\n", " ").replace("$NODE", "1").splitlines()
    (words,) = [shlex.split(line) for line in lines if line.startswith("torchrun ")]
    result = torchrun_arguments(words[1:])
    assert (result.nnodes, result.nproc_per_node, result.node_rank) == ("2", "2", 1)
    check_command(result)


@pytest.mark.slow
def test_what_is_typed_on_two_hosts_trains_one_model(tmp_path):
    need_hosts()
    (tmp_path / "clicks.yaml").write_text(block("By hand", "yaml"), encoding="utf-8")
    torchrun = tmp_path / "bin" / "torchrun"  # this interpreter's, wherever its scripts are
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    place = f"{torchrun.parent}{os.pathsep}{os.environ['PATH']}"
    with open_hosts(2) as hosts:
        started = [
            hosts.start(
                h,
                ["bash", "-euc", block("By hand").replace("NODE=0", f"NODE={h}")],
                env={**PATHS, "PATH": place, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for h in range(2)
        ]
        output = [process.communicate(timeout=100)[0] for process in started]
        carried = min(link.sent for link in hosts.uplinks())
    assert [process.returncode for process in started] == [0, 0], output[0][-2000:]
    summary = json.loads((tmp_path / "runs" / "clicks" / "summary.json").read_text())
    assert summary["num_ranks"] == 4 and summary["steps"] == 20 and carried > 100_000
    # Rank 0 says what came of it, on the first host; nobody else does.
    assert sum("auc" in words for words in output) == 1


def test_the_command_for_ranks_of_rows_only():
    words = shlex.split(block("Ranks for rows only").replace("\\\n", " ").replace("$NODE", "1"))
    assert words[0] == "torchrun"
    result = torchrun_arguments(words[1:])
    assert (result.nnodes, result.nproc_per_node) == ("2", "6")
    assert result.training_script_args[-2:] == ["--set", "plan.servers=2"]
    result.training_script_args = result.training_script_args[:-2]
    check_command(result)


def test_the_slurm_script():
    script = block("Slurm")
    assert script.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    command = script.replace("\\\n", " ").split("srun ")[1]
    values = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "HEAD": "node1"}
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: values[name[1]], command))
    assert words[1:3] == ["bash", "-c"], "each task expands its own node's number"
    words = shlex.split(words[3])
    assert words[:2] == ["exec", "torchrun"], "SIGTERM reaches torchrun"
    result = torchrun_arguments(words[2:])
    assert result.node_rank == 1
    check_command(result)
    requested = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert result.nnodes == requested["nodes"] and requested["ntasks-per-node"] == "1"
    assert int(result.nproc_per_node) <= int(requested["cpus-per-task"])


def test_the_kubernetes_file():
    service, job = yaml.safe_load_all(block("Kubernetes", "yaml"))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None", "headless: else pods have no names"
    wanted, pod = job["spec"], job["spec"]["template"]
    assert wanted["completionMode"] == "Indexed"
    assert wanted["parallelism"] == wanted["completions"], "all pods at once, or none trains"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["restartPolicy"] in ("OnFailure", "Never"), "what a Job takes"
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    assert all(isinstance(word, str) for word in container["args"])
    index = "$(JOB_COMPLETION_INDEX)"  # an Indexed Job sets it in every pod
    assert f"--node-rank={index}" in container["args"]
    result = torchrun_arguments([word.replace(index, "1") for word in container["args"]])
    check_command(result)
    assert result.nnodes == str(wanted["completions"])
    # A pod of an Indexed Job is called <job>-<index>, its domain is what the Service is called.
    host = f"{job['metadata']['name']}-0.{pod['spec']['subdomain']}"
    assert (
        result.rdzv_endpoint == f"{host}:29400"
        and pod["spec"]["subdomain"] == service["metadata"]["name"]
    )
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["port"] == port["containerPort"] == 29400
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
