"""Runs of `dpl fit` in processes of their own, for tests that stop them."""

import json
import os
import signal
import subprocess
import time


class Nodes:
    """Processes of one run, such as the nodes of a job; each writes to a file of its own."""

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
        """The end of what each has written."""
        return "\n".join(output.read_text()[-3000:] for output in self.outputs)

    def wait_for_steps(self, count):
        """Wait until a journal has as many steps; fails if the run ends before."""
        deadline = time.monotonic() + 120
        while steps_in_journals(self.folder) < count:
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def end(self):
        """The exit codes, when all have ended."""
        try:
            return [process.wait(timeout=120) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def steps_in_journals(folder):
    """Number of steps in the longest journal of the runs in a folder."""
    counts = [path.read_text().count("noise_multiplier") for path in folder.glob("**/privacy_journal_*.jsonl")]
    return max(counts, default=0)


def statement(folder):
    """The statement that was written last."""
    newest = max(folder.glob("lightning_logs/*/privacy_statement.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())
