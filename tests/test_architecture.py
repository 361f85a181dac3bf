"""docs/architecture.md names what is there: every package, and in each step of a chain the function that takes it."""

import ast
import tomllib

import pytest
from pages import ROOT, read, tables

PACKAGES, *CHAINS = tables(read("docs/architecture.md"))
CONTRACTS = {
    contract["name"]: contract
    for contract in tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
}
# Files that hold what several packages share stand beside them.
SHARED = {
    "errors.py",
    "atomic_files.py",
    "foreign_text.py",
    "ranks.py",
    "processors.py",
    "cores.py",
}


def test_every_package_is_listed():
    root = ROOT / "dp_lightning"
    found = {str(path.parent.relative_to(ROOT)) for path in root.rglob("__init__.py")} - {"dp_lightning"}
    files = {f"dp_lightning/{path.name}" for path in root.glob("*.py") if not path.name.startswith("__")}
    inner = {"dp_lightning/experiments/launchers"}
    listed = [row[0].text for row in PACKAGES.rows]
    assert sorted(listed) == sorted((found - inner) | files - {f"dp_lightning/{name}" for name in SHARED})


def test_the_packages_stand_in_the_order_of_their_layers():
    layers = CONTRACTS["Arrows point one way"]["layers"]
    levels = {
        name.strip().replace(".", "/"): level
        for level, names in enumerate(layers)
        for name in names.replace(":", "|").split("|")
    }
    listed = [row[0].text.removesuffix(".py") for row in PACKAGES.rows]
    known = [levels[name] for name in listed if name in levels]
    assert known == sorted(known)
    assert len(known) >= len(layers) - 2


def test_a_package_that_knows_no_lightning_may_not_import_it():
    (contract,) = [contract for contract in CONTRACTS.values() if contract.get("forbidden_modules") == ["lightning"]]
    without = {row[0].text.replace("/", ".") for row in PACKAGES.rows if row[2].text == "no"}
    sources = contract["source_modules"]
    assert all(any(name == source or name.startswith(f"{source}.") for source in sources) for name in without)
    listed = {row[0].text.replace("/", ".") for row in PACKAGES.rows}
    assert listed & set(sources) <= without


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


@pytest.mark.parametrize("chain", CHAINS, ids=["example", "sigma"])
def test_a_step_of_a_chain_names_its_function(chain):
    assert [row[0].text for row in chain.rows] == [str(number + 1) for number in range(len(chain.rows))]
    for _, where, what in chain.rows:
        (path,) = where.code
        assert names_of(path) & set(what.code), f"{path} has none of {what.code}"


@pytest.mark.parametrize("chain", CHAINS, ids=["example", "sigma"])
def test_a_chain_returns_to_a_callback_at_most_once(chain):
    paths = [where.text for _, where, _ in chain.rows]
    callbacks = [path for path in paths if path.startswith("dp_lightning/callbacks/")]
    assert len(callbacks) == len(set(callbacks))
