"""`dpl configs`: list, show and copy the configurations that come with the package."""

import argparse
import re
import shutil
import sys
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.named_configs import FOLDER, GRIDS, names, path_of
from dp_lightning.errors import ConfigurationError

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
        print(f"{title}\n")
        for name in shown:
            print(f"  {name.removeprefix(start):{width}}  {_shortened(_purpose(FOLDER / f'{name}.yaml'), 76 - width)}")
        print()
    print("`dpl configs NAME` prints one; `dpl configs NAME --to FOLDER` copies it, without NAME all of them.")


def _purpose(path: Path) -> str:
    """The first sentence of its comment."""
    text = ""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = f"{text} {line.removeprefix('#').strip()}".strip()
        if sentence := re.match(r".*?\.(?=\s+[A-Z]|$)", text):
            return sentence[0]
    return text


def _shortened(text: str, width: int) -> str:
    """Cut for a terminal, which would break the line; nothing is lost where another program reads."""
    return text if len(text) <= width or not sys.stdout.isatty() else text[: width - 4].rsplit(" ", 1)[0] + " ..."


def _path(name: str) -> Path:
    try:
        return path_of(name)
    except ConfigurationError:
        return path_of(name, grid=True)


def _copy(paths: list[Path], to: Path) -> None:
    """Copy files of the package with the folders that they are in: grids name their files by relative paths."""
    targets = {path: to / path.relative_to(FOLDER) for path in paths}
    if taken := [target for target in targets.values() if target.exists()]:
        raise ConfigurationError(f"{taken[0]} exists. Choose another folder for --to, or remove the file.")
    require_writable(to, "--to")
    for path, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        print(target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl configs", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as wrn16_cifar10")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="copy them there")
    return parser
