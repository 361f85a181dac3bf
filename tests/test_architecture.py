"""docs/architecture.md names what is there: every package, and in each table the function that does a thing."""

import ast

import pytest
from pages import ROOT, read, tables

PLACES, PACKAGES, STEPS = tables(read("docs/architecture.md"))


def test_every_package_is_listed():
    root = ROOT / "dp_lightning"
    found = {str(path.parent.relative_to(ROOT)) for path in root.rglob("__init__.py")} - {"dp_lightning"}
    listed = {row[0].text for row in PACKAGES.rows}
    assert found <= listed
    assert all((ROOT / name).exists() for name in listed)


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
