"""Runs that torchrun and srun start: they train on two nodes, stop in order, and come back."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIT = [str(ROOT / "cli.py"), "fit", "--config", str(ROOT / "configs" / "digits.yaml")]
SETTINGS = [
    *("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "2"),
    *("--trainer.max_epochs", "40", "--trainer.enable_progress_bar", "false", "--privacy.accountant", "rdp"),
]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Nodes:
    """Processes that stand for the nodes of one job; each writes to a file of its own."""

    def __init__(self, folder, commands, environments):
        self.folder = folder
        self.outputs = [folder / f"node{number}.txt" for number in range(len(commands))]
        self.processes = []
        for command, environment, output in zip(commands, environments, self.outputs, strict=True):
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        cwd=folder,
                        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                        start_new_session=True,
                    )
                )

    def said(self):
        return "\n".join(output.read_text()[-3000:] for output in self.outputs)

    def wait_for_steps(self, count):
        deadline = time.monotonic() + 120
        while steps_in_journals(self.folder) < count:
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def end(self):
        try:
            return [process.wait(timeout=120) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def steps_in_journals(folder):
    counts = [path.read_text().count("noise_multiplier") for path in folder.glob("**/privacy_journal_*.jsonl")]
    return max(counts, default=0)


def statement(folder):
    newest = max(folder.glob("lightning_logs/*/privacy_statement.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())


def torchrun(folder, *arguments):
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting]
    return Nodes(
        folder,
        [
            [*launch, "--node-rank", str(node), *FIT, *SETTINGS, "--trainer.default_root_dir", str(folder), *arguments]
            for node in range(2)
        ],
        [{}, {}],
    )


@pytest.mark.slow  # two starts of Lightning with two processes
def test_torchrun_trains_on_two_nodes_and_resumes(tmp_path):
    nodes = torchrun(tmp_path)
    nodes.wait_for_steps(7)
    # One node is told to stop; the others learn of it.
    nodes.processes[1].send_signal(signal.SIGTERM)
    codes = nodes.end()
    assert all(code != 0 for code in codes), nodes.said()
    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/interrupted-step=*.ckpt")
    taken = steps_in_journals(tmp_path)
    assert checkpoint.name == f"interrupted-step={taken}.ckpt"
    assert taken < 112
    nodes = torchrun(tmp_path, "--ckpt_path", "last")
    assert nodes.end() == [0, 0], nodes.said()
    found = statement(tmp_path)
    assert found["num_steps"] == found["num_steps_planned"] == 112
    assert (found["lost_steps"], found["num_ranks"]) == (0, 2)
    assert found["epsilon"]["rdp"] <= 3.0


def srun(folder, job, *arguments):
    """What srun gives the two tasks of a job; a scontrol that notes what it is asked."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    scontrol = tools / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
    scontrol.chmod(0o755)
    port = str(free_port())
    environments = [
        {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_NNODES": "2",
            "SLURM_NODELIST": "127.0.0.1",
            "SLURM_PROCID": str(task),
            "SLURM_NODEID": str(task),
            "SLURM_LOCALID": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for task in range(2)
    ]
    command = [sys.executable, *FIT, *SETTINGS, "--trainer.default_root_dir", str(folder), *arguments]
    return Nodes(folder, [command, command], environments)


@pytest.mark.slow  # three starts of Lightning with two processes
def test_a_slurm_job_is_requeued_and_goes_on_by_itself_and_another_job_does_not(tmp_path):
    nodes = srun(tmp_path, "77")
    nodes.wait_for_steps(7)
    for process in nodes.processes:
        process.send_signal(signal.SIGUSR1)
    assert nodes.end() == [143, 143], nodes.said()
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 77\n"
    taken = steps_in_journals(tmp_path)
    assert statement(tmp_path)["num_steps"] == taken < 112
    # Another job in the same folder is a run of its own.
    other = srun(tmp_path, "78", "--trainer.max_epochs", "2")
    assert other.end() == [0, 0], other.said()
    assert statement(tmp_path)["num_steps"] == 5
    nodes = srun(tmp_path, "77")
    assert nodes.end() == [0, 0], nodes.said()
    found = statement(tmp_path)
    assert (found["num_steps"], found["lost_steps"], found["num_ranks"]) == (112, 0, 2)
    assert f"interrupted-step={taken}.ckpt" in nodes.said()
