"""Writes ``result.json`` into the folder of the run: what a run reached, and what it cost."""

import json
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from dp_lightning.atomic_files import replacing
from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.callbacks.signal_to_noise import SignalToNoise

_RECORDED = ("test/accuracy", "val/accuracy")


class ResultFile(pl.Callback):
    """Follows ``test/accuracy`` and ``val/accuracy`` over the evaluations and writes ``result.json`` at the end.

    With `SignalToNoise`, the file also has the ratio in the first and the last epoch. With an `ImageClassifier`, it has
    ``test_report``, the numbers of each class in the last evaluation of test images.

    ``completed`` is false if an interruption or an error has ended the run; a run ended by a setting such as
    ``trainer.max_time`` is complete.

    ``evaluated_after_steps`` has the steps taken at each evaluation, the last of which may come before the last step.
    ``test_accuracy_best`` is the best over evaluations. It is chosen on the test set, so it is not an estimate of
    accuracy on new images.
    """

    def __init__(self) -> None:
        super().__init__()
        self._evaluations: dict[int, dict[str, float]] = {}  # by the number of steps taken before each evaluation
        self._report: dict[str, Any] = {}  # of the test images in the last evaluation
        self._started = self._seconds = 0.0
        self._folder: Path | None = None  # folder of a fit that has not ended

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.monotonic()
        privacy = privacy_of(trainer)
        # Every rank asks for it: Lightning takes its log folder from rank 0, which may be alone at the end.
        log = Path(trainer.log_dir or trainer.default_root_dir)
        self._folder = log if privacy is None else privacy.private_run.folder

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {name: float(trainer.callback_metrics[name]) for name in _RECORDED if name in trainer.callback_metrics}
        if found and not trainer.sanity_checking:
            privacy = privacy_of(trainer)
            self._evaluations[trainer.global_step if privacy is None else privacy.ledger.num_steps] = found
            self._report = getattr(pl_module, "test_report", {})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, completed=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._write(trainer, completed=False)

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self._evaluations, "report": self._report, "seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._evaluations, self._seconds = dict(state_dict["evaluations"]), state_dict["seconds"]
        self._report = state_dict.get("report", {})

    def _elapsed(self) -> float:
        return self._seconds + (time.monotonic() - self._started if self._folder is not None else 0.0)

    def _write(self, trainer: pl.Trainer, *, completed: bool) -> None:
        folder, seconds = self._folder, self._elapsed()
        self._folder = None
        if folder is None or not trainer.is_global_zero or not (completed or self._evaluations):
            return
        result: dict[str, Any] = {"completed": completed, "evaluated_after_steps": list(self._evaluations)}
        for name in _RECORDED:
            curve = [found[name] for found in self._evaluations.values() if name in found]
            key = name.replace("/", "_")
            result |= {f"{key}_last": curve[-1] if curve else None, f"{key}_curve": curve}
        result["test_accuracy_best"] = max(result["test_accuracy_curve"], default=None)
        result |= self._report
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if snr := next((callback.curve for callback in callbacks if isinstance(callback, SignalToNoise)), []):
            result |= {"snr_first_epoch": snr[0], "snr_last_epoch": snr[-1]}
        result |= {"epochs": trainer.current_epoch, "num_steps": trainer.global_step, "seconds": round(seconds, 3)}
        privacy = privacy_of(trainer)
        if privacy is not None and privacy.plan is not None:
            epsilon = privacy.private_run.budget.spent()
            result |= {
                "num_steps": privacy.ledger.num_steps,
                "num_steps_planned": privacy.plan.num_steps,
                "epsilon": epsilon if math.isfinite(epsilon) else "inf",
                "accountant": privacy.accountant,
                "delta": privacy.delta,
            }
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in result.items())
        with replacing(folder / "result.json") as file:
            file.write(f"{{\n{lines}\n}}\n".encode())
