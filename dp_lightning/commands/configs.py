"""`dpl configs` lists, shows and copies the configurations of the package; every command finds them by name.

In a checkout ``dp_lightning/configs`` is a link to ``configs``; a wheel holds the files themselves.
"""

import argparse
import itertools
import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.errors import ConfigurationError, did_you_mean
from dp_lightning.experiments.grid import Grid

FOLDER = Path(__file__).parents[1] / "configs"
#: Folder of the grids within it. A grid describes several runs, so `dpl fit` takes none.
GRIDS = "grids"
_FRAGMENTS = "fragments"
_GROUPS = {
    "": "Runs: dpl fit NAME",
    f"{_FRAGMENTS}/": "Fragments, for a second --config: dpl fit RUN --config NAME",
    f"{GRIDS}/": "Grids: dpl sweep NAME",
}


def names() -> list[str]:
    """The names of all configurations: paths within the folder, without ``.yaml``."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def path_of(given: str | Path, *, grid: bool | None = False) -> Path:
    """The file that ``given`` names: a path, or the name of a configuration of the package.

    A name may have ``configs/`` before it and ``.yaml`` after it, and the last parts suffice where only one has them.

    Args:
        given: as a user wrote it.
        grid: whether a grid is asked for, and not the configuration of a run; None takes either.

    Raises:
        ConfigurationError: if there is no such file, naming the nearest one.
    """
    path = Path(given)
    if path.exists():
        return path
    asked = path.as_posix().removeprefix("./").removeprefix("configs/").removesuffix(".yaml")
    known = [name for name in names() if grid in (None, name.startswith(f"{GRIDS}/"))]
    found = [name for name in known if name == asked] or [name for name in known if name.endswith(f"/{asked}")]
    if len(found) == 1:
        return FOLDER / f"{found[0]}.yaml"
    what = "grid" if grid else "configuration"
    short = {name.split("/")[-1] for name in known}
    raise ConfigurationError(
        f"There is no file {given}, and no {what} of that name.{did_you_mean(asked.split('/')[-1], short)} `dpl "
        "configs` lists the names."
    )


def with_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with ``--config=PATH`` for each configuration given by path or name.

    Arguments between the command and its first option are configurations, as in ``dpl fit digits``. YAML text, which
    ``--config`` takes as well, stays as it is.

    Raises:
        ConfigurationError: for a configuration that does not exist.
    """
    found, rest = list(arguments[:1]), list(arguments[1:])
    while rest and not rest[0].startswith("-"):
        found.append(f"--config={path_of(rest.pop(0))}")
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in ("--config", "-c") and (equals or rest):
            value = value if equals else rest.pop(0)
            is_text = set(value) & set("\n:{") and not os.path.exists(value)
            found.append(f"--config={value if is_text else path_of(value)}")
        else:
            found.append(f"{name}{equals}{value}")
    return found


def main(arguments: list[str]) -> None:
    """List the configurations, print those that are named, or copy them to a folder.

    Raises:
        ConfigurationError: for a name that does not exist, or a file that would be overwritten.
    """
    options = _parser().parse_args(arguments[1:])
    named = [path_of(name, grid=None) for name in options.names]
    if options.to is not None:
        _copy(named or [FOLDER / f"{name}.yaml" for name in names()], options.to)
    elif named:
        print("\n".join(path.read_text().rstrip() for path in named))
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
