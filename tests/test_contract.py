"""docs/contract.md says how long the files are that have to be believed, and names files and settings that exist."""

from pathlib import Path

import pytest
from pages import ROOT, read, table

pytestmark = pytest.mark.docs

PAGE = read("docs/contract.md")
BELIEVED = table(PAGE, "file").rows


@pytest.mark.parametrize(("file", "shown"), [(row[0].text, row[1].text) for row in BELIEVED])
def test_a_file_that_has_to_be_believed_is_as_long_as_it_says(file, shown):
    assert abs(int(shown) - len(read(file).splitlines())) <= 10


def test_a_promise_names_where_it_is_kept():
    for promise, where in table(PAGE, "promise").rows:
        for name in where.code:
            folder = Path() if name.startswith("dp_lightning/") else Path("dp_lightning")
            places = [folder / name, folder / "privacy" / name]
            assert any((ROOT / place).is_file() for place in places), f"{promise.text}: {name}"


def test_it_stays_short():
    assert len(PAGE.split()) <= 1500
