"""The configurations that come with the package: found by name, from any folder.

In a checkout ``dp_lightning/configs`` is a link to ``configs``; a wheel holds the files themselves.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dp_lightning.errors import ConfigurationError, did_you_mean

FOLDER = Path(__file__).parents[1] / "configs"
#: Folder of the grids within it. A grid describes several runs, so `dpl fit` takes none.
GRIDS = "grids"


def names() -> list[str]:
    """The names of all configurations: paths within the folder, without ``.yaml``."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def path_of(given: str | Path, *, grid: bool = False) -> Path:
    """The file that ``given`` names: a path, or the name of a configuration of the package.

    A name may have ``configs/`` before it and ``.yaml`` after it, and the last parts suffice where only one has them.

    Args:
        given: as a user wrote it.
        grid: whether a grid is asked for, and not the configuration of a run.

    Raises:
        ConfigurationError: if there is no such file, naming the nearest one.
    """
    path = Path(given)
    if path.exists():
        return path
    asked = path.as_posix().removeprefix("./").removeprefix("configs/").removesuffix(".yaml")
    known = [name for name in names() if name.startswith(f"{GRIDS}/") == grid]
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
