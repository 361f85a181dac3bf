"""What `dpl init` prints: what it found, what it wrote, and what to do next."""

import shlex
from pathlib import Path

from dp_lightning.commands.starting_content import from_scratch
from dp_lightning.commands.starting_file import Content, times
from dp_lightning.commands.starting_model import Features
from dp_lightning.datamodules.file_source import listed
from dp_lightning.datamodules.survey import Survey, spread
from dp_lightning.foreign_text import printable

# Classes that have a line each.
_SHOWN = 20
# Images, or pairs of equal ones, that are named.
_NAMED = 3
# The noise of a step over C from which a run cannot be expected to learn.
_HOPELESS = 10.0


def report(survey: Survey, content: Content, *, seconds: float, bad_files: Path | None, out: Path) -> str:
    """The whole text.

    Args:
        seconds: what reading took.
        bad_files: the file that lists all bad ones, if there are many.
        out: the file that was written.
    """
    found, bad = _found(survey, seconds), _bad(survey, bad_files)
    parts = [found, bad, _chosen(survey, content, out), _next(survey, content, bad_files)]
    return "\n\n".join(part for part in parts if part)


def _found(survey: Survey, seconds: float) -> str:
    splits = list(survey.looks)
    total = sum(map(len, survey.looks.values()))
    lines = [f"Read {total:,} images in {seconds:.1f} s ({total / max(seconds, 0.001):,.0f} per second)."]
    counts = {split: survey.counts(split) for split in splits}
    width = max(len(printable(name)) for name in [*survey.class_names[:_SHOWN], "smallest class"])
    lines += ["", f"{'class':{width}}" + "".join(f"{split:>10}" for split in splits)]
    for label, name in enumerate(survey.class_names[:_SHOWN]):
        lines.append(f"{printable(name):{width}}" + "".join(f"{counts[split][label]:>10,}" for split in splits))
    if len(survey.class_names) > _SHOWN:
        lines.append(f"and {len(survey.class_names) - _SHOWN:,} more classes")
        lines.append(f"{'smallest class':{width}}" + "".join(f"{min(counts[split]):>10,}" for split in splits))
    lines.append(f"{'all':{width}}" + "".join(f"{sum(counts[split]):>10,}" for split in splits))
    lines += ["", f"width   {spread([look.width for look in survey.readable])} pixels"]
    lines.append(f"height  {spread([look.height for look in survey.readable])} pixels")
    lines.append("kinds   " + ", ".join(f"{count:,} in {kind}" for kind, count in survey.kinds.items()))
    if (persons := survey.images_of_persons) is not None:
        lines.append(f"persons {len(persons):,}, with {spread(list(persons.values()))} images each")
    lines += _repeats(survey)
    if shared := survey.shared:
        lines.append(f"evaluation images that are also in the training set: {len(shared):,}")
        lines += _some([printable(survey.files[split][place]) for split, place in shared if split in survey.files])
    return "\n".join(lines)


def _repeats(survey: Survey) -> list[str]:
    """The first few files that hold the same image, those of different classes before others."""
    if not survey.repeats:
        return []
    labels, files = survey.labels["train"], survey.files.get("train")
    pairs = sorted(survey.repeats, key=lambda pair: labels[pair[0]] == labels[pair[1]])
    differ = sum(labels[first] != labels[second] for first, second in pairs)
    among = f", {differ:,} of them in another class" if differ else ""
    lines = [f"repeats in the training set: {len(pairs):,}{among}; each counts as an example of its own"]
    if files is not None:
        lines += _some([f"{printable(files[first])} = {printable(files[second])}" for first, second in pairs])
    return lines


def _some(lines: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = [f"  and {len(lines) - _NAMED:,} more"] if len(lines) > _NAMED else []
    return [*(f"  {line}" for line in lines[:_NAMED]), *more]


def _bad(survey: Survey, bad_files: Path | None) -> str:
    if not survey.bad:
        return ""
    where = "" if bad_files is None else f"; {printable(str(bad_files))} lists all of them"
    files = "1 file" if len(survey.bad) == 1 else f"{len(survey.bad):,} files"
    return f"{files} cannot be read{where}:\n{listed(survey.bad)}"


def _chosen(survey: Survey, content: Content, out: Path) -> str:
    start, plan = content.start, content.start.plan
    features = isinstance(content.model, Features)
    what = "one layer on features of a pretrained network" if features else "a network from scratch"
    if isinstance(content.model, Features) and content.model.scatters:
        what = "one layer on scattering coefficients"
    lines = [
        f"Wrote {printable(str(out))}: {what}.",
        f"  epsilon {content.epsilon:g}, delta {plan.delta:g}, N {plan.num_train:,}, B {plan.expected_batch_size:,}, "
        f"{plan.num_steps:,} steps, sigma {plan.noise_multiplier:.2f}",
        f"  {start.num_parameters:,} parameters: the noise of a step is {times(start.noise_norm)} as a gradient may be",
    ]
    if features:
        other = from_scratch(content, survey).start
        longer, sigma = times(other.noise_norm), f"at sigma {other.plan.noise_multiplier:.2f}"
        lines.append(f"  From scratch (--from-scratch) there are {other.num_parameters:,}: {longer} as that, {sigma}")
    if start.noise_norm > _HOPELESS:
        lines.append(
            "  So much noise probably leaves nothing to learn: the run would spend its epsilon for a guess.\n"
            "  Collect more images, or raise --epsilon."
        )
    elif not features and start.noise_norm > 1:
        lines.append(
            "  That is more noise than signal, so expect little. With features there are fewer parameters: leave out\n"
            "  --from-scratch, or give --backbone, such as scattering, which needs no weights."
        )
    if content.images_per_person is not None:
        lines.append(
            "  It protects persons: each folder inside a class folder, or each id, is one. If they are not persons,\n"
            "  move the images out of these folders, or give no table, and run it again."
        )
    return "\n".join(lines)


def _next(survey: Survey, content: Content, bad_files: Path | None) -> str:
    steps = []
    if bad_files is not None:
        name = printable(shlex.quote(str(bad_files)))
        steps.append(f"Replace or remove the bad files, or all of them: cut -f1 {name} | xargs -d '\\n' rm --")
    elif survey.bad:
        steps.append("Replace or remove the bad files.")
    if survey.repeats or survey.shared:
        steps.append("Look at the images that are there twice, and remove those that are there by mistake.")
    if isinstance(content.model, Features) and content.model.weights is None and not content.model.scatters:
        steps.append(
            "The first run downloads the weights. Without a network, give their file (dpl init ... --weights FILE),\n"
            "     or use features that need none (--backbone scattering)."
        )
    steps.append(f"Read the file, then train: dpl fit --config {content.name}")
    numbered = [f"  {number}. {step}" for number, step in enumerate(steps, 1)]
    return "\n".join(
        [
            "Next:",
            *numbered,
            "",
            "All numbers above are computed from the private images and are for their owner. N, the names of the",
            "classes and the settings in the file become public with what is released of the run.",
        ]
    )
