"""`dpl init`: read a folder of images, an .npz file or a table of persons, and write a configuration that fits it."""

import argparse
import csv
import os
import shlex
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.foreign_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dp_lightning.commands.starting_model import Features, Network
    from dp_lightning.datamodules.base import ImageDataModule
    from dp_lightning.datamodules.survey import Survey

# Files that are named on the screen.
_NAMED = 10


def main(arguments: list[str]) -> None:
    """Read the data, write the configuration, and print what was found and what to do next.

    Raises:
        ConfigurationError: naming the option and the fix.
        DataError: the data has another layout or one class, or none of its images can be read.
    """
    options = _parser().parse_args(arguments[1:], argparse.Namespace(given=arguments[1:]))
    out = options.out or Path(f"{options.data.resolve().stem or 'images'}.yaml")
    _require_free(out, options)
    from dp_lightning.commands.init_report import report  # these import torch
    from dp_lightning.commands.starting_content import content_for
    from dp_lightning.datamodules.survey import Survey

    class_path, settings = _data(options)
    start = time.monotonic()
    with _told_in_plain_lines():
        survey = Survey.of(_built(class_path, settings))
    seconds = time.monotonic() - start
    if len(survey.class_names) < 2:
        raise DataError(
            f"{printable(str(options.data))} has images of one class, {printable(survey.class_names[0])}; a classifier "
            "tells at least 2 classes apart."
        )
    model, name = _model(options, len(survey.readable)), shlex.quote(str(out))
    content = content_for(survey, class_path, settings, model, epsilon=options.epsilon, name=name)
    with replacing(out) as file:
        file.write(content.text.encode())
    print(report(survey, content, seconds=seconds, bad_files=_written(survey, out), out=out))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl init", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "data",
        type=Path,
        metavar="DATA",
        help="a folder with train/<class>/<images>, an .npz file, or a .csv file in the folder that says which person "
        "each image belongs to",
    )
    add("--out", type=Path, metavar="FILE", help="the configuration (default: the name of DATA with .yaml, here)")
    add("--force", action="store_true", help="overwrite it")
    add("--epsilon", type=float, default=3.0, help="the privacy budget (default: 3)")
    add("--from-scratch", "--from_scratch", action="store_true", help="use no pretrained network")
    add("--backbone", metavar="NAME", help="the pretrained network, by its name in timm's registry, or scattering")
    add("--weights", metavar="FILE", help="its weights (default: the first run downloads those of timm)")
    add("--group-file", "--group_file", type=Path, metavar="FILE", help="a .csv file that lies elsewhere")
    add("--group-column", "--group_column", metavar="NAME", help="its column with the person ids")
    add("--file-column", "--file_column", metavar="NAME", default="file", help="its column with the images (file)")
    return parser


def _require_free(out: Path, options: argparse.Namespace) -> None:
    if options.from_scratch and (options.weights or options.backbone):
        raise ConfigurationError("--from-scratch uses no pretrained network: leave out --weights and --backbone.")
    if options.weights is not None and not Path(options.weights).is_file():
        raise ConfigurationError(f"--weights {options.weights} is not a file; give the path of the network's weights.")
    if out.exists() and not options.force:
        raise ConfigurationError(f"{out} exists. Give another file with --out, or --force to overwrite it.")
    require_writable(out.parent, "--out")
    for given in (options.data, options.weights or "", options.group_file or ""):
        try:
            str(given).encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{printable(str(given))} is not UTF-8, so that no configuration can name it; rename it."
            ) from error


def _data(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The data module and those of its settings that say where the images are and whose they are."""
    path: Path = options.data
    if not path.exists():
        raise DataError(f"{printable(str(path))} does not exist; give a folder of images, or an .npz or .csv file.")
    if path.suffix.lower() == ".npz":
        return "NpzImages", {"path": str(path)}
    table, root = options.group_file, path
    if path.suffix.lower() == ".csv":
        if table is not None:
            raise ConfigurationError(f"{path} and --group-file {table} are two tables; give the folder and one table.")
        table, root = path, path.parent
    if not root.is_dir():
        raise DataError(f"{root} is neither a folder nor an .npz or .csv file.")
    _require_train(root, options.given)
    settings: dict[str, Any] = {"root": str(root)}
    if table is not None:
        column = options.group_column or _only_other_column(table, options.file_column)
        settings |= {"group_file": str(table), "group_column": column, "file_column": options.file_column}
    elif _has_folders_of_persons(root / "train"):
        settings["group_folders"] = True
    return "ImageFolder", settings


def _require_train(root: Path, given: list[str]) -> None:
    """Say how to make the layout of ImageFolder from a folder of classes without copying an image."""
    from dp_lightning.datamodules.listing import class_names, image_files

    if (root / "train").is_dir():
        return
    if not any(root.iterdir()):
        raise DataError(
            f"{printable(str(root))} is empty. Put the images into {root}/train/<class>/, and those for the test into "
            f"{root}/test/<class>/."
        )
    if not any(image_files(root / name, Counter()) for name in class_names(root)):
        raise DataError(
            f"{root / 'train'} is missing. Put the images into {root}/train/<class>/, and those for the test into "
            f"{root}/test/<class>/."
        )
    new = f"{root.resolve().name}_run"
    again = shlex.join(["dpl", "init", *(new if Path(argument) == root else argument for argument in given)])
    raise DataError(
        f"{printable(str(root))} has class folders but no folder train. Either sort the images into "
        "train/<class>/ and test/<class>/, or leave them where they are and hold out a tenth for validation:\n"
        f"  mkdir {shlex.quote(new)} && ln -s {shlex.quote(str(root.resolve()))} {shlex.quote(new + '/train')} && "
        + again
    )


def _has_folders_of_persons(train: Path) -> bool:
    """Whether the images are in folders inside the class folders, and none beside them."""
    from dp_lightning.datamodules.listing import class_names, image_files

    classes = [train / name for name in class_names(train)]
    if any(image_files(folder, Counter()) for folder in classes):
        return False
    with_folders = (entry.path for folder in classes for entry in os.scandir(folder) if entry.is_dir())
    return any(image_files(Path(folder), Counter()) for folder in with_folders)


def _only_other_column(table: Path, file_column: str) -> str:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            names = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read as a table ({error}).") from error
    others = [name for name in names if name != file_column]
    if file_column not in names:
        raise ConfigurationError(f"{table} has no column {file_column!r}: name the images by --file-column.")
    if len(others) != 1:
        raise ConfigurationError(
            f"Which column of {table} has the person ids? Set --group-column to one of {', '.join(others) or '(none)'}."
        )
    return others[0]


def _model(options: argparse.Namespace, num_images: int) -> "Features | Network":
    from dp_lightning.commands.starting_model import BACKBONE, Features, Network
    from dp_lightning.commands.starting_point import FEW_IMAGES

    named = options.backbone or options.weights
    if options.from_scratch or (num_images >= FEW_IMAGES and not named):
        return Network.for_images(num_images)
    return Features(options.backbone or BACKBONE, options.weights)


def _built(kind: str, settings: dict[str, Any]) -> "ImageDataModule":
    from dp_lightning.datamodules import ImageFolder, NpzImages

    return ImageFolder(**settings) if kind == "ImageFolder" else NpzImages(**settings)


@contextmanager
def _told_in_plain_lines() -> "Iterator[None]":
    """Print the warnings of the data module without the place in the code."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(warning.message) for warning in told if warning.category is UserWarning):
        print(printable(text))


def _written(survey: "Survey", out: Path) -> Path | None:
    """The file with all bad files, a tab before the reason, if they are too many for the screen."""
    path = out.with_name(f"{out.stem}.bad_files.txt")
    path.unlink(missing_ok=True)  # of an earlier survey
    if len(survey.bad) <= _NAMED:
        return None
    # A name with a line break is not one line.
    lines = [f"{printable(name) if name.splitlines() != [name] else name}\t{why}\n" for name, why in survey.bad]
    with replacing(path) as file:
        file.write("".join(lines).encode(errors="surrogateescape"))
    return path
