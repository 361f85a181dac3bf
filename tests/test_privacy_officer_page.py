"""docs/privacy_officer.md: its table is the worst case of the guarantee, and it is short."""

import math

import numpy as np
import pytest
from pages import read, table

from dp_lightning.commands.starting_configuration import delta_for
from dp_lightning.privacy.accounting import best_guess
from dp_lightning.privacy.statement import LARGEST_EPSILON

pytestmark = pytest.mark.docs
PAGE = read("docs/privacy_officer.md")
DELTA = 1e-5


def found(epsilon, false_alarms):
    """The largest true positive rate that (epsilon, delta)-DP leaves a test with these false positive rates."""
    bounded = np.minimum(math.exp(epsilon) * false_alarms + DELTA, 1 - math.exp(-epsilon) * (1 - DELTA - false_alarms))
    return np.minimum(bounded, 1.0)


def test_the_table_is_the_worst_case_rounded_up():
    rates = np.linspace(0, 1, 200_001)
    for row in table(PAGE, "ε", "right guesses, where tossing a coin gives 50 %").rows:
        epsilon, right, caught = (float(cell.text.removesuffix(" %")) for cell in row)
        share = best_guess(epsilon, DELTA)
        # Half of the cases each: true positives and true negatives.
        assert share == pytest.approx(np.max(found(epsilon, rates) + 1 - rates) / 2, abs=1e-4)
        for shown, exact in ((right, share), (caught, found(epsilon, np.array(1e-3)))):
            assert 0 <= shown - 100 * exact < 0.1


def test_it_is_short_and_its_numbers_are_those_of_the_code():
    assert len(PAGE.split()) <= 700
    assert f"ε above {LARGEST_EPSILON:g}" in PAGE
    assert f"{delta_for(330):.0e}".replace("e-0", "e-") == "1e-4"
