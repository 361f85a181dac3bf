"""A run that is killed again and again: ``python run_until_killed.py '{"folder": ..., "ranks": 2, "kills": 50}'``.

The processes are forked from one that has imported everything, with the environment that torchrun gives. The build
under test notes the hash of every noise vector before it is used. After each kill, and at the end, the files on disk
are compared; a JSON line says what was found.
"""

import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.privacy import GaussianNoise
from dp_lightning.privacy.journal import read_journal, run_of
from dp_lightning.private_run.resume import SavedRun, latest_checkpoint

INTERVAL, TARGET = 5, 4.0


def steps_of(settings):
    """More steps than are taken until the last kill."""
    return 40 * (settings["kills"] + 1)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def note_noise(folder, rank):
    add_to = GaussianNoise.add_to
    log = os.open(folder / f"noise{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noted(noise, tensor, standard_deviation, *, step):
        drawn = add_to(noise, torch.zeros_like(tensor), standard_deviation, step=step)
        os.write(log, hashlib.sha256(drawn.numpy().tobytes()).hexdigest().encode() + b"\n")
        return drawn + tensor

    GaussianNoise.add_to = noted


def train(folder, rank, settings):
    torch.set_num_threads(1)
    note_noise(folder, rank)
    privacy = PrivacyCallback(
        expected_batch_size=8,
        target_epsilon=TARGET,
        delta=1e-3,
        accountant="rdp",
        reproducible=settings["reproducible"],
    )
    saved = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=INTERVAL)
    trainer = pl.Trainer(
        max_steps=steps_of(settings),
        accelerator="cpu",
        devices=settings["ranks"],
        strategy="dp_ddp" if settings["ranks"] > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[privacy, saved],
    )
    torch.manual_seed(0)
    x, y = torch.randn(400, 5), torch.arange(400) % 3
    started = any((folder / "checkpoints").glob("*.ckpt"))
    path = latest_checkpoint(trainer) if started else None
    trainer.fit(Net(), DataLoader(TensorDataset(x, y)), ckpt_path=path, weights_only=True)


def start(folder, settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(settings["ranks"]):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": settings["ranks"]}
            place |= {"TORCHELASTIC_RUN_ID": "kills", "LOCAL_WORLD_SIZE": settings["ranks"]}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if settings["ranks"] > 1:
                os.environ.update(
                    {"TORCHELASTIC_RUN_ID": "kills", **{name: str(value) for name, value in place.items()}}
                )
            output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                train(folder, rank, settings)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def output(folder):
    return "\n".join(path.read_text()[-3000:] for path in folder.glob("output*.txt"))


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def recorded(folder):
    """Steps in each of the journals."""
    return [len(read_journal(path, run_of(path))) for path in folder.glob("**/privacy_journal_*.jsonl")]


def newest(folder):
    """Steps in the ledger of the newest checkpoint."""
    paths = sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return SavedRun.read(torch.load(paths[-1], weights_only=True)).statement.ledger.num_steps


def compare(folder):
    """What must hold whenever the run is dead; returns how many steps the journal holds."""
    hashes = [line for path in folder.glob("noise*.log") for line in lines(path)]
    # Each rank 0 alone draws noise, and after the step is in every journal.
    twice = [text for text, count in Counter(hashes).items() if count > 1]
    assert not twice, f"{len(twice)} noise vectors were drawn twice"
    assert len(hashes) <= min(recorded(folder)), "noise was drawn for a step that a journal lacks"
    return max(recorded(folder))


def main(settings):
    folder = Path(settings["folder"])
    draw = random.Random(settings["ranks"])
    held = most_lost = 0
    for kill in range(settings["kills"]):
        children = start(folder, settings)
        early = kill > 0 and draw.random() < 0.15
        deadline = time.monotonic() + 60
        # Mostly somewhere in training, now and then before the first step; the first time after a checkpoint.
        steps = held + draw.randint(1, 12) + (kill == 0) * INTERVAL
        while not early and max(recorded(folder), default=0) < steps:
            assert time.monotonic() < deadline, output(folder)
            assert not any(os.waitpid(child, os.WNOHANG)[0] for child in children), output(folder)
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.3 if early else 0.01))
        draw.shuffle(children)
        for child in children:
            os.kill(child, signal.SIGKILL)
            time.sleep(draw.choice((0, 0.002)))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        # A rank may notice that another one was killed before its own turn comes.
        assert codes[0] == -signal.SIGKILL, output(folder)
        steps = compare(folder)
        assert steps >= held, "the journal has lost steps"
        # What ran before this start was lost before, or is in the checkpoint.
        lost = steps - max(newest(folder), held)
        assert 0 <= lost <= INTERVAL, f"{lost} steps were lost"
        held, most_lost = steps, max(most_lost, lost)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in start(folder, settings)]
    assert codes == [0] * settings["ranks"], output(folder)
    steps = compare(folder)
    (path,) = folder.glob("privacy_runs/*/privacy_statement.json")
    statement = json.loads(path.read_text())
    assert statement["num_steps"] == steps == steps_of(settings), (statement["num_steps"], steps)
    assert statement["epsilon"]["rdp"] <= TARGET
    print(json.dumps({"at_the_last_kill": held, "lost": statement["lost_steps"], "most_lost": most_lost}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
