"""The messages of jsonargparse in one line: the setting, what is wrong with it, and what it takes.

A message of the parser lists for each type that a setting may have why the value is not of that type. The setting is
named by the parts that follow ``Parser key``, or by the nested argument at the end.
"""

import re
import sys
from collections.abc import Iterable

from dp_lightning.commands.near_names import did_you_mean

# Characters of a value and of a message. The parser repeats a value that it cannot read, which may be a whole file.
_LONGEST_VALUE, _LONGEST = 200, 1500
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}


def one_line(message: str, *, options: Iterable[str], classes: Iterable[str]) -> str:
    """What is wrong with the options of a command, and what to change.

    Args:
        message: of the parser.
        options: the dotted names that it accepts.
        classes: the short names of classes that it knows.
    """
    text = (
        _missing(message)
        or _unknown_option(message, set(options))
        or _number(message)
        or _class(message, set(classes))
        or _value(message)
    )
    return shortened(text or " ".join(message.split()))


def shortened(message: str, longest: int = _LONGEST) -> str:
    """The message; if it is long, without its middle."""
    left_out = len(message) - longest
    if left_out <= 0:
        return message
    return f"{message[: longest // 2]} [... {left_out:,} characters ...] {message[-longest // 2 :]}"


def _missing(message: str) -> str | None:
    if (found := re.search(r"the following arguments are required: (.+)", message)) is None:
        return None
    command, names = found[1].partition(".")[0], re.findall(r"\w+\.([\w.]+)", found[1])
    if {"data", "model"} <= set(names):
        return (
            f"There is no configuration. Give one: `dpl {command} --config FILE`; `dpl configs` lists some, and `dpl "
            "init FOLDER` writes one for your images."
        )
    return f"The configuration does not set {' and '.join(names)}; add it to the file, or give --{names[0]} VALUE."


def _unknown_option(message: str, options: set[str]) -> str | None:
    if found := re.search(r"unrecognized arguments: --?([\w.]+)", message):
        return f"There is no setting {found[1]}.{did_you_mean(found[1], options)} `--help` lists the settings."
    if found := re.search(r"unrecognized arguments: ([\w.]+)=(\S*)", message):
        return f"{found[1]}={found[2]} is no option: settings begin with two dashes, as in --{found[1]}={found[2]}."
    if found := re.search(r"unrecognized arguments: (\S+)", message):
        return f"{found[1]} belongs to no option. Configurations come first, as in `dpl fit {found[1]} --name value`."
    if found := re.search(r"argument --([\w.]+): expected one argument", message):
        return f"--{found[1]} has no value: give one after it."
    if found := re.search(r"[Oo]ption '([\w.]+)'(?: is not accepted)?", message):
        group = _setting(message)[0].removesuffix(f".{found[1]}").removesuffix(".init_args")
        return f"The class of {group} has no setting {found[1]}."
    return None


def _class(message: str, classes: set[str]) -> str | None:
    setting, value = _setting(message)
    if found := re.search(r"Problem with given class_path '([^']+)':\s*(.*)", message):
        near = _of_its_module(found[1])
        return f"{setting} names the class {found[1]}, which cannot be used: {found[2].strip().rstrip('.')}.{near}"
    if found := re.search(r"does not correspond to a subclass of (\w+)", message):
        return f"{setting} is {value}, which is not a {found[1]}."
    if (found := re.search(r"Expected a dot import path string: (\S+)", message)) is None:
        return None
    if not found[1][0].isalpha():
        return f"{setting} is {shortened(found[1], _LONGEST_VALUE)}; give the name of a class."
    return (
        f"There is no class '{shortened(found[1], _LONGEST_VALUE)}' for {setting}.{did_you_mean(found[1], classes)} "
        "Give a short name from dp_lightning or torch, or the full path, package.module.Class."
    )


def _of_its_module(class_path: str) -> str:
    """Which class of the same module may be meant; empty where the module has this one, or was not imported."""
    module, _, name = class_path.rpartition(".")
    found = sys.modules.get(module)
    if found is None or hasattr(found, name):
        return ""
    return did_you_mean(class_path, {f"{module}.{one}" for one in dir(found) if one[0].isupper()})


def _number(message: str) -> str | None:
    """A setting of a class that takes a number may also take an object, such as the tensor of a learning rate."""
    return _value(message) if ".init_args." in _setting(message)[0] and re.search(r"'(int|float)'", message) else None


def _value(message: str) -> str | None:
    setting, value = _setting(message)
    if not setting or not value:
        return None
    within = ".init_args." in setting  # that the class around it may be null does not help
    types: list[str] = []
    for found in re.finditer(r"Expected (?:an? )?(<class '[\w.]+'>|typing\.Literal\[[^\]]*\])", message):
        types += [word for word in _in_words(found[1]) if not (within and word == "null")]
    if not types:
        return f"{setting} is {value}, which it does not take."
    *others, last = dict.fromkeys(types)
    return f"{setting} is {value}; give {', '.join(others)}{' or ' if others else ''}{last}."


def _in_words(kind: str) -> list[str]:
    if kind.startswith("typing.Literal"):
        return [choice.strip().strip("'") for choice in kind[len("typing.Literal[") : -1].split(",")]
    name = kind[len("<class '") : -2].rsplit(".", 1)[-1]
    return [_WORDS.get(name, f"a {name}")]


def _setting(message: str) -> tuple[str, str]:
    """The dotted name of the setting that a message is about, and its value; empty where it names none."""
    name = ""
    for part in re.findall(r'Parser key "([\w.]+)"', message):
        name = part if not name or part == name or part.startswith(f"{name}.") else f"{name}.init_args.{part}"
    nested = re.search(r"Given value: NestedArg\(key='([\w.]+)', val='?(.*?)'?\)\s*$", message, re.DOTALL)
    if nested is not None:
        name = f"{name.split('.init_args.')[0]}.{_with_init_args(nested[1])}"
        value = nested[2]
    else:
        values = re.search(r"(?:Got|Given) value: (.*)", message)
        value = values[1].strip() if values else ""
    return name, shortened(value, _LONGEST_VALUE)


def _with_init_args(key: str) -> str:
    return key if key.startswith(("init_args.", "class_path", "dict_kwargs")) else f"init_args.{key}"
