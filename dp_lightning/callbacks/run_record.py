"""Writes ``result.json`` into the log directory: what a run reached, and what it cost."""

import json
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.atomic_files import replacing
from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.callbacks.signal_to_noise import SignalToNoise

# Each with its name in the file.
_CURVES = {
    "test/accuracy": "test_accuracy",
    "val/accuracy": "val_accuracy",
    "averaged/test/accuracy": "averaged_test_accuracy",
    "averaged/val/accuracy": "averaged_val_accuracy",
}


class RunRecord(pl.Callback):
    """Follows ``test/accuracy`` and ``val/accuracy`` over the evaluations and writes ``result.json`` at the end.

    If weights are averaged, the file also has the last accuracies of the average; with `SignalToNoise`, the ratio in
    the first and the last epoch.

    ``completed`` is false if an interruption or an error has ended the run; a run ended by a setting such as
    ``trainer.max_time`` is complete.

    ``evaluated_after_steps`` has the steps taken at each evaluation, the last of which may come before the last step.
    ``test_accuracy_best`` is the best over evaluations. It is chosen on the test set, so it is not an estimate of
    accuracy on new images; the file says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._curves: dict[str, list[float]] = {name: [] for name in _CURVES}
        self._steps: list[int] = []
        self._completed = False
        self._started = 0.0
        self._seconds = 0.0
        self._folder = Path()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started, self._completed = time.monotonic(), False
        # Asked now and by every rank: Lightning asks rank 0 for it, which may be alone at the end.
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if any(name in trainer.callback_metrics for name in _CURVES):
            privacy = privacy_of(trainer)
            steps = trainer.global_step if privacy is None else privacy.ledger.num_steps
            again = self._steps[-1:] == [steps]  # a resumed run that only has to be finished
            self._steps[len(self._steps) - again :] = [steps]
            for name, curve in self._curves.items():
                if name in trainer.callback_metrics:
                    curve[len(curve) - again :] = [float(trainer.callback_metrics[name])]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, completed=True)
        self._completed = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._started and not self._completed and any(self._curves.values()):
            try:
                self._write(trainer, completed=False)
            except OSError as error:
                rank_zero_warn(f"result.json could not be written: {error}")

    def state_dict(self) -> dict[str, Any]:
        return {"curves": self._curves, "steps": self._steps, "seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._curves = {name: list(state_dict["curves"].get(name, [])) for name in self._curves}
        self._steps = list(state_dict["steps"])
        self._seconds = float(state_dict["seconds"])

    def _elapsed(self) -> float:
        return self._seconds + (time.monotonic() - self._started if self._started else 0.0)

    def _write(self, trainer: pl.Trainer, *, completed: bool) -> None:
        if not trainer.is_global_zero:
            return
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        privacy = privacy_of(trainer)
        snr = next((callback.curve for callback in callbacks if isinstance(callback, SignalToNoise)), [])
        test, val = self._curves["test/accuracy"], self._curves["val/accuracy"]
        averaged = {key: self._curves[tag] for tag, key in _CURVES.items() if tag.startswith("averaged/")}
        result: dict[str, Any] = {
            "completed": completed,
            "test_accuracy_last": test[-1] if test else None,
            "test_accuracy_best": max(test) if test else None,
            "test_accuracy_best_is": "the best over evaluations, chosen on the test set",
            "test_accuracy_curve": test,
            "evaluated_after_steps": self._steps,
            "val_accuracy_last": val[-1] if val else None,
            "val_accuracy_curve": val,
            **{f"{key}_last": curve[-1] for key, curve in averaged.items() if curve},
            **{f"{key}_curve": curve for key, curve in averaged.items() if curve},
            **({"snr_first_epoch": snr[0], "snr_last_epoch": snr[-1]} if snr else {}),
            "epochs": trainer.current_epoch,
            "num_steps": trainer.global_step,
            "seconds": round(self._elapsed(), 3),
        }
        if privacy is not None and privacy.plan is not None:
            epsilon = privacy.private_run.budget.spent()
            result |= {
                "num_steps": privacy.ledger.num_steps,
                "num_steps_planned": privacy.plan.num_steps,
                "epsilon": epsilon if math.isfinite(epsilon) else "inf",
                "accountant": privacy.accountant,
                "delta": privacy.delta,
            }
        with replacing(self._folder / "result.json") as file:
            file.write((json.dumps(result, indent=2) + "\n").encode())
