"""The progress bar of a run: on a terminal of a given width, and in a file."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

from plain_run import Plain, held_out, loader, privacy, trainer
from torch.nn import functional as F

from dp_lightning.callbacks import PrivateProgressBar

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Measured(Plain):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        self.log("unprotected/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def val_dataloader(self):
        return held_out(60)


def fit(tmp_path, **settings):
    """A run of 9 steps in 3 epochs, with the bar; a step has about two physical batches."""
    private = privacy(max_physical_batch_size=10, target_epsilon=8.0, noise_multiplier=None)
    run = trainer(tmp_path, private, PrivateProgressBar(), enable_progress_bar=True, **settings)
    run.fit(Measured(), loader())


def terminal(monkeypatch):
    """Standard output becomes a terminal of 80 columns, until the function is called that returns what was written."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    file = os.fdopen(slave, "w")
    monkeypatch.setattr(sys, "stdout", file)
    for name, value in {"TERM": "xterm", "COLUMNS": "", "LINES": ""}.items():
        monkeypatch.setenv(name, value)
    found = bytearray()

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(master, 65_536):
                found.extend(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def written():
        monkeypatch.undo()
        file.close()
        reader.join()
        os.close(master)
        return ESCAPES.sub("", found.decode()).replace("\r", "\n").splitlines()

    return written


def test_a_terminal_shows_steps_physical_batches_epsilon_and_accuracy_within_its_columns(tmp_path, monkeypatch):
    written = terminal(monkeypatch)
    fit(tmp_path)
    lines = written()
    bars = [line for line in lines if re.match(r"(Epoch|Validation)", line)]
    assert max(map(len, bars)) <= 80
    assert any(re.search(r"^Epoch 0, batch \d of \d: .* 1/3 ", line) for line in bars)
    last = bars[-1]  # it stays
    for shown in ("Epoch 2: 100%", "3/3", "epsilon=8.000", "val/accuracy=0."):
        assert shown in last
    assert lines.index(last) < next(number for number, line in enumerate(lines) if "-DP by RDP" in line)
    assert not any(re.match(r"\d\d:\d\d:\d\d", line) for line in lines)


def test_a_file_gets_a_plain_line_for_each_epoch_and_no_number_of_physical_batches(tmp_path, capsys):
    fit(tmp_path)
    text = "".join(capsys.readouterr())
    assert "\x1b" not in text
    assert "\r" not in text
    assert "batch" not in text
    epochs = re.findall(
        r"^\d\d:\d\d:\d\d  Epoch (\d), step (\d), epsilon at most [\d.]+, val/accuracy [\d.]+", text, re.M
    )
    assert epochs == [("0", "3"), ("1", "6"), ("2", "9")]
    assert not re.search("Epoch.*unprotected", text)


def test_another_rank_shows_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.Trainer.is_global_zero", property(lambda _: False))
    fit(tmp_path, max_epochs=1)
    assert capsys.readouterr().out == ""
