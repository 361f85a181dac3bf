"""`dpl init`: read a folder of images or an .npz file, and write a configuration that fits it."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from dp_lightning.datamodules.survey import Look, Survey

# Classes that have a line each; images, or pairs of equal ones, that are named.
_SHOWN, _NAMED = 20, 3


def main(arguments: list[str]) -> None:
    """Read the data, write the configuration, and print what was found and what to do next.

    Raises:
        ConfigurationError: naming the option and the fix.
        DataError: the data has another layout or one class, or none of its images can be read.
    """
    options = _parser().parse_args(arguments[1:])
    out = options.out or Path(f"{options.data.resolve().stem or 'images'}.yaml")
    if out.exists():
        raise ConfigurationError(f"{out} exists. Give another file with --out, or remove it.")
    require_writable(out.parent, "--out")
    # These import torch.
    from dp_lightning import datamodules
    from dp_lightning.commands.starting_configuration import BACKBONE, FEW_IMAGES, Model, configuration, proposed_window
    from dp_lightning.datamodules.survey import Survey
    from dp_lightning.models.pretrained import require_weights

    require_weights(options.weights)
    class_path, settings = _data(options, arguments[1:])
    survey = Survey.of(getattr(datamodules, class_path)(**settings))
    if len(survey.class_names) < 2:
        raise DataError(
            f"{options.data} has images of one class, {', '.join(survey.class_names)}; a classifier tells at least "
            "2 classes apart."
        )
    if survey.values is not None:
        settings["window"] = proposed_window(*survey.values)
    few = len(survey.readable) < FEW_IMAGES
    if options.from_scratch or not (few or options.backbone or options.weights):
        model = Model.from_scratch(len(survey.readable))
    else:
        model = Model.on_features(options.backbone or BACKBONE, options.weights)
    name, budget = shlex.quote(str(out)), {"epsilon": options.epsilon, "delta": options.delta}
    text, warnings = configuration(survey, (class_path, settings), model, name=name, **budget)
    with replacing(out) as file:
        file.write(text.encode())
    part = "two convolutions" if model.class_path == "SmallCNNModule" else "one layer"
    trained = "a network from scratch" if model.backbone is None else f"{part} on features of {model.backbone}"
    if class_path == "ImageTable":
        print("\n".join(f"{name}: {value}" for name, value in settings.items() if name not in ("root", "window")))
        print("If this is wrong, give --label-file, --label-column, --image-column and --person-column.\n")
    print("\n".join([*_found(survey), "", f"Wrote {out}: {trained}.", *(f"  {each}" for each in warnings)]))
    print(
        f"\nNext: read the file, then train: dpl fit --config {name}\n"
        "All numbers above are computed from the private images and are for their owner. N, the names of the\n"
        "classes and the settings in the file become public with what is released of the run."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl init", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("data", type=Path, metavar="DATA", help="a folder with train/<class>/<images>, or an .npz file")
    add("--out", type=Path, metavar="FILE", help="the configuration (default: the name of DATA with .yaml, here)")
    add("--epsilon", type=float, default=3.0, help="the privacy budget (default: 3)")
    add("--delta", type=float, help="default: the largest power of ten for which N delta is at most 0.1")
    network = parser.add_mutually_exclusive_group()
    network.add_argument("--from-scratch", "--from_scratch", action="store_true", help="use no pretrained network")
    known = "the pretrained network, by its name in timm's registry, or scattering"
    network.add_argument("--backbone", metavar="NAME", help=known)
    add("--weights", metavar="FILE", help="its weights (default: the first run downloads those of timm)")
    persons = "a .csv file that says which person each image belongs to"
    add("--group-file", "--group_file", type=Path, metavar="FILE", help=persons)
    person = "the column with the person ids, of this table or of the table of labels"
    add("--person-column", "--group-column", "--group_column", dest="group_column", metavar="NAME", help=person)
    labels = "a .csv file that says what each image shows (default: one in or beside DATA, if folders do not say it)"
    add("--label-file", "--label_file", type=Path, metavar="FILE", help=labels)
    label = "its column with the classes, or several columns of 0 and 1"
    add("--label-column", "--label_column", nargs="+", metavar="NAME", help=label)
    add("--image-column", "--image_column", metavar="NAME", help="the column of a table with the images")
    return parser


def _data(options: argparse.Namespace, given: list[str]) -> tuple[str, dict[str, Any]]:
    """The data module and those of its settings that say where the images are, what they show and whose they are."""
    from dp_lightning.commands.table_of_labels import settings_of_table
    from dp_lightning.datamodules.listing import SPLIT_NAMES, files_in, what_is_in

    root, table = options.data, options.group_file
    if not root.exists():
        raise DataError(f"{root} does not exist; give a folder of images, or an .npz file.")
    if root.suffix.lower() == ".npz":
        return "NpzImages", {"path": str(root)}
    if not root.is_dir():
        raise DataError(f"{root} is neither a folder nor an .npz file.")
    settings: dict[str, Any] = {"root": str(root)}
    if table is not None and options.group_column is None:
        raise ConfigurationError(f"--group-file {table}: name its column with the person ids by --person-column.")
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] != "."]
    train = next((path for path in folders if path.name.lower() in SPLIT_NAMES["train"]), None)
    classes = [path for path in (train or root).iterdir() if path.is_dir() and files_in(path)[0]]
    required = len(classes) < 2 or options.label_file is not None
    if (train is None or required) and (labels := settings_of_table(root, options, required=required)):
        return "ImageTable", {**settings, **labels, **({} if table is None else {"group_file": str(table)})}
    if train is None:
        told = f"{root}/train is missing. Put the images into {root}/train/<class>/ and {root}/test/<class>/"
        if len(classes) < 2:
            found = "" if files_in(root)[0] else f" {what_is_in(root)}"
            raise DataError(f"{told}, or give a table of their labels by --label-file.{found}")
        new = f"{root.resolve().name}_run"
        link = ["ln", "-s", str(root.resolve()), f"{new}/train"]
        again = ["dpl", "init", *(new if Path(each) == root else each for each in given)]
        commands = " && ".join(map(shlex.join, (["mkdir", new], link, again)))
        raise DataError(f"{told}. If {root} has the folders of the classes, a link leaves them there:\n  {commands}")
    if table is not None:
        columns = {"group_column": options.group_column, "image_column": options.image_column or "file"}
        settings |= {"group_file": str(table), **columns}
    elif options.group_column is not None:
        raise ConfigurationError(f"--person-column {options.group_column}: name its table by --group-file.")
    elif {len(Path(file).relative_to(train).parts) for file in files_in(train)[0]} == {3}:  # class, person, image
        settings["group_folders"] = True
    return "ImageFolder", settings


def _found(survey: "Survey") -> Iterator[str]:
    """What is in the data."""
    counts = {split: survey.counts(split) for split in survey.splits}
    *classes, total = zip([*survey.class_names, "all"], *counts.values(), strict=True)
    rows: list[tuple[Any, ...]] = [("class", *survey.splits), *classes[:_SHOWN]]
    if len(survey.class_names) > _SHOWN:
        rows.append((f"smallest of all {len(survey.class_names)}", *(min(each[:-1]) for each in counts.values())))
    rows.append(total)
    width = max(len(name) for name, *_ in rows)
    yield from (f"{name:{width}}" + "".join(f"{each:>10}" for each in others) for name, *others in rows)
    yield f"\nshorter side: {survey.median_side} pixels (median); {'grey' if survey.is_grey else 'in colour'}"
    if survey.values is not None:
        yield from _depth(survey, *survey.values)
    if (persons := survey.images_of_persons) is not None:
        yield f"persons in the training set: {len(persons):,}, with up to {max(persons.values())} images each"
        yield "  Each folder inside a class folder, or each id of the table, is a person. If it is none, move the"
        yield "  images out of these folders, or give no table."
    first: dict[bytes, Look] = {}
    pairs = [(first.setdefault(look.digest, look), look) for look in survey.readable]
    # Pairs in different classes come before others.
    pairs = [pair for pair in pairs if pair[0] is not pair[1]]
    pairs.sort(key=lambda pair: pair[0].labels == pair[1].labels)
    if pairs:
        differ = sum(one.labels != other.labels for one, other in pairs)
        yield f"repeats in the training set: {len(pairs):,}, {differ:,} of them in another class; each is an example"
        yield from (f"  {one.path} = {other.path}" for one, other in pairs[:_NAMED] if one.path)
    if shared := [look for look in survey.looks if look.split != "train" and look.digest in first]:
        yield f"evaluation images that are also in the training set: {len(shared):,}"
        yield from (f"  {look.path}" for look in shared[:_NAMED] if look.path)
    if bad := [look for look in survey.looks if look.problem is not None]:
        yield f"files that cannot be read, to be replaced or removed: {len(bad):,}"
        yield from (f"  {look.path}: {look.problem}" for look in bad)


def _depth(survey: "Survey", low: float, high: float) -> Iterator[str]:
    """The values of more than 8 bits, and what the proposed window is worth."""
    yield f"values: {low:,g} to {high:,g}, of more than 8 bits"
    yield "  The window in the file spans these values and is a proposal: replace it by what is known of such images."
    if shallow := sum(look.values is None for look in survey.readable):
        yield f"  {shallow:,} other images have 8 bits, and the window is applied to their values too: convert them."
