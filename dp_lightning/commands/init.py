"""`dpl init`: read a folder of images or an .npz file, and write a configuration that fits it."""

import argparse
import mimetypes
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from dp_lightning.commands.starting_configuration import Model, Start
    from dp_lightning.datamodules.survey import Survey

# Classes that have a line each; images, or pairs of equal ones, that are named.
_SHOWN, _NAMED = 20, 3
# The noise of a step over C from which a run cannot be expected to learn.
_HOPELESS = 10.0


def main(arguments: list[str]) -> None:
    """Read the data, write the configuration, and print what was found and what to do next.

    Raises:
        ConfigurationError: naming the option and the fix.
        DataError: the data has another layout or one class, or none of its images can be read.
    """
    options = _parser().parse_args(arguments[1:], argparse.Namespace(given=arguments[1:]))
    out = options.out or Path(f"{options.data.resolve().stem or 'images'}.yaml")
    if options.from_scratch and (options.weights or options.backbone):
        raise ConfigurationError("--from-scratch uses no pretrained network: leave out --weights and --backbone.")
    if options.weights is not None and not Path(options.weights).is_file():
        raise ConfigurationError(f"--weights {options.weights} is not a file; give the path of the network's weights.")
    if out.exists() and not options.force:
        raise ConfigurationError(f"{out} exists. Give another file with --out, or --force to overwrite it.")
    require_writable(out.parent, "--out")
    # These import torch.
    from dp_lightning.commands.starting_configuration import BACKBONE, FEW_IMAGES, Model, configuration
    from dp_lightning.datamodules import ImageFolder, NpzImages
    from dp_lightning.datamodules.survey import Survey

    class_path, settings = _data(options)
    began = time.monotonic()
    survey = Survey.of(ImageFolder(**settings) if class_path == "ImageFolder" else NpzImages(**settings))
    seconds = time.monotonic() - began
    if len(survey.class_names) < 2:
        raise DataError(
            f"{options.data} has images of one class, {survey.class_names[0]}; a classifier tells at least 2 classes "
            "apart."
        )
    few = len(survey.readable) < FEW_IMAGES
    if options.from_scratch or not (few or options.backbone or options.weights):
        model = Model.from_scratch(len(survey.readable))
    else:
        model = Model.on_features(options.backbone or BACKBONE, options.weights)
    name, budget = shlex.quote(str(out)), {"epsilon": options.epsilon, "delta": options.delta}
    text, start = configuration(survey, (class_path, settings), model, name=name, **budget)
    with replacing(out) as file:
        file.write(text.encode())
    for part in (_found(survey, seconds), _chosen(survey, model, start, out), _next(survey, model, name)):
        print("\n".join(part), end="\n\n")
    print(
        "All numbers above are computed from the private images and are for their owner. N, the names of the\n"
        "classes and the settings in the file become public with what is released of the run."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl init", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("data", type=Path, metavar="DATA", help="a folder with train/<class>/<images>, or an .npz file")
    add("--out", type=Path, metavar="FILE", help="the configuration (default: the name of DATA with .yaml, here)")
    add("--force", action="store_true", help="overwrite it")
    add("--epsilon", type=float, default=3.0, help="the privacy budget (default: 3)")
    add("--delta", type=float, help="default: the largest power of ten for which N delta is at most 0.1")
    add("--from-scratch", "--from_scratch", action="store_true", help="use no pretrained network")
    add("--backbone", metavar="NAME", help="the pretrained network, by its name in timm's registry, or scattering")
    add("--weights", metavar="FILE", help="its weights (default: the first run downloads those of timm)")
    persons = "a .csv file that says which person each image belongs to"
    add("--group-file", "--group_file", type=Path, metavar="FILE", help=persons)
    add("--group-column", "--group_column", metavar="NAME", help="its column with the person ids")
    add("--file-column", "--file_column", metavar="NAME", default="file", help="its column with the images (file)")
    return parser


def _data(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The data module and those of its settings that say where the images are and whose they are."""
    root, table = options.data, options.group_file
    if not root.exists():
        raise DataError(f"{root} does not exist; give a folder of images, or an .npz file.")
    if root.suffix.lower() == ".npz":
        return "NpzImages", {"path": str(root)}
    if not root.is_dir():
        raise DataError(f"{root} is neither a folder nor an .npz file.")
    _require_train(root, options.given)
    settings: dict[str, Any] = {"root": str(root)}
    if table is not None:
        if options.group_column is None:
            raise ConfigurationError(f"--group-file {table}: name its column with the person ids by --group-column.")
        columns = {"group_column": options.group_column, "file_column": options.file_column}
        settings |= {"group_file": str(table), **columns}
    elif _has_folders_of_persons(root / "train"):
        settings["group_folders"] = True
    return "ImageFolder", settings


def _require_train(root: Path, given: list[str]) -> None:
    """Say how to make the layout of ImageFolder from a folder of classes without copying an image."""
    if (root / "train").is_dir():
        return
    told = f"{root / 'train'} is missing. Put the images into {root}/train/<class>/, and those for the test into "
    told += f"{root}/test/<class>/."
    if any(_is_image(path) for folder in _folders(root) for path in folder.iterdir()):
        new = f"{root.resolve().name}_run"
        again = shlex.join(["dpl", "init", *(new if Path(each) == root else each for each in given)])
        link = f"ln -s {shlex.quote(str(root.resolve()))} {shlex.quote(f'{new}/train')}"
        told += " Or leave them where they are and hold out a tenth for validation:\n"
        told += f"  mkdir {shlex.quote(new)} && {link} && {again}"
    raise DataError(told)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _is_image(path: Path) -> bool:
    kind, _ = mimetypes.guess_type(path.name, strict=False)
    return kind is not None and kind.startswith("image/")


def _has_folders_of_persons(train: Path) -> bool:
    """Whether the images are in folders inside the class folders, and none beside them."""
    classes = _folders(train)
    inside = (path for name in classes for person in _folders(name) for path in person.iterdir())
    return not any(_is_image(path) for name in classes for path in name.iterdir()) and any(map(_is_image, inside))


def _found(survey: "Survey", seconds: float) -> Iterator[str]:
    """What is in the data."""
    total = len(survey.looks)
    yield f"Read {total:,} images in {seconds:.1f} s ({total / max(seconds, 0.001):,.0f} per second)."
    counts = {split: survey.counts(split) for split in survey.splits}
    rows = [("class", *survey.splits)]
    rows += [(name, *map(str, each)) for name, *each in zip(survey.class_names, *counts.values(), strict=True)][:_SHOWN]
    if len(survey.class_names) > _SHOWN:
        rows.append((f"smallest of all {len(survey.class_names)}", *(str(min(each)) for each in counts.values())))
    rows.append(("all", *(str(sum(each)) for each in counts.values())))
    width = max(len(name) for name, *_ in rows)
    yield ""
    yield from (f"{name:{width}}" + "".join(f"{each:>10}" for each in others) for name, *others in rows)
    yield ""
    yield f"shorter side: {survey.median_side} pixels (median); {'grey' if survey.is_grey else 'in colour'}"
    if (persons := survey.images_of_persons) is not None:
        yield f"persons: {len(persons):,}, with up to {max(persons.values())} images each"
    # Those of different classes before others.
    pairs = sorted(survey.repeats, key=lambda pair: pair[0].label == pair[1].label)
    differ = sum(one.label != other.label for one, other in pairs)
    if pairs:
        among = f", {differ:,} of them in another class" if differ else ""
        yield f"repeats in the training set: {len(pairs):,}{among}; each counts as an example of its own"
        yield from (f"  {one.path} = {other.path}" for one, other in pairs[:_NAMED] if one.path)
    if shared := survey.shared:
        yield f"evaluation images that are also in the training set: {len(shared):,}"
        yield from (f"  {look.path}" for look in shared[:_NAMED] if look.path)
    if survey.bad:
        yield f"files that cannot be read: {len(survey.bad):,}"
        yield from (f"  {look.path}: {look.problem}" for look in survey.bad)


def _chosen(survey: "Survey", model: "Model", start: "Start", out: Path) -> Iterator[str]:
    """What was written, and what to expect of it."""
    from dp_lightning.commands.starting_configuration import MOST_PUBLISHED

    plan, what = start.plan, "one layer on features of a pretrained network"
    if not model.is_pretrained:
        what = "one layer on scattering coefficients" if model.scatters else "a network from scratch"
    yield f"Wrote {out}: {what}."
    yield (
        f"  epsilon {plan.target_epsilon:g}, delta {plan.delta:g}, N {plan.num_train:,}, "
        f"B {plan.expected_batch_size:,}, {plan.num_steps:,} steps, sigma {plan.noise_multiplier:.2f}"
    )
    yield (
        f"  {start.num_parameters:,} parameters: the noise of a step is {start.noise_norm:,.2f} times as long as a "
        "gradient may be"
    )
    if (published := plan.num_train * plan.delta) > MOST_PUBLISHED * (1 + 1e-9):
        yield (
            f"  N delta is {published:.2g}: the guarantee allows a method that publishes so many persons or images\n"
            f"  whole. Choose a delta of at most {MOST_PUBLISHED / plan.num_train:.1g}, so that N delta is at most "
            f"{MOST_PUBLISHED:g}."
        )
    if start.noise_norm > _HOPELESS:
        yield "  So much noise probably leaves nothing to learn: the run would spend its epsilon for a guess."
        yield "  Collect more images, or raise --epsilon."
    elif model.backbone is None and start.noise_norm > 1:
        yield "  That is more noise than signal, so expect little. With features there are fewer parameters: leave out"
        yield "  --from-scratch, or give --backbone, such as scattering, which needs no weights."
    if survey.images_of_persons is not None:
        yield "  It protects persons: each folder inside a class folder, or each id, is one. If they are not persons,"
        yield "  move the images out of these folders, or give no table, and run it again."


def _next(survey: "Survey", model: "Model", name: str) -> Iterator[str]:
    """What to do before the first run."""
    steps = []
    if survey.bad:
        steps.append("Replace or remove the files that cannot be read.")
    if survey.repeats or survey.shared:
        steps.append("Look at the images that are there twice, and remove those that are there by mistake.")
    if model.is_pretrained and model.weights is None:
        steps.append(
            "The first run downloads the weights. Without a network, give their file (dpl init ... --weights FILE),\n"
            "     or use features that need none (--backbone scattering)."
        )
    steps.append(f"Read the file, then train: dpl fit --config {name}")
    yield "Next:"
    yield from (f"  {number}. {step}" for number, step in enumerate(steps, 1))
