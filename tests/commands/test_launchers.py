"""Runs that torchrun and srun start: they train on two nodes, stop in order, and resume."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from started_runs import Nodes, statement, steps_in_journals

ROOT = Path(__file__).parents[2]
# Long enough that a signal comes before the end.
EPOCHS = 7
STEPS = EPOCHS * 3  # round(1437 / 512) in each
FIT = [
    *("--config", str(ROOT / "configs" / "digits.yaml"), "--trainer.accelerator", "cpu"),
    *("--trainer.max_epochs", str(EPOCHS), "--trainer.enable_progress_bar", "false", "--privacy.accountant", "rdp"),
]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def tool(folder, name, text):
    """A program that stands in for one that is not here."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def place(tmp_path, warm_python):
    """A folder with the programs that the image and the package install."""
    for name, module in {"dpl": "dp_lightning", "torchrun": "torch.distributed.run"}.items():
        tool(tmp_path, name, f'#!/bin/sh\nexec {warm_python} -m {module} "$@"\n')
    return tmp_path


def with_tools(folder):
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


# Runs what the container would run, here and on a CPU.
DOCKER = r"""#!/usr/bin/env bash
while [ "$1" != --entrypoint ]; do shift; done
program=$2
shift 3
arguments=()
for argument in "$@"; do
  case $argument in gpu) argument=1 ;; auto) argument=1 ;; esac
  arguments+=("$argument")
done
exec "$program" "${arguments[@]}"
"""


@pytest.mark.slow  # a run of two processes
def test_torchrun_trains_on_two_nodes_that_stop_together(place):
    tool(place, "docker", DOCKER)
    script = [str(ROOT / "docker" / "node.sh")]
    environment = {**with_tools(place), "PORT": str(free_port())}
    nodes = Nodes(place, [[*script, str(node), "2", "127.0.0.1", *FIT] for node in range(2)], [environment] * 2)
    nodes.wait_for_steps(4)
    # One node is told to stop; the other learns of it.
    nodes.processes[1].send_signal(signal.SIGTERM)
    assert all(code != 0 for code in nodes.end()), nodes.said()
    (checkpoint,) = place.glob("lightning_logs/version_0/checkpoints/interrupted-step=*.ckpt")
    taken = steps_in_journals(place)
    assert checkpoint.name == f"interrupted-step={taken}.ckpt"
    found = statement(place)
    assert (found["num_steps"], found["lost_steps"], found["num_ranks"]) == (taken, 0, 2)
    assert taken < STEPS


# Starts the tasks with what the real one gives them, passes signals on, and kills the others when one fails.
SRUN = """#!{python}
import os, signal, subprocess, sys, time
assert sys.argv[1] == "--kill-on-bad-exit=1"
tasks = []
for task in map(str, range(2)):
    place = dict(SLURM_PROCID=task, SLURM_NODEID=task, SLURM_LOCALID="0", SLURM_NTASKS="2")
    tasks.append(subprocess.Popen(sys.argv[2:], env=os.environ | place))
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
while any(task.poll() is None for task in tasks):
    if any(task.poll() for task in tasks):
        [task.kill() for task in tasks]
    time.sleep(0.01)
sys.exit(max(task.returncode % 256 for task in tasks))
"""


def slurm(folder):
    """A job as sbatch starts it, with a slow scontrol that notes what it is asked."""
    tool(folder, "srun", SRUN.format(python=sys.executable))
    tool(folder, "scontrol", f'#!/bin/sh\nsleep 0.5\necho "$@" >> {folder}/scontrol.txt\n')
    environment = {
        **with_tools(folder),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "dpl",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    script = ["bash", str(ROOT / "docker" / "slurm.sbatch"), *FIT, "--trainer.default_root_dir", str(folder)]
    return Nodes(folder, [script], [environment])


@pytest.mark.slow  # two runs of two processes
def test_a_slurm_job_is_requeued_and_goes_on_by_itself(place):
    nodes = slurm(place)
    nodes.wait_for_steps(4)
    nodes.processes[0].send_signal(signal.SIGUSR1)
    # The first task that leaves has the other one killed: by then everything must have been done.
    assert nodes.end() in ([143], [247]), nodes.said()
    assert (place / "scontrol.txt").read_text() == "requeue 77\n"
    taken = steps_in_journals(place)
    assert statement(place)["num_steps"] == taken < STEPS
    nodes = slurm(place)
    assert nodes.end() == [0], nodes.said()
    found = statement(place)
    assert (found["num_steps"], found["lost_steps"], found["num_ranks"]) == (STEPS, 0, 2)
