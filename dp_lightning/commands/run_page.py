"""The page of a run: what it reached and what it cost, its evaluations, its statement and its configuration.

Everything comes from the files of the run's folder: nothing is computed from data or weights.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dp_lightning.errors import DataError
from dp_lightning.experiments.document import Document, figure, style
from dp_lightning.experiments.results import shown_epsilon
from dp_lightning.experiments.runs import facts_in
from dp_lightning.foreign_text import read_json
from dp_lightning.privacy.statement import STATEMENT_FILE, PrivacyStatement

# Curves of validation and test images. Numbers of any other tag may come from training examples: they are left out.
_EVALUATIONS = ("val/", "test/")
_OUTSIDE = "No noise protects those: these numbers are outside the guarantee."
Curve = dict[int, float]
"""Numbers that were logged under one tag, by step."""


def run_page(folder: Path) -> tuple[Document, str]:
    """The page of a run and its first sentence. It has nothing that may be computed from raw training examples.

    Args:
        folder: Folder such as ``lightning_logs/version_0``.

    Raises:
        ConfigurationError: if matplotlib is not installed.
        DataError: if this is not the folder of a private run, or the run has no statement.
    """
    if not (folder / STATEMENT_FILE).is_file():
        raise DataError(
            f"{folder} has no {STATEMENT_FILE}. Either its run has not ended or was killed: release nothing of it; "
            f"`dpl account {folder}` prints what it has spent, and its command with --ckpt_path last resumes it. Or it "
            "is not the folder of a private run: give one such as lightning_logs/version_0."
        )
    facts: dict[str, Any] = read_json(folder / STATEMENT_FILE)
    statement = PrivacyStatement.from_dict(facts)
    verdict = facts["release"].removeprefix("not for release: ")
    result = facts_in(folder / "result.json")
    accuracy, epsilon = result.get("test_accuracy_last"), facts["epsilon"][facts["accountant"]]

    page = Document(f"Run {folder.resolve().name}", folder)
    reached = "No test accuracy" if accuracy is None else f"{100 * accuracy:.1f} % test accuracy"
    if (auroc := result.get("test_auroc")) is not None:
        reached += f", mean AUROC {auroc:.3f}"
    paid = "infinite: NOT PRIVATE" if epsilon == "inf" else f"{shown_epsilon(epsilon)} at delta {facts['delta']:g}"
    released = "Fit for release" if verdict == "ok" else f"NOT FIT for release: {verdict}"
    headline = f"{reached}, epsilon {paid}. {released}."
    page.say(headline)
    page.say(
        "The run is finished."
        if result.get("completed")
        else f"The run was interrupted or ended by an error after {statement.ledger.num_steps} of "
        f"{statement.plan.num_steps} steps. To resume it, start it again with --ckpt_path last."
    )
    publish = "the weights with the statement, as dpl export writes them, and not the folder"
    covers = "Epsilon covers the choice among runs" if statement.choice else "Each epsilon covers one run alone"
    page.say(
        f"Publish {publish if verdict == 'ok' else 'nothing of the folder'}: its event files, result.json and "
        f"checkpoints have numbers that no noise protects. {covers}."
    )
    page.heading("Accuracy and loss")
    curves = {tag: curve for tag, curve in curves_in(folder).items() if tag.startswith(_EVALUATIONS)}
    _evaluations(page, {tag: curve for tag, curve in curves.items() if tag not in statement.unprotected})
    if result.get("test_by_class"):
        _by_class(page, result)
    page.heading("Signal and noise of the gradient")
    _snr(page, facts_in(folder / "snr.json"), correlated=statement.plan.bands > 1)
    if (statement_text := (folder / STATEMENT_FILE).with_suffix(".md")).is_file():
        page.quoted(statement_text.read_text())
        page.say("dpl verify checks that the statement, the journal and the checkpoints belong together.")
    if (configuration := folder / "config.yaml").is_file():
        page.fold("Configuration: config.yaml", configuration.read_text())
    return page, headline


def curves_in(folder: Path) -> dict[str, Curve]:
    """The finite scalars of all TensorBoard event files of a folder, by their tags; tensorflow is not needed.

    A run that was resumed in the same folder has several files; what it logged again replaces what it had logged.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found: dict[str, list[Any]] = {}
    for path in folder.glob("events.out.tfevents.*"):
        events = EventAccumulator(str(path), size_guidance={SCALARS: 0}).Reload()
        for tag in events.Tags()[SCALARS]:
            found.setdefault(tag, []).extend(event for event in events.Scalars(tag) if math.isfinite(event.value))
    in_time = [(tag, sorted(events, key=lambda event: event.wall_time)) for tag, events in sorted(found.items())]
    return {tag: {event.step: event.value for event in events} for tag, events in in_time if events}


def _evaluations(page: Document, curves: Mapping[str, Curve]) -> None:
    if not curves:
        page.say("Nothing was evaluated during the run, or nothing was logged for TensorBoard.")
        return
    page.say(f"On validation and test images. {_OUTSIDE}")
    names = sorted({tag.rpartition("/")[2] for tag in curves}, key=lambda name: (name != "accuracy", name))
    with figure(page, "evaluations", "Evaluations by steps taken", panels=len(names)) as axes:
        for ax, name in zip(axes, names, strict=True):
            for number, (tag, curve) in enumerate(curves.items()):
                if tag.rpartition("/")[2] == name:
                    ax.plot(*zip(*sorted(curve.items()), strict=True), label=tag, **style(number))
            ax.set(xlabel="steps", ylabel=name)


def _by_class(page: Document, result: Mapping[str, Any]) -> None:
    rows = [list(row.values()) for row in result["test_by_class"]]
    names = [str(row[0]) for row in rows]
    page.heading("Test images by class")
    page.say(f"From the last evaluation of the test images. {_OUTSIDE} A dash: these images do not define the number.")
    page.table([list(result["test_by_class"][0]), *([_shown(value) for value in row] for row in rows)])
    page.say(
        f"Means over classes: AUROC {_shown(result.get('test_auroc'))}, average precision "
        f"{_shown(result.get('test_average_precision'))}. Expected calibration error, the mean distance between the "
        f"probability of an answer and the share of such answers that are right: "
        f"{_shown(result['test_calibration_error'])}."
    )
    if table := result.get("test_confusion"):
        page.say("Images by true class (rows) and predicted class (columns):")
        page.table([["", *names], *([name, *map(str, row)] for name, row in zip(names, table, strict=True))])


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _snr(page: Document, snr: Mapping[str, Any], *, correlated: bool) -> None:
    if not snr.get("snr"):
        page.say("There is no snr.json: the run has no noise, or has not ended its first epoch.")
        return
    page.say(
        "The ratio ||G|| / ||N|| of the gradient to its noise, over the steps of an epoch. It is computed from "
        "privatized gradients, so the guarantee covers it. A ratio below the resolution cannot be told from none."
    )
    rows = [["parameter", "numbers", "first epoch", "last epoch", "resolution"]]
    # The steps of an epoch with correlated noise tell at least as much as one of them.
    steps, by_parameter = min(snr["steps"][-1], 1) if correlated else snr["steps"][-1], snr["by_parameter"]
    whole = {"size": sum(fact["size"] for fact in by_parameter.values()), "snr": snr["snr"]}
    for name, fact in {"whole gradient": whole, **by_parameter}.items():
        # The deviation of the estimate of snr^2 where there is no signal: see analysis/spectra.py.
        numbers = fact["snr"][0], fact["snr"][-1], (2 / (fact["size"] * steps)) ** 0.25 if steps else None
        rows.append([name, str(fact["size"]), *("-" if number is None else f"{number:.3f}" for number in numbers)])
    page.table(rows)
