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
from dp_lightning.experiments import worker
from dp_lightning.experiments.launchers import LAUNCHERS, launch_local, local
from dp_lightning.experiments.launchers.slurm import _Job
from dp_lightning.experiments.runs import RunFolder

STAND_IN = Path(__file__).parent / "stand_in.py"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    monkeypatch.setattr(worker, "_DPL", (sys.executable, str(STAND_IN)))


def prepared(out, name="run", *, steps=3, seconds=0.01, then="finish", **settings):
    settings = {"steps": steps, "seconds": seconds, "then": then, "trainer": {}, **settings}
    folder = RunFolder.of(out, name, settings)
    folder.prepare(settings)
    return folder


def starts(folder):
    return [json.loads(line) for line in (folder.path / "starts.txt").read_text().splitlines()]


def test_the_folder_is_named_by_the_settings(tmp_path):
    settings = {"trainer": {"max_epochs": 1}, "seed_everything": 42}
    folder = RunFolder.of(tmp_path, "name", settings)
    assert folder.path.parent == tmp_path
    assert folder.path.name.startswith("name-")
    assert RunFolder.of(tmp_path, "name", dict(reversed(settings.items()))).path == folder.path
    assert RunFolder.of(tmp_path, "name", {**settings, "seed_everything": 43}).path != folder.path


def test_a_finished_run_is_not_repeated(tmp_path):
    folder = prepared(tmp_path)
    assert not folder.finished
    assert folder.result is None
    assert worker.run_to_its_end(str(folder.path)) == 0
    assert folder.finished
    assert worker.run_to_its_end(str(folder.path)) == 0
    assert len(starts(folder)) == 1


def test_a_result_that_an_interruption_has_left_is_not_the_end(tmp_path):
    folder = prepared(tmp_path)
    for number, taken in enumerate((5, 3)):
        path = folder.root / f"version_{number}" / "result.json"
        path.parent.mkdir(parents=True)
        whole = dict.fromkeys(["epsilon", "delta", "seconds", "test_accuracy_last", "test_accuracy_best"], 1.0)
        whole |= {"completed": False, "num_steps": taken, "num_steps_planned": 6}
        path.write_text(json.dumps(whole))
    for number, text in enumerate(("{}", "[]", "null", '{"completed": true, "num_steps": 6}')):
        (folder.root / f"odd_{number}").mkdir()
        (folder.root / f"odd_{number}" / "result.json").write_text(text)
    (folder.root / "half").mkdir()
    (folder.root / "half" / "result.json").write_text('{"num_steps": 6, "num')
    assert not folder.finished
    assert folder.result["num_steps"] == 5
    # A setting has ended it before its last step.
    path.write_text(json.dumps({**whole, "completed": True}))
    assert folder.finished
    assert folder.result["num_steps"] == 3


def test_a_run_that_died_goes_on_from_its_checkpoint(tmp_path):
    folder = prepared(tmp_path, then="die")
    assert worker.run_to_its_end(str(folder.path)) == -signal.SIGKILL
    assert not folder.finished
    assert worker.run_to_its_end(str(folder.path)) == 0
    assert [start["from"] for start in starts(folder)] == [0, 1]


def test_what_died_without_a_checkpoint_is_set_aside_and_starts_anew(tmp_path):
    folder = prepared(tmp_path, then="die", saves=False)
    worker.run_to_its_end(str(folder.path))
    (folder.root / "journal").write_text("one step")
    assert worker.run_to_its_end(str(folder.path)) == 0
    assert [start["from"] for start in starts(folder)] == [0, 0]
    assert (folder.path / "abandoned_0" / "journal").read_text() == "one step"


def test_a_start_is_set_aside_under_a_name_of_its_own(tmp_path):
    folder = prepared(tmp_path)
    for name in ("abandoned_1", "abandoned_x"):
        (folder.path / name).mkdir()
        (folder.path / name / "journal").touch()
    folder.root.mkdir()
    folder.abandon()
    assert (folder.path / "abandoned_2").is_dir()
    assert folder.abandoned == 2


def test_loggers_write_in_the_folder_of_the_run(tmp_path):
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "/elsewhere", "name": "n"}}
    for given in (logger, [logger], [True, logger], None, True):
        settings = {"trainer": {"logger": given}}
        folder = RunFolder.of(tmp_path, "name", settings)
        folder.prepare(settings)
        assert "/elsewhere" not in folder.config.read_text()
        assert settings == {"trainer": {"logger": given}}
    assert logger["init_args"]["save_dir"] == "/elsewhere"


def test_what_the_statement_says_of_a_release_is_part_of_the_result(tmp_path):
    folder = prepared(tmp_path)
    worker.run_to_its_end(str(folder.path))
    assert folder.result["release"] == "not for release: there is no privacy statement"
    (folder.root / "privacy_statement.json").write_text('{"release": "ok"}')
    assert folder.result["release"] == "ok"


def test_slurms_warning_to_every_process_does_not_end_the_run(tmp_path):
    folder = prepared(tmp_path, steps=1000, seconds=0.05)
    stopped = []
    thread = Thread(target=lambda: stopped.append(worker.run_to_its_end(str(folder.path), started=warn)))

    def warn(process):
        while not (folder.root / "last.ckpt").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR2)
        time.sleep(0.2)
        process.terminate()

    thread.start()
    thread.join(30)
    assert stopped == [143]


def test_a_wait_for_another_ones_run_is_said_and_can_be_ended(tmp_path, capsys):
    folder = prepared(tmp_path, steps=1000, seconds=0.05)
    running = []
    first = Thread(target=worker.run_to_its_end, args=(str(folder.path), None, running.append))
    first.start()
    while not running:
        time.sleep(0.01)
    asked = []

    def stopping():
        asked.append(True)
        return len(asked) > 2

    assert worker.run_to_its_end(str(folder.path), stopping=stopping) == -signal.SIGTERM
    assert capsys.readouterr().err.count("another process is already running it; waiting for it to end") == 1
    running[0].terminate()
    first.join(30)
    assert len(starts(folder)) == 1


def test_a_run_whose_checkpoints_are_all_damaged_is_set_aside_too(tmp_path):
    folder = prepared(tmp_path, then="die")
    worker.run_to_its_end(str(folder.path))
    assert folder.checkpoint is not None
    (checkpoint,) = folder.root.glob("*.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    assert folder.checkpoint is None
    assert worker.run_to_its_end(str(folder.path)) == 0
    assert folder.finished
    assert folder.abandoned == 1
    assert (folder.path / "abandoned_0" / "last.ckpt").is_file()


def test_the_folder_has_a_name_that_every_file_system_takes(tmp_path):
    folder = RunFolder.of(tmp_path, "a b/c$(d)_" + "é" * 300, {"trainer": {}})
    folder.prepare({"trainer": {}})
    assert folder.path.name.startswith("a-b-c--d-_é")
    assert folder.config.is_file()


def test_whoever_comes_to_a_running_run_waits_for_it(tmp_path):
    """Also where the process that has started it is gone: the run itself holds the lock."""
    folder = prepared(tmp_path, seconds=0.5)
    code = (
        "import sys; from dp_lightning.experiments import worker; "
        f"worker._DPL = (sys.executable, {str(STAND_IN)!r}); worker.run_to_its_end({str(folder.path)!r})"
    )
    first = subprocess.Popen([sys.executable, "-c", code])
    while not (folder.path / "starts.txt").exists():
        time.sleep(0.01)
    first.kill()
    first.wait()
    assert not folder.finished
    assert worker.run_to_its_end(str(folder.path)) == 0
    assert len(starts(folder)) == 1


def test_one_run_that_fails_does_not_take_the_others_along(tmp_path):
    folders = [prepared(tmp_path, str(k), then="fail" if k == 1 else "finish") for k in range(4)]
    found = dict(launch_local([str(folder.path) for folder in folders], {"jobs": 2}))
    assert [found[str(folder.path)] for folder in folders] == [0, 2, 0, 0]
    assert [folder.finished for folder in folders] == [True, False, True, True]
    assert "it failed" in folders[1].log.read_text()


def test_what_fails_around_a_run_is_said(tmp_path, capsys):
    absent = str(tmp_path / "absent")
    assert list(launch_local([absent], {})) == [(absent, -1)]
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [0, -1, "two", 1.5])
def test_a_number_of_jobs_that_is_none_is_refused(tmp_path, jobs):
    with pytest.raises(ConfigurationError, match=rf"--jobs is {jobs}; give how many"):
        list(launch_local([str(prepared(tmp_path).path)], {"jobs": jobs}))


@pytest.mark.parametrize("option", ["num_cpus", "num_gpus"])
def test_what_is_no_number_of_cores_is_refused(tmp_path, option):
    with pytest.raises(ConfigurationError, match=f"--launcher-option {option}=abc: give a number"):
        list(LAUNCHERS["ray"]([str(prepared(tmp_path).path)], {option: "abc"}))


def test_slurm_is_not_replaced_by_processes_here_in_silence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"there is no SLURM on this machine.* cluster=local"):
        list(LAUNCHERS["slurm"]([str(prepared(tmp_path).path)], {"jobs": 2}))


@pytest.mark.slow  # starts a Ray of its own
def test_a_ray_that_is_broken_off_stops_its_runs_with_checkpoints(tmp_path):
    # In a process of its own: Ray redirects what it finds open.
    # The first one takes long enough for the others to begin beside it.
    folders = [prepared(tmp_path, str(k), steps=100 if k == 0 else 2000, seconds=0.05) for k in range(3)]
    code = f"""
from dp_lightning.experiments import worker
from dp_lightning.experiments.launchers import ray_cluster

class WithTheStandIn(ray_cluster._Run):
    def to_its_end(self, folder):
        worker._DPL = ({sys.executable!r}, {str(STAND_IN)!r})
        return super().to_its_end(folder)

ray_cluster._Run = WithTheStandIn
results = ray_cluster.launch_ray({[str(folder.path) for folder in folders]!r}, {{"num_cpus": 0.1}})
assert next(results)[1] == 0
results.close()
"""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert time.monotonic() - start < 60  # a run that was not told takes 100 s, or is waited for for 60
    begun = [folder for folder in folders[1:] if (folder.path / "starts.txt").exists()]
    assert begun
    for folder in begun:
        assert folder.checkpoint is not None
        with pytest.raises(ProcessLookupError):
            os.kill(starts(folder)[0]["pid"], 0)


def test_each_run_at_once_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    folders = [prepared(tmp_path, str(k), seconds=0.1) for k in range(4)]
    list(launch_local([str(folder.path) for folder in folders], {}))
    seen = [start["CUDA_VISIBLE_DEVICES"] for folder in folders for start in starts(folder)]
    assert sorted(seen) == ["3", "3", "5", "5"]
    assert seen[0] != seen[1]


def test_a_single_run_at_once_has_every_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    folder = prepared(tmp_path)
    list(launch_local([str(folder.path)], {"jobs": 1}))
    assert starts(folder)[0]["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_a_slurm_job_whose_time_is_up_leaves_a_checkpoint_and_is_queued_again(tmp_path):
    folder = prepared(tmp_path, steps=1000, seconds=0.05)
    job, status = _Job(), []
    thread = Thread(target=lambda: status.append(job(str(folder.path))))
    thread.start()
    while not (folder.root / "last.ckpt").exists():
        time.sleep(0.01)
    again = job.checkpoint(str(folder.path))
    thread.join()
    assert status == [143]
    assert folder.checkpoint is not None
    assert isinstance(again.function, _Job)
    assert again.args == (str(folder.path),)


def test_without_gpu_runs_at_once_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "available_cores", lambda: 6)
    folders = [prepared(tmp_path, str(k)) for k in range(2)]
    list(launch_local([str(folder.path) for folder in folders], {"jobs": 2}))
    assert [start["OMP_NUM_THREADS"] for folder in folders for start in starts(folder)] == ["3", "3"]
    alone = prepared(tmp_path, "alone")
    list(launch_local([str(alone.path)], {}))
    assert starts(alone)[0]["OMP_NUM_THREADS"] is None


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
        with pytest.raises(ProcessLookupError):
            os.kill(starts(folder)[0]["pid"], 0)


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_an_option_that_a_launcher_lacks_is_named(tmp_path, launcher):
    with pytest.raises(ConfigurationError, match=f"--launcher {launcher} has no option partition; it has"):
        list(LAUNCHERS[launcher]([str(prepared(tmp_path).path)], {"partition": "gpu"}))


def test_slurm_needs_a_cluster_and_options_that_submitit_knows(tmp_path):
    folder = str(prepared(tmp_path).path)
    with pytest.raises(ConfigurationError, match="--launcher slurm"):
        list(LAUNCHERS["slurm"]([folder], {"cluster": "local", "partitions": "gpu"}))


@pytest.mark.parametrize(("launcher", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, launcher, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"needs {package}: pip install 'dp-lightning\[{launcher}\]'"):
        list(LAUNCHERS[launcher]([str(prepared(tmp_path).path)], {}))
