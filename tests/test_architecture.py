"""docs/architecture.md names what is there: every package, and in each table the function that does a thing."""

import ast
import tomllib

import pytest
from pages import ROOT, read, tables

PLACES, PACKAGES, STEPS = tables(read("docs/architecture.md"))
CONTRACTS = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]


def test_every_package_is_listed():
    root = ROOT / "dp_lightning"
    found = {str(path.parent.relative_to(ROOT)) for path in root.rglob("__init__.py")} - {"dp_lightning"}
    listed = {row[0].text for row in PACKAGES.rows}
    assert found <= listed
    assert all((ROOT / name).exists() for name in listed)


def test_the_packages_stand_in_the_order_of_their_layers():
    (layers,) = [contract["layers"] for contract in CONTRACTS if "layers" in contract]
    levels = {
        name.strip().replace(".", "/"): level
        for level, names in enumerate(layers)
        for name in names.replace(":", "|").split("|")
    }
    listed = [row[0].text.removesuffix(".py") for row in PACKAGES.rows]
    known = [levels[name] for name in listed if name in levels]
    assert known == sorted(known)
    assert len(known) >= len(layers) - 2


def names_of(path):
    """Functions, classes, and ``Class.method``."""
    tree, found = ast.parse((ROOT / path).read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {node.name, *(f"{node.name}.{each.name}" for each in inner)}
    return found


@pytest.mark.parametrize("row", [*PLACES.rows, *STEPS.rows], ids=lambda row: row[0].text)
def test_a_row_names_a_function_of_its_file(row):
    _, where, what = row
    (path,) = where.code
    assert names_of(path) & set(what.code), f"{path} has none of {what.code}"
