"""A configuration is code: its class paths import modules, and importing a module runs it.

Nothing is refused here. Modules outside the installed packages are named before they run. After parsing, the packages
from which the configuration takes its classes are named, except this package and those that it builds on.
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
    """Names each foreign module once, on standard error; as a finder it never finds one."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    @contextmanager
    def named_before_they_run(self) -> Iterator[None]:
        """Within this context, name modules when they are about to be imported."""
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
        """Name the packages of the classes in a parsed configuration."""
        if isinstance(settings, Namespace | Mapping):
            items = vars(settings) if isinstance(settings, Namespace) else settings
            class_path = items.get("class_path")
            if isinstance(class_path, str) and (package := class_path.partition(".")[0]) not in _OWN:
                self._name(package, f"uses the class {class_path}, which is not part of dp_lightning")
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
    print(f"dpl: the configuration {text}. A configuration is code: run only those you trust.", file=sys.stderr)
