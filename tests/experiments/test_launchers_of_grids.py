"""Each run of a grid ends finished, once, whatever happens to the others and to whoever has started it."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from threading import Thread

import pytest

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments import launchers, runs
from dp_lightning.experiments.launchers import LAUNCHERS, launch_local
from dp_lightning.experiments.runs import RunFolder, RunProcess

STAND_IN = Path(__file__).parent / "stand_in.py"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    monkeypatch.setattr(runs, "_DPL", (sys.executable, str(STAND_IN)))


def prepared(out, name="run", *, steps=3, seconds=0.01, then="finish", **settings):
    settings = {"steps": steps, "seconds": seconds, "then": then, "trainer": {}, **settings}
    folder = RunFolder.of(out, name, settings)
    folder.prepare(settings)
    return folder


def starts(folder):
    return [json.loads(line) for line in (folder.path / "starts.txt").read_text().splitlines()]


def is_gone(folder):
    try:
        os.kill(starts(folder)[0]["pid"], 0)
    except ProcessLookupError:
        return True
    return False


def test_the_folder_is_named_by_labels_and_settings_for_every_file_system(tmp_path):
    settings = {"trainer": {"max_epochs": 1}, "seed_everything": 42}
    folder = RunFolder.of(tmp_path, "a b/c$(d)_" + "é" * 300, settings)
    assert folder.path.parent == tmp_path
    assert folder.path.name.startswith("a-b-c--d-_é")
    folder.prepare(settings)
    first = RunFolder.of(tmp_path, "name", settings).path
    assert RunFolder.of(tmp_path, "name", dict(reversed(settings.items()))).path == first
    assert RunFolder.of(tmp_path, "name", {**settings, "seed_everything": 43}).path != first


def test_loggers_and_checkpoints_write_in_the_folder_of_the_run(tmp_path):
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "/elsewhere", "name": "n"}}
    keeper = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "/elsewhere"}}
    for given in (logger, [True, logger], None, True):
        settings = {"trainer": {"logger": given, "callbacks": [keeper]}}
        folder = RunFolder.of(tmp_path, "name", settings)
        folder.prepare(settings)
        assert "/elsewhere" not in folder.config.read_text()
    assert logger["init_args"]["save_dir"] == "/elsewhere"


def test_a_finished_run_is_not_repeated_and_says_what_its_statement_says_of_a_release(tmp_path):
    folder = prepared(tmp_path)
    assert not folder.finished
    assert folder.result is None
    for _ in range(2):
        assert RunProcess().to_its_end(str(folder.path)) == 0
        assert folder.finished
    assert len(starts(folder)) == 1
    assert folder.result["release"] == "not for release: there is no privacy statement"
    (folder.root / "privacy_statement.json").write_text('{"release": "ok"}')
    assert folder.result["release"] == "ok"


def test_a_result_that_an_interruption_has_left_is_not_the_end(tmp_path):
    folder = prepared(tmp_path)
    for number, taken in enumerate((5, 3)):
        path = folder.root / f"version_{number}" / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"completed": False, "num_steps": taken}))
    assert not folder.finished
    assert folder.result["num_steps"] == 5
    # A setting has ended it before its last step.
    path.write_text(json.dumps({"completed": True, "num_steps": 3}))
    assert folder.finished
    assert folder.result["num_steps"] == 3


@pytest.mark.parametrize(("saves", "resumed_from"), [(True, 1), (False, 0)])
def test_a_run_that_died_resumes_from_its_checkpoint_or_is_set_aside_without_one(tmp_path, saves, resumed_from):
    folder = prepared(tmp_path, then="die", saves=saves)
    assert RunProcess().to_its_end(str(folder.path)) == -signal.SIGKILL
    (folder.root / "journal").write_text("one step")
    assert not folder.finished
    assert RunProcess().to_its_end(str(folder.path)) == 0
    assert [start["from"] for start in starts(folder)] == [0, resumed_from]
    assert folder.abandoned == (0 if saves else 1)
    assert ((folder.root if saves else folder.path / "abandoned_0") / "journal").read_text() == "one step"


def test_a_slurm_job_whose_time_is_up_leaves_a_checkpoint_and_is_queued_again(tmp_path):
    folder = prepared(tmp_path, steps=1000, seconds=0.05)
    job, status = launchers._SlurmJob(), []
    thread = Thread(target=lambda: status.append(job(str(folder.path))))
    thread.start()
    while not (folder.root / "last.ckpt").exists():
        time.sleep(0.01)
    os.kill(starts(folder)[0]["pid"], signal.SIGUSR2)  # SLURM's warning goes to every process and ends none
    time.sleep(0.1)
    again = job.checkpoint(str(folder.path))
    assert isinstance(again.function, launchers._SlurmJob)
    assert again.args == (str(folder.path),)
    thread.join()
    assert status == [143]  # it has saved a checkpoint, and has not died of a signal


def test_whoever_comes_to_a_running_run_waits_for_it(tmp_path):
    """Also where the process that has started it is gone: the run itself holds the lock."""
    folder = prepared(tmp_path, seconds=0.2)
    code = (
        "import sys; from dp_lightning.experiments import runs; "
        f"runs._DPL = (sys.executable, {str(STAND_IN)!r}); runs.RunProcess().to_its_end({str(folder.path)!r})"
    )
    first = subprocess.Popen([sys.executable, "-c", code])
    while not (folder.path / "starts.txt").exists():
        time.sleep(0.01)
    first.kill()
    first.wait()
    assert not folder.finished
    assert RunProcess().to_its_end(str(folder.path)) == 0
    assert len(starts(folder)) == 1


def test_one_run_that_fails_does_not_take_the_others_along(tmp_path, capsys):
    folders = [prepared(tmp_path, str(k), then="fail" if k == 1 else "finish") for k in range(4)]
    absent = str(tmp_path / "absent")
    found = dict(launch_local([*(str(folder.path) for folder in folders), absent], {"jobs": 2}))
    assert [found[str(folder.path)] for folder in folders] == [0, 2, 0, 0]
    assert [folder.finished for folder in folders] == [True, False, True, True]
    assert "it failed" in folders[1].log.read_text()
    assert found[absent] == -1  # what fails around a run
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "options", "message"),
    [
        ("local", {"jobs": 0}, "--jobs is 0; give how many"),
        ("local", {"partition": "gpu"}, "--launcher local has no option partition; it has"),
        ("slurm", {"jobs": 2}, r"there is no SLURM on this machine.* cluster=local"),
        ("slurm", {"cluster": "local", "partitions": "gpu"}, "--launcher slurm"),
    ],
)
def test_what_a_launcher_cannot_take_is_named(tmp_path, monkeypatch, launcher, options, message):
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch
    with pytest.raises(ConfigurationError, match=message):
        list(LAUNCHERS[launcher]([str(prepared(tmp_path).path)], options))


# Jobs and actors are processes of their own, which have no stand-in but by this.
WITH_THE_STAND_IN = f"""
from dp_lightning.experiments import launchers, runs

class WithTheStandIn(runs.RunProcess):
    def to_its_end(self, folder):
        runs._DPL = ({sys.executable!r}, {str(STAND_IN)!r})
        return super().to_its_end(folder)
"""


def test_a_slurm_array_runs_every_folder(tmp_path):
    folders = [prepared(tmp_path, str(k), then="fail" if k else "finish") for k in range(2)]
    code = f"""{WITH_THE_STAND_IN}
class Job(WithTheStandIn, launchers._SlurmJob):
    pass

launchers._SlurmJob = Job
results = launchers.launch_slurm({[str(folder.path) for folder in folders]!r}, {{"cluster": "local"}})
print(sorted(status for _, status in results))
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "[0, 2]\n"
    assert [folder.finished for folder in folders] == [True, False]


@pytest.mark.slow  # starts a Ray of its own
def test_a_ray_that_is_broken_off_stops_its_runs_with_checkpoints(tmp_path):
    # In a process of its own: Ray redirects what it finds open. The first run takes long enough for the second one to
    # begin beside it, and the last one has no place.
    folders = [prepared(tmp_path, str(k), steps=60 if k == 0 else 2000, seconds=0.05) for k in range(3)]
    code = f"""{WITH_THE_STAND_IN}
launchers.RunProcess = WithTheStandIn
results = launchers.launch_ray({[str(folder.path) for folder in folders]!r}, {{"num_cpus": 0.1}})
assert next(results)[1] == 0
results.close()
"""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert time.monotonic() - start < 60  # a run that was not told takes 100 s, or is waited for for 60
    begun = [folder for folder in folders[1:] if (folder.path / "starts.txt").exists()]
    assert begun
    for folder in begun:
        assert any(folder.root.glob("*.ckpt"))
        assert is_gone(folder)


@pytest.mark.parametrize(
    ("gpus", "jobs", "name", "seen"),
    [
        ("3,5", {}, "CUDA_VISIBLE_DEVICES", {"3", "5"}),
        ("3,5", {"jobs": 1}, "CUDA_VISIBLE_DEVICES", {"3,5"}),
        ("", {"jobs": 2}, "OMP_NUM_THREADS", {"3"}),
    ],
)
def test_runs_at_once_share_gpus_or_cores_and_a_single_one_has_all(tmp_path, monkeypatch, gpus, jobs, name, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launchers, "available_cores", lambda: 6)
    folders = [prepared(tmp_path, str(k), seconds=0.1) for k in range(2)]
    list(launch_local([str(folder.path) for folder in folders], jobs))
    found = [start[name] for folder in folders for start in starts(folder)]
    assert set(found) == seen


def test_breaking_off_stops_the_runs_with_checkpoints_and_starts_no_other(tmp_path):
    folders = [prepared(tmp_path, str(k), steps=2 if k == 0 else 1000, seconds=0.05) for k in range(4)]
    results = launch_local([str(folder.path) for folder in folders], {"jobs": 2})
    assert next(results) == (str(folders[0].path), 0)
    results.close()
    running = [folder for folder in folders[1:] if (folder.path / "starts.txt").exists()]
    assert folders[1] in running
    assert len(running) <= 2
    assert not folders[3].log.exists()
    for folder in running:
        assert int(zipfile.ZipFile(folder.root / "last.ckpt").read("steps")) < 1000
        assert is_gone(folder)
