"""Finds misspelt names in the options of a training command before torch is imported.

The parser of `dpl fit` knows every setting, but only after some seconds of imports. Its names are kept in
``known_settings.json``, which ``tools/known_settings.py`` writes. What is not known here, such as the settings of a
class of one's own, is left to the parser.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.commands.near_names import did_you_mean
from dp_lightning.errors import ConfigurationError
from dp_lightning.foreign_text import RepeatedKey, load_yaml, printable

FILE = Path(__file__).with_name("known_settings.json")
# Settings of every group that names a class, beside those of the class.
_OF_A_CLASS = frozenset({"class_path", "init_args", "dict_kwargs", "help"})
_OWN_PACKAGES = ("dp_lightning.", "torch.optim.")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def require_known(arguments: Sequence[str]) -> None:
    """Check the names of all settings and classes in the arguments of a command, and in its configurations.

    Args:
        arguments: the command, and its options with the paths of configurations.

    Raises:
        ConfigurationError: naming the one that does not exist, and the nearest one that does; or a file that is no
            configuration.
    """
    content = json.loads(FILE.read_text())
    if arguments[0] not in content["options"]:
        return
    options = list(options_of(arguments[1:]))
    contents = [(file, content_of(file)) for name, file in options if name == "config" and file is not None]
    for name, value in options:
        _require_single_keys(name, value)
    if all(version(name) == tried for name, tried in content["versions"].items()):
        _Names(frozenset(content["options"][arguments[0]]), content["kinds"], content["settings"]).check(
            options, contents
        )


@dataclass
class _Names:
    """What one command accepts.

    Attributes:
        options: dotted names.
        kinds: the classes that may be named by a short name, by the setting that takes them.
        settings: those of each class.
        given: the classes that these arguments give to a setting.
    """

    options: frozenset[str]
    kinds: Mapping[str, Sequence[str]]
    settings: Mapping[str, Sequence[str]]
    given: dict[str, list[str]] = field(default_factory=dict)

    def check(self, options: Sequence[tuple[str, str | None]], contents: Sequence[tuple[str, Any]]) -> None:
        """The options with their values, and the configurations with what they hold."""
        for _, content in contents:
            self._note(content)
        for name, value in options:
            group = name.removesuffix(".class_path")
            for class_path in _class_paths(value) if group in self.kinds and value is not None else ():
                self._require_class(group, class_path)
                self.given.setdefault(group, []).append(class_path)
        for file, content in contents:
            self._check_mapping(content, "", f"{file}: ")
        for name, _ in options:
            self._require_option(name, "")

    def _note(self, content: Any) -> None:
        for group in self.kinds:
            value = content.get(group) if isinstance(content, dict) else None
            if isinstance(value, dict) and isinstance(value.get("class_path"), str):
                self.given.setdefault(group, []).append(value["class_path"])

    def _check_mapping(self, content: Any, group: str, where: str) -> None:
        """Check a mapping that is the value of ``group``; lists are checked item by item."""
        if isinstance(content, list):
            for item in content:
                if isinstance(item, str):
                    self._require_class(group, item, where)
                self._check_mapping(item, group, where)
        if not isinstance(content, dict):
            return
        class_path = content.get("class_path")
        if isinstance(class_path, str):
            self._require_class(group, class_path, where)
            self._check_settings(content.get("init_args"), [class_path], group, where)
            return
        if group in self.kinds:
            self._check_settings(content.get("init_args"), self.given.get(group, []), group, where)
            return
        for key, value in content.items():
            name = f"{group}.{key}" if group else str(key)
            self._require_option(name, where)
            self._check_mapping(value, name, where)

    def _check_settings(self, content: Any, classes: Sequence[str], group: str, where: str) -> None:
        """Check the ``init_args`` of a class, and of the classes within."""
        for key, value in content.items() if isinstance(content, dict) else ():
            self._require_setting(str(key), classes, where)
            self._check_mapping(value, f"{group}.init_args.{key}", where)

    def _require_option(self, name: str, where: str) -> None:
        for group in self.kinds:
            if name.startswith(f"{group}."):
                rest = name.removeprefix(f"{group}.").removeprefix("init_args.").split(".")[0]
                if rest not in _OF_A_CLASS:
                    self._require_setting(rest, self.given.get(group, []), where)
                return
        if name in self.options or self._is_within_a_value(name):
            return
        raise ConfigurationError(
            f"{where}There is no setting {name}.{did_you_mean(name, self.options)} `dpl fit --help` lists the settings."
        )

    def _is_within_a_value(self, name: str) -> bool:
        """Whether a part of the name is an option that has no settings of its own here, such as ``trainer.logger``."""
        parts = name.split(".")
        starts = [".".join(parts[:count]) for count in range(1, len(parts))]
        return any(
            start in self.options and not any(other.startswith(f"{start}.") for other in self.options)
            for start in starts
        )

    def _require_setting(self, name: str, classes: Sequence[str], where: str) -> None:
        """One of the classes has this setting, or is a class of which nothing is known."""
        known = [self._settings_of(class_path) for class_path in classes]
        if not known or any(settings is None or name in settings for settings in known):
            return
        settings = known[-1] or ()
        raise ConfigurationError(
            f"{where}{classes[-1].split('.')[-1]} has no setting {name}.{did_you_mean(name, settings)} Its settings: "
            f"{', '.join(settings)}."
        )

    def _settings_of(self, class_path: str) -> Sequence[str] | None:
        if "." in class_path and not class_path.startswith(_OWN_PACKAGES):
            return None
        return self.settings.get(class_path.split(".")[-1])

    def _require_class(self, group: str, class_path: str, where: str = "") -> None:
        """A short name is one of this package or of torch.optim."""
        known = self.kinds.get(group)
        if known is None or "." in class_path or class_path in known:
            return
        raise ConfigurationError(
            f"{where}{group} has no class '{class_path}'.{did_you_mean(class_path, known)} Give one of "
            f"{', '.join(known)}, or the full path of a class of your own, package.module.Class."
        )


def _class_paths(value: str) -> list[str]:
    """The classes that a value names by itself or in a list; none in null and in the text of a mapping."""
    names: Any = [value]
    if value.startswith("["):
        try:
            names = load_yaml(value, lambda text: yaml.load(text, _Loader))
        except yaml.YAMLError:  # the parser says what is wrong
            return []
    return [name for name in names if isinstance(name, str) and name != "null" and name.replace(".", "").isidentifier()]


def _require_single_keys(name: str, value: str | None) -> None:
    """For the value of an option: a mapping or a list is YAML."""
    try:
        load_yaml(value if value is not None and value[:1] in ("{", "[") else "", lambda text: None)
    except RepeatedKey as error:
        raise ConfigurationError(f"--{name} {str(error).removeprefix('it ')}.") from error
    except yaml.YAMLError:  # the parser says what is wrong
        return


def options_of(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Name and value of each option; None where it has no value, or more than one."""
    for place, argument in enumerate(arguments):
        if argument != "-c" and not argument.startswith("--"):
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        following = [] if equals else [one for one in arguments[place + 1 : place + 2] if not one.startswith("--")]
        yield "config" if name == "c" else name.removesuffix("+"), value if equals else next(iter(following), None)


def content_of(file: str) -> dict[Any, Any] | None:
    """What a configuration holds; None if the parser has to say what is wrong with it.

    Args:
        file: its path, or the text itself.

    Raises:
        ConfigurationError: it is not YAML, or no mapping.
    """
    if file.startswith("{"):
        with suppress(yaml.YAMLError):
            return _loaded(file)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    try:
        content = _loaded(text)
    except RepeatedKey as error:
        raise ConfigurationError(f"{file} {str(error).removeprefix('it ')}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file} {_why(text, error)}") from error
    if not isinstance(content, dict):
        kind = "is empty" if content is None else "is a list" if isinstance(content, list) else "is text"
        raise ConfigurationError(
            f"{file} {kind}; a configuration has settings by name, such as model, data and privacy. `dpl init FOLDER` "
            "writes one for your images, and `dpl configs` lists some."
        )
    return content


def _loaded(text: str) -> Any:
    return load_yaml(text, lambda text: yaml.load(text, _Loader))


def _why(text: str, error: yaml.YAMLError) -> str:
    """Why a text is not YAML, and what that usually comes from."""
    why = " ".join(str(error).replace('in "<unicode string>",', "in").split())
    told, mark = f"cannot be read as YAML: {printable(why)}", getattr(error, "problem_mark", None)
    if mark is None:
        return told
    line = "".join(text.splitlines()[mark.line : mark.line + 1])
    if line[mark.column : mark.column + 1] == "\t":
        return f"has a tab in line {mark.line + 1}, column {mark.column + 1}; YAML is indented by spaces."
    before = f"{told}. Often a colon is missing in the line before"
    if "could not find expected ':'" in why or "did not find expected key" in why:
        return f"{before}, or the line is indented by another number of spaces than those around it."
    if "mapping values are not allowed" in why:
        return f"{before}, or a value with a colon in it needs quotes."
    return told
