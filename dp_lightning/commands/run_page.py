"""The page of a run: what it reached and what it cost, its curves, its statement, and what of it may be released."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from dp_lightning.commands.run_files import RunFiles, Snr, Spent
from dp_lightning.experiments.document import Document
from dp_lightning.experiments.event_files import Curve
from dp_lightning.experiments.figures import figure, plain, style
from dp_lightning.experiments.results import shown_epsilon

_UNPROTECTED = (
    "UNPROTECTED: the last section shows numbers that may be computed from raw training examples. No noise protects "
    "them. Do not release this page; `dpl report RUN --release` writes one without them."
)
_ON_FIGURES = "UNPROTECTED: may be computed from raw training examples"
# Of validation and test images. Numbers of any other tag may come from training examples.
_EVALUATIONS = ("val/", "test/")
# What Lightning logs of itself, and what other sections show.
_LEFT_OUT = ("epoch", "hp_metric", "privacy/epsilon", "privacy/snr")
# Points of a line, parameters of a figure, figures of the last section: more cannot be told apart.
_MOST_POINTS, _MOST_PARAMETERS, _MOST_FIGURES = 500, 40, 12
# Files of a run by the patterns of their names: what is in them, and whether they may be released with a run that is.
_FILES = {
    "privacy_statement.*": ("the guarantee and its numbers", "yes"),
    "config.yaml": ("the settings of the run", "yes; look at the paths and names in it"),
    "hparams.yaml": ("the settings of the model", "yes; look at the paths and names in it"),
    "privacy_journal_*.jsonl": ("the noise and the sample rate of each step", "yes; it names folders"),
    "snr.json": ("signal-to-noise ratios of privatized gradients", "yes"),
    "checkpoints": (
        "weights, optimizer and ledger, and the accuracies so far",
        "the weights, yes: dpl export writes them alone. The accuracies are not covered, as in result.json",
    ),
    "result.json": (
        "accuracies, steps, epsilon, seconds",
        "not covered: no noise protects validation and test images, and seconds depend on the sizes of the draws",
    ),
    "events.out.tfevents.*": ("curves for TensorBoard", "no: they hold what was logged while training"),
    "metrics.csv": ("logged curves", "no: they hold what was logged while training"),
    "predictions*.csv": ("predictions of the weights", "as you may release the images that they are of"),
    "export*": ("the network that dpl export wrote, and its statement", "yes"),
    "report.html": ("this page", "no, if it shows unprotected numbers"),
    "report_release.html": ("this page without unprotected numbers", "yes, with its accuracies, which are not covered"),
}
_SETTINGS = ("config.yaml", "hparams.yaml")


def run_page(run: RunFiles, *, release: bool = False) -> Document:
    """The page of a run.

    Args:
        release: leave out what may be computed from raw training examples, and the list of files.

    Raises:
        ConfigurationError: if matplotlib is not installed.
    """
    evaluated, others = _by_protection(run)
    page = Document(_title(run), run.folder)
    if others and not release:
        page.warn(_UNPROTECTED)
    page.say(headline(run))
    if status := _status(run):
        page.say(status)
    page.table(_facts(run), prose=True)
    _evaluations(page, evaluated)
    page.heading("Privacy spent")
    _epsilon(page, run.spent, run.not_accounted)
    page.heading("Signal and noise of the gradient")
    _snr(page, run.snr)
    _statement(page, run)
    page.heading("Configuration")
    if run.config_text is None:
        page.say("There is no config.yaml: the run was not started by dpl fit.")
    else:
        page.code(run.config_text)
    if not release:
        page.heading("What of this folder may be released")
        _releasable(page, run)
        if others:
            page.heading("Unprotected")
            _others(page, others)
    return page


def headline(run: RunFiles) -> str:
    """Test accuracy, epsilon and release in one sentence."""
    accuracy = _last(run, "test/accuracy")
    reached = "No test accuracy" if accuracy is None else f"{100 * accuracy:.1f} % test accuracy"
    return f"{reached}, {_spent(run)}. {'Fit' if run.release == 'ok' else 'NOT FIT'} for release."


def _title(run: RunFiles) -> str:
    parts = [run.config.get(part) for part in ("model", "data")]
    names = [
        str(part["class_path"]).rpartition(".")[2] for part in parts if isinstance(part, dict) and _has_class(part)
    ]
    return f"{' on '.join(names) or 'Run'} ({run.folder.resolve().name})"


def _has_class(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("class_path"), str)


def _last(run: RunFiles, tag: str) -> float | None:
    curve = run.curves.get(tag)
    return curve.values[-1] if curve is not None and curve.values else None


def _spent(run: RunFiles) -> str:
    """Epsilon at delta: that of the statement, or of the journal where there is none."""
    if run.statement is not None:
        plan = run.statement.plan
        epsilon = run.facts["epsilon"][plan.accountant]
        if not isinstance(epsilon, float | int):
            return "epsilon infinite: NOT PRIVATE"
        return f"epsilon {shown_epsilon(epsilon)} at delta {plan.delta:g}"
    if run.spent is None:
        return "epsilon unknown"
    return f"epsilon {shown_epsilon(run.spent.curve.values[-1])} at delta {run.spent.delta:g}"


def _status(run: RunFiles) -> str:
    """What a run that is not finished lacks; empty for a finished one."""
    further = 0 if run.spent is None else run.spent.further
    if further:
        return (
            f"The run was resumed from this folder: its journal has {further} steps that this statement does not "
            "count. The folder of the resumed run has the statement that counts them all."
        )
    if run.statement is None:
        return (
            "The run has not ended, or it was killed: there is no statement. Release nothing of it. Epsilon is that of "
            "its own steps; what earlier runs of its weights have spent is not known here. To resume it, start it "
            "again with --ckpt_path last."
        )
    if run.result is None or run.result["completed"] is not True:
        return (
            f"The run was interrupted or ended by an error after {run.statement.ledger.num_steps} of "
            f"{run.statement.plan.num_steps} steps. To resume it, start it again with --ckpt_path last."
        )
    return ""


def _facts(run: RunFiles) -> list[list[str]]:
    rows = [["", "this run"]]
    for tag, name in (("test/accuracy", "test accuracy"), ("val/accuracy", "validation accuracy")):
        if (value := _last(run, tag)) is not None:
            curve = run.curves[tag]
            best = f"; best {100 * max(curve.values):.1f} %, which is chosen on these images"
            rows.append([name, f"{100 * value:.1f} % at step {curve.steps[-1]}{best}"])
    statement = run.statement
    if statement is None:
        taken = "unknown" if run.spent is None else f"{run.spent.curve.steps[-1]} so far"
    else:
        taken = f"{statement.ledger.num_steps} of {statement.plan.num_steps}"
        rows.append(["protected", f"adding or removing {statement.unit_of_privacy}"])
    rows += [["privacy spent", _spent(run)], ["steps", taken]]
    kind = run.release.removeprefix("not for release: ")
    rows.append(
        ["fit for release", "yes: the weights, and what is computed from them" if kind == "ok" else f"no: {kind}"]
    )
    return rows


def _by_protection(run: RunFiles) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """The curves of evaluations, and those that may be computed from training examples."""
    named = () if run.statement is None else run.statement.unprotected
    shown = {
        tag: curve for tag, curve in run.curves.items() if tag not in _LEFT_OUT and not tag.startswith("_hparams_")
    }
    evaluated = {tag: curve for tag, curve in shown.items() if tag.startswith(_EVALUATIONS) and tag not in named}
    return evaluated, {tag: curve for tag, curve in shown.items() if tag not in evaluated}


def _evaluations(page: Document, curves: Mapping[str, Curve]) -> None:
    page.heading("Accuracy and loss")
    if not curves:
        page.say("Nothing was evaluated during the run: there is no validation set and no test set.")
        return
    page.say("On validation and test images. No noise protects those, so these numbers are outside the guarantee.")
    names = sorted(
        {tag.rpartition("/")[2] for tag in curves}, key=lambda name: (name != "accuracy", name != "loss", name)
    )
    for name in names:
        lines = {tag.rpartition("/")[0]: curve for tag, curve in curves.items() if tag.rpartition("/")[2] == name}
        factor, unit = (100, " (%)") if name == "accuracy" else (1, "")
        with figure(page, f"evaluation_{name}", f"{name.capitalize()} by steps taken", height=3) as (ax,):
            for number, (label, curve) in enumerate(lines.items()):
                _plot(ax, curve, number, plain(label), factor=factor)
            ax.set(xlabel="steps", ylabel=plain(name + unit))
            ax.legend(frameon=False, fontsize=8)


def _plot(ax: Any, curve: Curve, number: int, label: str, *, factor: float = 1, **more: Any) -> None:
    every = -(-len(curve.steps) // _MOST_POINTS)
    marker = style(number)["marker"] if len(curve.steps) == 1 else None
    heights = [factor * value for value in curve.values]
    # The last point is always drawn.
    places = [*range(0, len(heights) - 1, every), len(heights) - 1]
    xs, ys = [curve.steps[place] for place in places], [heights[place] for place in places]
    ax.plot(xs, ys, label=label, color=style(number)["color"], marker=marker, **more)


def _epsilon(page: Document, spent: Spent | None, problem: str) -> None:
    if spent is None:
        page.say(f"There is no curve of epsilon. {problem}")
        return
    caption = f"Epsilon at delta {spent.delta:g} by steps taken, from the journal, by {spent.accountant.upper()}"
    with figure(page, "epsilon", caption, height=3) as (ax,):
        _plot(ax, spent.curve, 0, "spent")
        if spent.to_come.steps:
            _plot(ax, spent.to_come, 0, "by the plan", linestyle=":")
        if spent.target is not None:
            ax.axhline(spent.target, color=style(1)["color"], linestyle="--", label=f"target {spent.target:g}")
        ax.set(xlabel="steps", ylabel="epsilon")
        ax.set_ylim(bottom=0)
        ax.legend(frameon=False, fontsize=8)


def _snr(page: Document, snr: Snr | None) -> None:
    if snr is None or not snr.whole:
        page.say("There is no snr.json: the run has no noise, or has not ended its first epoch.")
        return
    page.say(
        "The ratio ||G|| / ||N|| of the gradient to its noise, over the steps of an epoch. It is computed from "
        "privatized gradients, so the guarantee covers it. A ratio below the resolution cannot be told from none."
    )
    with figure(page, "snr", "Signal-to-noise ratio of the whole gradient by epoch", height=3) as (ax,):
        _plot(ax, Curve(list(range(1, len(snr.whole) + 1)), snr.whole), 0, "whole gradient")
        ax.set(xlabel="epoch", ylabel="signal / noise")
        ax.set_ylim(bottom=0)
    if not snr.by_parameter:
        return
    largest = sorted(snr.by_parameter, key=lambda name: -snr.by_parameter[name][0])[:_MOST_PARAMETERS]
    drawn = [name for name in snr.by_parameter if name in largest]
    which = "" if len(drawn) == len(snr.by_parameter) else f", the {len(drawn)} largest"
    caption = f"Signal-to-noise ratio by parameter{which}, in the first and the last epoch"
    with figure(page, "snr_by_parameter", caption, height=0.9 + 0.22 * len(drawn)) as (ax,):
        for number, (label, epoch) in enumerate((("first epoch", 0), ("last epoch", -1))):
            ratios = [snr.by_parameter[name][1][epoch] for name in drawn]
            known = [(ratio, place) for place, ratio in enumerate(ratios) if ratio is not None]
            if known:
                ax.plot(*zip(*known, strict=True), linestyle="", label=label, clip_on=False, zorder=3, **style(number))
        ax.set_yticks(range(len(drawn)), [plain(name) for name in drawn], fontsize=8)
        ax.set(xlabel="signal / noise", ylim=(len(drawn) - 0.5, -0.5))
        ax.set_xlim(left=0)
        ax.legend(frameon=False, fontsize=8)
    rows = [["parameter", "numbers", "first epoch", "last epoch", "resolution"]]
    steps = snr.steps[-1]
    for name, (size, parts) in snr.by_parameter.items():
        # The deviation of the estimate of snr^2 where there is no signal: see analysis/signal_to_noise.py.
        resolution = "-" if not steps else f"{(2 / (size * steps)) ** 0.25:.3f}"
        rows.append(
            [name, str(size), *("-" if part is None else f"{part:.3f}" for part in (parts[0], parts[-1])), resolution]
        )
    page.table(rows)


def _statement(page: Document, run: RunFiles) -> None:
    if run.statement is None:
        page.heading("Privacy statement")
        page.say("There is none yet. A run writes it when it ends or is interrupted.")
        return
    if run.statement_text is None:
        page.heading("Privacy statement")
        page.say("privacy_statement.md is missing; privacy_statement.json has the same content.")
        return
    page.quoted(run.statement_text)
    page.say("dpl verify and this folder check that the statement, the journal and the checkpoints belong together.")


def _releasable(page: Document, run: RunFiles) -> None:
    rows = [["file", "content", "may be released"]]
    for name in run.names:
        known = next((what for pattern, what in _FILES.items() if fnmatchcase(name, pattern)), None)
        content, verdict = known or ("not of dp_lightning", "unknown")
        if known is not None and run.release != "ok" and name not in _SETTINGS:
            verdict = "no: the run is not fit for release"
        rows.append([name, content, verdict])
    page.table(rows, prose=True)
    page.say("Publish the weights with the statement, not the folder. Each epsilon covers one run alone.")


def _others(page: Document, curves: Mapping[str, Curve]) -> None:
    page.warn(f"{_ON_FIGURES}, without noise.")
    for number, (tag, curve) in enumerate(sorted(curves.items())[:_MOST_FIGURES]):
        with figure(page, f"unprotected_{number}", f"{tag} by steps taken", height=3, warning=_ON_FIGURES) as (ax,):
            _plot(ax, curve, 1, plain(tag))
            ax.set(xlabel="steps", ylabel=plain(tag))
    if len(curves) > _MOST_FIGURES:
        page.say(f"Not drawn: {', '.join(sorted(curves)[_MOST_FIGURES:])}.")
