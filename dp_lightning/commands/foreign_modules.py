"""A configuration is code: its class paths import modules, and to import a module runs it.

Nothing is refused here. Modules that lie outside of the installed packages are named before they run, and so is every
package outside of this one and those that it stands on, from which the configuration takes a class.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_only

_OWN = {"dp_lightning", "lightning", "pytorch_lightning", "timm", "torch", "torchmetrics", "torchvision"}
_INSTALLED = Path(torch.__file__).parents[1]


class ForeignModules(MetaPathFinder):
    """Names each foreign module once, on standard error; finds none itself."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    @contextmanager
    def named_before_they_run(self) -> Iterator[None]:
        """Inside, modules are named when they are about to be imported."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python for each module that is not imported yet."""
        if "." not in fullname and fullname not in sys.stdlib_module_names:
            spec = PathFinder.find_spec(fullname)
            place = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
            if place and not Path(place).is_relative_to(_INSTALLED):
                self._name(fullname, f"imports {fullname} from {place}")
        return None

    def name_those_of_classes(self, settings: Any) -> None:
        """Name the packages of the classes of a configuration that was read."""
        if isinstance(settings, Namespace | Mapping):
            items = vars(settings) if isinstance(settings, Namespace) else settings
            class_path = items.get("class_path")
            if isinstance(class_path, str) and (package := class_path.partition(".")[0]) not in _OWN:
                self._name(package, f"takes the class {class_path} from outside of dp_lightning")
            settings = list(items.values())
        if isinstance(settings, list | tuple):
            for value in settings:
                self.name_those_of_classes(value)

    def _name(self, package: str, text: str) -> None:
        if package not in self._named:
            self._named.add(package)
            _tell(text)


@rank_zero_only
def _tell(text: str) -> None:
    print(f"dpl: the configuration {text}. A configuration is code: run only those that you trust.", file=sys.stderr)
