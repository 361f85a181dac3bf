"""The page of a run: what it reached and what it cost, its curves, its statement, and what of it may be released.

Everything comes from the files of the run's folder: nothing is computed from data or weights.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.commands.total import total_epsilon
from dp_lightning.errors import DataError, DpLightningError
from dp_lightning.experiments.document import Document
from dp_lightning.experiments.figures import figure, style
from dp_lightning.experiments.results import shown_epsilon
from dp_lightning.experiments.runs import read_facts, result_in
from dp_lightning.foreign_text import read_json
from dp_lightning.privacy.journal import journals_in
from dp_lightning.privacy.statement import PrivacyStatement

_STATEMENT = "privacy_statement.json"
# Curves of validation and test images. Numbers of any other tag may come from training examples: they are left out.
_EVALUATIONS = ("val/", "test/")
# The curves that `result.json` has, by their tags. It has those of the whole run, also after a resume in a new folder.
_IN_RESULT = {"test/accuracy": "test_accuracy_curve", "val/accuracy": "val_accuracy_curve"}
Curve = dict[int, float]
"""Numbers that were logged under one tag, by step."""


def run_page(folder: Path) -> tuple[Document, str]:
    """The page of a run and its first sentence. It has nothing that may be computed from raw training examples.

    Args:
        folder: Folder such as ``lightning_logs/version_0``.

    Raises:
        ConfigurationError: if matplotlib is not installed.
        DataError: if this is not the folder of a private run.
    """
    facts: dict[str, Any] = read_json(folder / _STATEMENT) if (folder / _STATEMENT).is_file() else {}
    if not facts and not journals_in(folder):
        raise DataError(
            f"{folder} is not the folder of a private run: it has no {_STATEMENT} and no journal. Give one such as "
            "lightning_logs/version_0."
        )
    statement = PrivacyStatement.from_dict(facts) if facts else None
    verdict = facts.get("release", "there is no privacy statement").removeprefix("not for release: ")
    config_text = text.read_text() if (text := folder / "config.yaml").is_file() else ""
    config: dict[str, Any] = yaml.safe_load(config_text) or {}
    result = result_in(folder) or {}
    named = statement.unprotected if statement is not None else ()
    curves = curves_in(folder)
    epsilon = curves.get("privacy/epsilon", {})
    for tag, key in _IN_RESULT.items():
        if result.get(key):
            curves[tag] = dict(zip(result["evaluated_after_steps"], result[key], strict=False))
    curves = {tag: curve for tag, curve in curves.items() if tag.startswith(_EVALUATIONS) and tag not in named}
    settings = facts or config.get("privacy", {})
    paid, further, problem = "epsilon unknown", 0, ""
    try:
        total = total_epsilon([folder], settings.get("delta"))
        if statement is None:
            paid = _paid(total.epsilons()[settings.get("accountant", "prv")], total.delta)
        else:
            further = total.steps[statement.run].total() - statement.ledger.num_steps
    except DpLightningError as error:
        problem = f" {error}"
    if statement is not None:
        paid = _paid(float(facts["epsilon"][facts["accountant"]]), facts["delta"])

    kinds = [str((config.get(part) or {}).get("class_path", "")).rpartition(".")[2] for part in ("model", "data")]
    page = Document(f"{' on '.join(filter(None, kinds)) or 'Run'} ({folder.resolve().name})", folder)
    accuracy = curves.get("test/accuracy")
    reached = f"{100 * accuracy[max(accuracy)]:.1f} % test accuracy" if accuracy else "No test accuracy"
    headline = f"{reached}, {paid}. {'Fit for release' if verdict == 'ok' else f'NOT FIT for release: {verdict}'}."
    page.say(headline)
    page.say(_status(statement, result, further) + problem)
    page.say(
        "Publish the weights with the statement, as dpl export writes them, and not the folder: its event files, "
        "result.json and checkpoints have numbers that no noise protects. Each epsilon covers one run alone."
    )
    page.heading("Accuracy and loss")
    _evaluations(page, curves)
    page.heading("Privacy spent")
    _epsilon(page, epsilon, settings.get("target_epsilon"))
    page.heading("Signal and noise of the gradient")
    _snr(page, read_facts(folder / "snr.json"))
    if (text := (folder / _STATEMENT).with_suffix(".md")).is_file():
        page.quoted(text.read_text())
        page.say(
            "dpl verify and this folder check that the statement, the journal and the checkpoints belong together."
        )
    page.heading("Configuration")
    page.fold("config.yaml", config_text or "There is none: the run was not started by dpl fit.")
    return page, headline


def curves_in(folder: Path) -> dict[str, Curve]:
    """The finite scalars of all TensorBoard event files of a folder, by their tags; tensorflow is not needed.

    A run that was resumed in the same folder has several files; what it logged again replaces what it had logged.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found: dict[str, Curve] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        events = EventAccumulator(str(path), size_guidance={SCALARS: 0}).Reload()
        for tag in events.Tags()[SCALARS]:
            values = {event.step: event.value for event in events.Scalars(tag) if math.isfinite(event.value)}
            found.setdefault(tag, {}).update(values)
    return found


def _paid(epsilon: float | None, delta: float) -> str:
    if epsilon is None or math.isinf(epsilon):
        return "epsilon infinite: NOT PRIVATE"
    return f"epsilon {shown_epsilon(epsilon)} at delta {delta:g}"


def _status(statement: PrivacyStatement | None, result: Mapping[str, Any], further: int) -> str:
    """What a run that is not finished lacks.

    Args:
        further: Number of steps that the journal has beyond those that the statement counts.
    """
    if further:
        return (
            f"The run was resumed from this folder: its journal has {further} steps that this statement does not "
            "count. The folder of the resumed run has the statement that counts them all."
        )
    if statement is None:
        return (
            "The run has not ended, or it was killed: there is no statement. Release nothing of it. Epsilon is that of "
            "its own steps; what earlier runs of its weights have spent is not known here. To resume it, start it "
            "again with --ckpt_path last."
        )
    if result.get("completed") is not True:
        return (
            f"The run was interrupted or ended by an error after {statement.ledger.num_steps} of "
            f"{statement.plan.num_steps} steps. To resume it, start it again with --ckpt_path last."
        )
    return "The run is finished."


def _evaluations(page: Document, curves: Mapping[str, Curve]) -> None:
    if not curves:
        page.say("Nothing was evaluated during the run: there is no validation set and no test set.")
        return
    page.say(
        "On validation and test images. No noise protects those, so these numbers are outside the guarantee, and the "
        "best of them is chosen on these images."
    )
    rows = [[tag, f"{curve[max(curve)]:.4g}", f"{max(curve.values()):.4g}"] for tag, curve in sorted(curves.items())]
    page.table([["", "last", "highest"], *rows])
    names = sorted({tag.rpartition("/")[2] for tag in curves}, key=lambda name: (name != "accuracy", name))
    with figure(page, "evaluations", "Evaluations by steps taken", panels=len(names), height=3) as axes:
        for ax, name in zip(axes, names, strict=True):
            for number, (tag, curve) in enumerate(sorted(curves.items())):
                if tag.rpartition("/")[2] == name:
                    _plot(ax, curve, number, tag)
            ax.set(xlabel="steps", ylabel=name)


def _plot(ax: Any, curve: Curve, number: int, label: str) -> None:
    marker = style(number)["marker"] if len(curve) == 1 else None
    ax.plot(*zip(*sorted(curve.items()), strict=True), label=label, color=style(number)["color"], marker=marker)


def _epsilon(page: Document, curve: Curve, target: float | None) -> None:
    if len(curve) < 2:
        page.say("There is no curve of epsilon: the run has no noise, or TensorBoard logged nothing.")
        return
    with figure(page, "epsilon", "Epsilon by steps taken", height=3) as (ax,):
        _plot(ax, curve, 0, "spent")
        if target is not None:
            ax.axhline(target, color=style(1)["color"], linestyle="--", label=f"target {target:g}")
        ax.set(xlabel="steps", ylabel="epsilon")


def _snr(page: Document, snr: Mapping[str, Any]) -> None:
    if not snr.get("snr"):
        page.say("There is no snr.json: the run has no noise, or has not ended its first epoch.")
        return
    page.say(
        "The ratio ||G|| / ||N|| of the gradient to its noise, over the steps of an epoch. It is computed from "
        "privatized gradients, so the guarantee covers it. A ratio below the resolution cannot be told from none."
    )
    with figure(page, "snr", "Signal-to-noise ratio of the whole gradient by epoch", height=3) as (ax,):
        _plot(ax, dict(enumerate(snr["snr"], start=1)), 0, "whole gradient")
        ax.set(xlabel="epoch", ylabel="signal / noise")
    rows = [["parameter", "numbers", "first epoch", "last epoch", "resolution"]]
    steps = snr["steps"][-1]
    for name, fact in snr["by_parameter"].items():
        # The deviation of the estimate of snr^2 where there is no signal: see analysis/signal_to_noise.py.
        numbers = fact["snr"][0], fact["snr"][-1], (2 / (fact["size"] * steps)) ** 0.25 if steps else None
        rows.append([name, str(fact["size"]), *("-" if number is None else f"{number:.3f}" for number in numbers)])
    page.table(rows)
