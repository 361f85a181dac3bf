"""Opacus' PRV accountant (Gopi et al. 2021) without the rest of Opacus, which imports torch and its optimizers.

The files are those of the installed Opacus. They need numpy and scipy alone, but for a class of another accountant that
they name and that is not used here.
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
    spec = importlib.util.find_spec("opacus")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).with_name("accountants")
    for name, place in ((_ALIAS, folder), (f"{_ALIAS}.analysis", folder / "analysis")):
        package = ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    other = ModuleType(f"{_ALIAS}.rdp")
    other.RDPAccountant = None  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other
    return importlib.import_module(f"{_ALIAS}.analysis.prv")
