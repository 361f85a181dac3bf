"""Kills `dpl fit` again and again, at random moments and at its file operations, and checks how each run ends.

    python benchmarks/kills.py FOLDER --kills 200

A trial is a small run on the digits that gets one to four SIGKILLs, each followed by ``dpl fit --ckpt_path last``, and
is then finished by that command. It has to end with exit code 0, a statement and a result. The statement has to count
every step of its run that was released, and `dpl verify` has to find nothing. Trials have one and two ranks
alternately. The processes are forked from this one, which has imported everything. FOLDER/trials.jsonl gets a line for
each trial, and keeps the folder of one with a fault.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch  # noqa: F401
import opacus.accountants  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch.utils.tensorboard
from measuring import arguments

import dp_lightning.commands.training  # noqa: F401
from dp_lightning.cli import main as dpl
from dp_lightning.commands.verify import verify
from dp_lightning.privacy.journal import read_journal, run_of

CONFIG = Path(__file__).parents[1] / "configs" / "digits.yaml"
TARGET, STEPS = 3.0, 18  # 3 epochs of round(1437 / 256) steps
SETTINGS = {
    "model.init_args.channels": 4,
    "privacy.target_epsilon": TARGET,
    "privacy.expected_batch_size": 256,
    "privacy.accountant": "rdp",
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": 3,
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
}
_SECONDS = 120.0


class FileOperations:
    """Counts what this process does to files below a folder, and kills it at one of them.

    Args:
        folder: the run's.
        fatal: number of the operation before which it kills the process; None for none.
    """

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal, self.count = str(folder), fatal, 0
        for name in ("fsync", "replace", "write", "unlink", "mkdir"):
            setattr(os, name, self._counted(getattr(os, name)))
        sys.addaudithook(self._audited)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            place = args[0]
            if isinstance(place, int):
                with contextlib.suppress(OSError):
                    place = os.readlink(f"/proc/self/fd/{place}")
            self._next(str(place))
            return function(*args, **kwargs)

        return counted

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self._next(str(args[0]))

    def _next(self, place: str) -> None:
        if not place.startswith(self.folder):
            return
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def start(folder: Path, ranks: int, fatal: int | None = None) -> list[int]:
    """Start ``dpl fit --ckpt_path last``; returns the process of each rank."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    arguments = ["fit", "--config", str(CONFIG), "--ckpt_path", "last"]
    settings = {**SETTINGS, "trainer.devices": ranks, "trainer.default_root_dir": folder / "run"}
    arguments += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _become(folder, rank, ranks, port)
            operations = FileOperations(folder / "run", fatal if rank == 0 else None)
            code = 0
            try:
                dpl(arguments)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                code = 1
            (folder / f"count{rank}.txt").write_text(str(operations.count))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return children


def _become(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Set what torchrun sets for a rank."""
    output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(TORCHELASTIC_RUN_ID="kills", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))


def wait(children: list[int], seconds: float, *, all_of_them: bool = True) -> list[int | None]:
    """Wait until the ranks have ended, or one of them; returns their exit codes, None for one that has not ended."""
    codes: list[int | None] = [None] * len(children)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and None in codes:
        for place, child in enumerate(children):
            if codes[place] is None and (ended := os.waitpid(child, os.WNOHANG))[0]:
                codes[place] = os.waitstatus_to_exitcode(ended[1])
        if not all_of_them and any(code is not None for code in codes):
            break
        time.sleep(0.005)
    return codes


def kill(children: list[int], draw: random.Random) -> None:
    """Send SIGKILL to those that have not ended, one shortly after the other."""
    for child in draw.sample(children, len(children)):
        os.kill(child, signal.SIGKILL)
        time.sleep(draw.choice((0.0, 0.002, 0.3)))
    for child in children:
        os.waitpid(child, 0)


def recorded(folder: Path, run: str = "*", *, journals: int = 1) -> int:
    """Steps that so many of the journals of a run, or of all runs, have.

    A step that one journal has and the one beside the checkpoints lacks was not released: a process writes it to both
    before.
    """
    names = Counter[str]()
    for path in folder.rglob(f"privacy_journal_{run}.jsonl"):
        names.update(read_journal(path, run_of(path)).keys())
    return sum(count >= journals for count in names.values())


def trial(folder: Path, ranks: int, kills: int, draw: random.Random, measured: dict[str, float]) -> dict[str, Any]:
    """Kill a run, finish it, and say what was found."""
    found: dict[str, Any] = {"ranks": ranks, "kills": []}
    held = 0
    while len(found["kills"]) < kills:
        by_operation = draw.random() < 0.5
        fatal = draw.randint(1, int(measured["operations"])) if by_operation else None
        moment = _SECONDS if by_operation else draw.uniform(0.0, measured["seconds"])
        children = start(folder, ranks, fatal)
        codes = wait(children, moment, all_of_them=False)
        left = [child for child, code in zip(children, codes, strict=True) if code is None]
        if codes[0] == 0:  # the run was over before
            wait(left, _SECONDS)
            break
        kill(left, draw)
        steps = recorded(folder)
        if steps < held:
            found["fault"] = f"the journals had {held} steps, and {steps} after a kill"
        held = steps
        kind = f"file operation {fatal}" if by_operation else f"after {moment:.2f} s"
        found["kills"].append({"at": kind, "steps": steps, "codes": codes})
    children = start(folder, ranks)
    codes = wait(children, _SECONDS)
    kill([child for child, code in zip(children, codes, strict=True) if code is None], draw)
    return {**found, "codes": codes, "recorded": recorded(folder), **ended(folder / "run", codes)}


def ended(root: Path, codes: list[int | None]) -> dict[str, Any]:
    """What is wrong with a run that has ended, as ``fault``, and what its files say."""
    if any(code != 0 for code in codes):
        return {"fault": f"exit codes {codes}"}
    newest = max((root / "lightning_logs").glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    try:
        statement = json.loads((newest / "privacy_statement.json").read_text())
        result = json.loads((newest / "result.json").read_text())
    except OSError as error:
        return {"fault": f"a file is missing: {error}"}
    facts = {
        "num_steps": statement["num_steps"],
        "lost_steps": statement["lost_steps"],
        "epsilon": statement["epsilon"]["rdp"],
        "accuracy": result["test_accuracy_last"],
    }
    wrong = [f"{what}: {why}" for place in (newest, root) for what, why in verify(place, []) if why is not None]
    if statement["num_steps"] < (steps := recorded(root, statement["run"], journals=2)):
        wrong.append(f"under-reported: {statement['num_steps']} of {steps} steps")
    if statement["num_steps"] != STEPS or statement["release"] != "ok" or statement["epsilon"]["rdp"] > TARGET:
        wrong.append(f"{statement['num_steps']} steps, release {statement['release']}")
    if not result["completed"] or result["epsilon"] != statement["epsilon"]["rdp"]:
        wrong.append("the result is not that of a finished run with this statement")
    return {**facts, **({"fault": "; ".join(wrong)} if wrong else {})}


def measure(folder: Path) -> dict[str, float]:
    """How long a run takes that is not killed, and how many file operations it does."""
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # left by an earlier campaign
    codes = wait(start(folder, 1), _SECONDS)
    assert codes == [0], (folder / "output0.txt").read_text()
    return {"seconds": time.monotonic() - started, "operations": float((folder / "count0.txt").read_text())}


def main(given: list[str] | None = None) -> int:
    """Run trials until there were enough kills; returns how many trials have a fault."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, help="for the runs and trials.jsonl")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks, in turn")
    options = parser.parse_args(given)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    measured, trials, done = measure(folder / "measured"), [], 0
    with (folder / "trials.jsonl").open("w") as log:
        while done < options.kills:
            number = len(trials)
            draw, place = random.Random(number), folder / f"trial{number}"
            shutil.rmtree(place, ignore_errors=True)  # left by an earlier campaign
            kills = min(draw.randint(1, 4), options.kills - done)
            found = trial(place, options.ranks[number % len(options.ranks)], kills, draw, measured)
            trials.append(found)
            done += len(found["kills"])
            log.write(json.dumps(found) + "\n")
            log.flush()
            if "fault" in found:
                print(f"trial {number}: {found['fault']}", flush=True)
            else:
                shutil.rmtree(place)
    faults = sum("fault" in one for one in trials)
    at_files = sum(kill["at"].startswith("file") for one in trials for kill in one["kills"])
    print(
        f"{done} kills, {at_files} of them at file operations, in {len(trials)} runs, {faults} with a fault. Runs with "
        f"steps that were lost: {sum(one.get('lost_steps', 0) > 0 for one in trials)}; that only had "
        f"to be finished: {sum(any(kill['steps'] == STEPS for kill in one['kills']) for one in trials)}."
    )
    return faults


if __name__ == "__main__":
    sys.exit(main() > 0)
