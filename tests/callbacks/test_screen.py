"""The screen of a run: on a terminal of a given width, and in a file."""

import fcntl
import io
import itertools
import os
import pty
import re
import shlex
import struct
import sys
import termios
import threading
from contextlib import redirect_stdout

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, Stop, held_out, loader, privacy, trainer
from torch.nn import functional as F

from dp_lightning.callbacks import RunRecord, Screen, StopOnSignal
from dp_lightning.errors import ConfigurationError

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Measured(Plain):
    """Logs a loss of raw examples under a name that does not say so."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def val_dataloader(self):
        return held_out(60)


def fit(tmp_path, *callbacks, module=None, private=None, **settings):
    """A run of 9 steps in 3 epochs, with the screen."""
    settings = {"enable_progress_bar": True, "num_sanity_val_steps": 2, **settings}
    private = private or privacy(max_physical_batch_size=10, target_epsilon=8.0, noise_multiplier=None)
    run = trainer(tmp_path, private, *callbacks, Screen(), **settings)
    run.fit(module or Measured(), loader())
    return run


@pytest.fixture
def terminal(monkeypatch):
    """Standard output becomes a terminal of so many columns; gives what was written when it is called."""
    opened = []

    def open_terminal(columns):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        file = os.fdopen(slave, "w")
        monkeypatch.setattr(sys, "stdout", file)
        for name, value in {"TERM": "xterm", "COLUMNS": "", "LINES": ""}.items():
            monkeypatch.setenv(name, value)
        found = bytearray()

        def read():
            try:
                while part := os.read(master, 65_536):
                    found.extend(part)
            except OSError:  # the other end is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()

        def written():
            monkeypatch.undo()
            file.close()
            reader.join()
            os.close(master)
            opened.clear()
            return found.decode()

        opened.append(written)
        return written

    yield open_terminal
    for close in list(opened):
        close()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_steps_batches_budget_accuracy_and_losses_within_its_columns(
    tmp_path, terminal, monkeypatch, columns
):
    monkeypatch.setattr("dp_lightning.callbacks.screen._REFRESH", 0.0)
    written = terminal(columns)
    fit(tmp_path)
    text = written()
    lines = ESCAPES.sub("", text).replace("\r", "\n").splitlines()
    changing = [line for line in lines if re.match(r"(epoch \d|epsilon|unprotected/)", line)]
    assert max(map(len, changing)) <= columns
    shown = "\n".join(changing)
    assert re.search(r"step \d/9  batch \d of \d", shown)
    assert "epsilon at most" in shown
    assert "val/accuracy 0." in shown
    assert "unprotected/train_loss" in shown
    assert "evaluating 2 of 2" in shown
    assert re.search(r"step 9/9 .* left", shown)
    # What a file gets is not shown too.
    assert not any("  epoch " in line for line in lines)


@pytest.fixture(scope="module")
def in_a_file(tmp_path_factory):
    """What a run writes into a file, with a checkpoint, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(text):
        patch.setenv("FORCE_COLOR", "1")
        patch.chdir(folder)
        saved = ModelCheckpoint(dirpath=folder / "c d")
        fit(
            folder,
            RunRecord(),
            saved,
            enable_checkpointing=True,
            private=privacy(target_epsilon=8.0, noise_multiplier=None, reproducible=True),
        )
    return text.getvalue(), folder


def test_a_file_gets_one_plain_line_for_each_epoch(in_a_file):
    text, _ = in_a_file
    assert "\x1b" not in text
    assert "\r" not in text
    epochs = [line for line in text.splitlines() if "  epoch " in line]
    assert [re.search(r"epoch (\d/3)  step (\d/9)", line).groups() for line in epochs] == [
        ("1/3", "3/9"),
        ("2/3", "6/9"),
        ("3/3", "9/9"),
    ]
    assert all("epsilon at most" in line and "val/accuracy" in line for line in epochs)
    assert "loss" not in "".join(epochs)


def test_the_plan_comes_first_and_the_statement_last(in_a_file):
    text, _ = in_a_file
    plan, _, end = text.partition("epoch 1/3")
    for shown in (
        "60 training examples",
        "75 of 75 parameters",
        "epsilon 8 at delta 0.001 by RDP",
        "B 20",
        "T 9 steps",
    ):
        assert shown in " ".join(plan.split())
    assert "1 x CPU" in plan
    for shown in ("val/accuracy 0.", "0.001)-DP by RDP", "unprotected", "train_loss", "release"):
        assert shown in end
    # What the callback prints for a Trainer without a screen is not repeated.
    assert "Privacy plan" not in text
    assert text.count("-DP by RDP") == 1


@pytest.mark.parametrize(
    ("epochs", "every", "shown"),
    [(3, 2, "after step 6"), (2, 3, "not evaluated: no validation was due"), (2, 2, "val/accuracy 0.")],
)
def test_what_was_reached_names_its_step_where_more_followed(tmp_path, capsys, epochs, every, shown):
    fit(tmp_path, max_epochs=epochs, check_val_every_n_epoch=every)
    (reached,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reached")]
    assert shown in reached
    assert ("after step" in reached) == ("after step" in shown)


def test_a_module_that_is_never_evaluated_says_nothing_of_it(tmp_path, capsys):
    trainer(tmp_path, privacy(), Screen(), enable_progress_bar=True).fit(Plain(), loader())
    assert "reached" not in capsys.readouterr().out


def test_what_makes_a_run_unfit_for_release_is_said_before_and_after(in_a_file):
    text, _ = in_a_file
    assert "NOT FOR RELEASE" in text.partition("epoch 1/3")[0]
    release = next(line for line in text.splitlines() if line.startswith("release"))
    assert "ok" not in release.split()


def test_commands_for_the_weights_name_files_that_are_there(in_a_file):
    text, folder = in_a_file
    commands = [shlex.split(line) for line in text.splitlines() if "--ckpt" in line]
    assert len(commands) == 3
    for command in commands:
        path = next(after for before, after in itertools.pairwise(command) if before.startswith("--ckpt"))
        assert (folder / path).is_file()
        assert not os.path.isabs(path)


def test_a_run_that_ends_early_says_how_it_is_resumed(tmp_path, capsys):
    class Enough(ModelCheckpoint):
        def on_train_epoch_end(self, trainer, module):
            super().on_train_epoch_end(trainer, module)
            trainer.should_stop = True

    fit(tmp_path, Enough(dirpath=tmp_path), enable_checkpointing=True)
    assert " fit " in capsys.readouterr().out.splitlines()[-1]


def test_another_rank_shows_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.Trainer.is_global_zero", property(lambda _: False))
    fit(tmp_path, max_epochs=1)
    assert "epoch" not in capsys.readouterr().out


def test_an_error_ends_with_the_command_that_resumes(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    saved = ModelCheckpoint(dirpath=tmp_path, filename="saved")
    with pytest.raises(RuntimeError, match="stopped") as error:
        fit(tmp_path, Stop(4), saved, StopOnSignal(), enable_checkpointing=True)
    last = shlex.split(error.value.__notes__[-1].splitlines()[-1])
    assert last[-4:] == ["--config", str(tmp_path / "config.yaml"), "--ckpt_path", str(tmp_path / "saved.ckpt")]
    text = capsys.readouterr().out
    assert "stopped" in text
    assert "4 of 9 steps" in " ".join(text.split())


def test_an_error_without_a_checkpoint_suggests_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stopped") as error:
        fit(tmp_path, Stop(1), StopOnSignal())
    assert not hasattr(error.value, "__notes__")


def test_an_evaluation_needs_no_private_run_and_a_fit_does(tmp_path, capsys, terminal):
    written = terminal(80)
    run = trainer(tmp_path, Screen(), enable_progress_bar=True)
    run.test(Measured(), loader(), verbose=False)
    assert "evaluating" in ESCAPES.sub("", written())
    with pytest.raises(ConfigurationError, match="Screen needs a private run"):
        trainer(tmp_path, Screen(), enable_progress_bar=True).fit(Measured(), loader())
