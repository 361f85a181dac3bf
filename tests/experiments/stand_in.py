"""Stands in for ``dpl fit`` where launchers are tested: takes steps, leaves checkpoints, and does as it is told.

``run.yaml`` holds what it does: ``steps`` of ``seconds`` each, and ``then``, which is ``finish``, ``fail`` or ``die``.
"""

import json
import os
import signal
import sys
import time
import zipfile
from pathlib import Path

import yaml

arguments = sys.argv[1:]
config = Path(arguments[arguments.index("--config") + 1])
settings = yaml.safe_load(config.read_text())
root = Path(settings["trainer"]["default_root_dir"])
root.mkdir(parents=True, exist_ok=True)
checkpoint = root / "last.ckpt"
asked = "--ckpt_path" in arguments
assert asked == checkpoint.exists()


def save():
    with zipfile.ZipFile(checkpoint, "w") as file:
        file.writestr("steps", str(taken))


taken = int(zipfile.ZipFile(checkpoint).read("steps")) if asked else 0
with (config.parent / "starts.txt").open("a") as starts:
    environment = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    starts.write(json.dumps({"from": taken, "pid": os.getpid(), **environment}) + "\n")


def stop(number, frame):
    save()
    sys.exit(143)


signal.signal(signal.SIGTERM, stop)
while taken < settings["steps"]:
    time.sleep(settings["seconds"])
    taken += 1
    if settings.get("saves", True):
        save()
    first = (config.parent / "starts.txt").read_text().count("\n") == 1
    if first and settings["then"] == "die" and taken == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if settings["then"] == "fail":
    print("it failed")
    sys.exit(2)
result = {
    "completed": True,
    "num_steps": taken,
    "num_steps_planned": settings["steps"],
    "epsilon": 3.0,
    "seconds": 1.0,
    "delta": 1e-4,
}
(root / "result.json").write_text(json.dumps({**result, "test_accuracy_last": 0.5, "test_accuracy_best": 0.6}))
