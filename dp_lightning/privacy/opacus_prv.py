"""Opacus' PRV accountant (Gopi et al. 2021) without the rest of Opacus, which imports torch and its optimizers.

The files are those of the installed Opacus. They need numpy and scipy alone, but for a class of another accountant that
they name and that is not used here. Where Opacus has them elsewhere, they are imported as usual.
"""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# The name under which the package of accountants is loaded, so that an import of Opacus itself stays what it is.
_ALIAS = "dp_lightning_opacus_accountants"


@functools.cache
def prv() -> Any:
    """The module ``opacus.accountants.analysis.prv``."""
    found = importlib.util.find_spec("opacus")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    try:
        return _loaded(Path(folders[0], "accountants"))
    except (ImportError, AttributeError, IndexError):
        return importlib.import_module("opacus.accountants.analysis.prv")


def _loaded(folder: Path) -> ModuleType:
    for name, place in ((_ALIAS, folder), (f"{_ALIAS}.analysis", folder / "analysis")):
        package = ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    other = ModuleType(f"{_ALIAS}.rdp")
    other.RDPAccountant = None  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other
    return importlib.import_module(f"{_ALIAS}.analysis.prv")
