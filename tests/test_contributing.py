"""The recipes of CONTRIBUTING.md, followed word by word in a copy of the repository."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from markdown_it import MarkdownIt
from pages import ROOT, read

COPIED = ("dp_lightning", "tests", "configs", "docs", "README.md", "pyproject.toml", "constraints.txt")


def recipes(text):
    """The blocks of code below each heading "Add a …", with the files that are named before each in the same step."""
    found, named = {}, []
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "inline" and token.content.startswith("Add a") and token.level == 1:
            found[token.content] = []
        elif token.type == "list_item_open":
            named = []
        elif token.type == "inline":
            named += [
                span.content for span in token.children or [] if span.type == "code_inline" and "/" in span.content
            ]
        elif token.type == "fence" and found:
            found[next(reversed(found))].append((token.info, token.content, list(named)))
    return found


RECIPES = recipes(read("CONTRIBUTING.md"))


def follow(blocks, root):
    """Make the files and changes of a recipe. Returns the files, and the command at its end."""
    files = []
    for language, code, named in blocks[:-1]:
        if language == "diff":  # lines that begin with a space, + or -; those that it keeps or removes stand together
            old, new = ("".join(line[1:] or "\n" for line in code.splitlines(True) if line[0] != sign) for sign in "+-")
            there = [root / path for path in named if (root / path).exists()]
            places = [path for path in there if path.read_text().count(old) == 1]
            assert len(places) == 1, f"CONTRIBUTING.md shows lines that are no longer in one of {named}:\n{old}"
            (path,) = places
            code = path.read_text().replace(old, new)
        else:
            (path,) = [root / path for path in named if not (root / path).exists()]
        path.write_text(code)
        files.append(str(path))
    language, command, _ = blocks[-1]
    assert language == "sh"
    return files, shlex.split(command)


# The warm Python has imported the package, and not that of the copy.
TESTS = """
import sys
import pytest
for name in [name for name in sys.modules if name.partition(".")[0] == "dp_lightning"]:
    del sys.modules[name]
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(program, *arguments, root):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(root)
    done = subprocess.run([program, *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.docs
def test_the_recipes_lead_to_tests_that_pass(tmp_path, warm_python):
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    made, tests, selected = [], [], []
    for title in ("Add a transform of the privatized gradient", "Add a rule for a layer", "Add a data set"):
        files, (program, *_, test, option, selection) = follow(RECIPES.pop(title), tmp_path)
        assert (program, option) == (".venv/bin/python", "-k")
        made += [path for path in files if path.endswith(".py")]
        tests.append(test)
        selected.append(selection)
    assert not RECIPES
    (tmp_path / "tested.py").write_text(TESTS)
    options = ["-k", " or ".join(selected), "-p", "no:cacheprovider", "-p", "no:xdist"]
    run(warm_python, "tested.py", *tests, *options, root=tmp_path)
    run(sys.executable, "-m", "ruff", "check", *made, root=tmp_path)
    run(sys.executable, "-m", "ruff", "format", "--check", *made, root=tmp_path)
