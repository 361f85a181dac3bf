"""The recipes of CONTRIBUTING.md, followed word by word in a copy of the repository."""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from markdown_it import MarkdownIt
from pages import ROOT, read

COPIED = ("dp_lightning", "tests", "configs", "docs", "README.md", "pyproject.toml", "constraints.txt")
STARTS = ("Add a transform", "Add a rule", "Add a data set")


@dataclass
class Recipe:
    """Blocks of code under one heading, each with the files that are named before it since the last block."""

    title: str
    blocks: list[tuple[str, str, list[str]]] = field(default_factory=list)


def recipes(text):
    found, named, item = [], [], 0
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "inline" and token.level == 1 and token.content.startswith("Add a"):
            found.append(Recipe(token.content))
        elif token.type == "list_item_open":
            named, item = [], item + 1
        elif token.type == "inline" and item:
            named += [
                span.content for span in token.children or [] if span.type == "code_inline" and "/" in span.content
            ]
            named += [span.content for span in token.children or [] if span.content == "README.md"]
        elif token.type == "fence" and found:
            found[-1].blocks.append((token.info, token.content, list(named)))
    return found


RECIPES = recipes(read("CONTRIBUTING.md"))


def changed(source, diff):
    """The source with the lines of ``diff``; None unless those that it keeps or removes are there once, together."""
    lines = [(line[0], line[1:] or "\n") for line in diff.splitlines(keepends=True)]
    assert {sign for sign, _ in lines} <= set(" +-\n")
    old, new = ("".join(text for sign, text in lines if sign != other) for other in "+-")
    return source.replace(old, new) if source.count(old) == 1 else None


def follow(recipe, root):
    """Make the files and changes of a recipe. Returns the files, and the commands to run at the end."""
    files, commands = [], []
    for language, code, named in recipe.blocks:
        if language == "sh":
            commands += code.splitlines()
            continue
        if language == "diff":
            found = {root / path: changed((root / path).read_text(), code) for path in named if (root / path).exists()}
        else:
            found = {root / path: code for path in named if not (root / path).exists()}
        found = {path: text for path, text in found.items() if text is not None}
        assert len(found) == 1, f"{len(found)} of {named} fit:\n{code}"
        for path, text in found.items():
            path.write_text(text)
            files.append(path)
    return files, commands


def run(arguments, root):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_there_are_three_recipes():
    assert [recipe.title.startswith(start) for recipe, start in zip(RECIPES, STARTS, strict=True)] == [True] * 3


def test_a_change_fits_in_one_place_alone():
    assert changed("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
    assert changed("a\nb\n", " b\n+c\n a\n") is None
    assert changed("a\nb\na\n", " a\n+c\n") is None


@pytest.mark.docs
@pytest.mark.slow  # it imports what the new tests need, in a process of its own
def test_the_recipes_lead_to_tests_that_pass(tmp_path):
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    made, tests = [], []
    for recipe in RECIPES:
        files, (command,) = follow(recipe, tmp_path)
        made += files
        program, module, pytest_, *arguments = shlex.split(command)
        assert (program, module, pytest_) == (".venv/bin/python", "-m", "pytest")
        tests += arguments
    run(["-m", "pytest", *tests, "-p", "no:cacheprovider"], tmp_path)
    source = sorted({str(path) for path in made if path.suffix == ".py"})
    run(["-m", "ruff", "check", *source], tmp_path)
    run(["-m", "ruff", "format", "--check", *source], tmp_path)
