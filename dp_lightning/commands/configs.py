"""`dpl configs`: list, show and copy the configurations that come with the package."""

import argparse
import itertools
import re
import shutil
import textwrap
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.named_configs import FOLDER, GRIDS, names, path_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.grid import Grid

_FRAGMENTS = "fragments"
_GROUPS = {
    "": "Runs: dpl fit NAME",
    f"{_FRAGMENTS}/": "Fragments, for a second --config: dpl fit RUN --config NAME",
    f"{GRIDS}/": "Grids: dpl sweep NAME",
}


def main(arguments: list[str]) -> None:
    """List the configurations, print those that are named, or copy them to a folder.

    Raises:
        ConfigurationError: for a name that does not exist, or a file that would be overwritten.
    """
    options = _parser().parse_args(arguments[1:])
    if options.to is not None:
        _copy([_path(name) for name in options.names] or [FOLDER / f"{name}.yaml" for name in names()], options.to)
    elif options.names:
        print("\n".join(_path(name).read_text().rstrip() for name in options.names))
    else:
        _list()


def _list() -> None:
    for start, title in _GROUPS.items():
        shown = [name for name in names() if name.startswith(start) and (start or "/" not in name)]
        width = max(len(name) for name in shown) - len(start)
        left = shutil.get_terminal_size((1000, 0)).columns - width - 4  # a pipe gets whole sentences
        print(f"{title}\n")
        for name in shown:
            purpose = textwrap.shorten(_purpose(FOLDER / f"{name}.yaml"), left, placeholder=" ...")
            print(f"  {name.removeprefix(start):{width}}  {purpose}")
        print()
    print("`dpl configs NAME` prints one; `dpl configs NAME --to FOLDER` copies it, without NAME all of them.")


def _purpose(path: Path) -> str:
    """The first sentence of a configuration's comment."""
    lines = path.read_text().splitlines(keepends=True)
    comment = "".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"(?<=\.)(?:\n| (?=[A-Z]))", comment)[0].replace("\n", " ")


def _path(name: str) -> Path:
    try:
        return path_of(name)
    except ConfigurationError:
        return path_of(name, grid=True)


def _copy(paths: list[Path], to: Path) -> None:
    """Copy files of the package, and those that a grid among them names, with the folders that they are in."""
    grids = [Grid.load(path) for path in paths if GRIDS in path.parts]
    points = [point for grid in grids for points in grid.axes.values() for point in points]
    named = [path for each in (*(grid.base for grid in grids), *(point.configs for point in points)) for path in each]
    sources = {path.resolve() for path in (*paths, *map(path_of, named))}
    targets = {path: to / path.relative_to(FOLDER.resolve()) for path in sorted(sources)}
    for path, target in targets.items():
        if target.exists() and target.read_bytes() != path.read_bytes():
            raise ConfigurationError(f"{target} exists. Choose another folder for --to, or remove the file.")
    require_writable(to, "--to")
    for path, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        print(target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl configs", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as wrn16_cifar10")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="copy them there, with the files that grids name")
    return parser
