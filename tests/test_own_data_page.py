"""docs/own_data.md: the numbers that `dpl init` writes are those that the page shows."""

import pytest
from pages import read, table

from dp_lightning.commands.starting_configuration import FEW_IMAGES, Model, start_of
from dp_lightning.datamodules.file_source import READ_FIRST_BELOW

pytestmark = pytest.mark.docs
PAGE = read("docs/own_data.md")


def parameters(count):
    return Model.from_scratch(count).num_parameters(num_classes=10, in_channels=3, image_size=32)


def test_the_table_of_starting_points_is_computed_again():
    small, wide = parameters(FEW_IMAGES - 1), parameters(FEW_IMAGES)
    assert f"`SmallCNN` has d = {small:,}, and WRN-16-4 {wide:,}" in PAGE
    rows = table(PAGE, "N", "δ").rows
    assert len(rows) == 5
    for row in rows:
        count = int(row[0].text.replace(",", ""))
        probe = start_of(count, 385 * 10, Model.on_features())
        scratch = start_of(count, small, Model.from_scratch(count))
        found = [float(cell.text.replace(",", "")) for cell in row[1:]]
        expected = [probe.plan.delta]
        for start in (probe, scratch):
            plan = start.plan
            expected += [plan.expected_batch_size, plan.noise_multiplier, start.noise_norm, start.learning_rate]
        assert found == pytest.approx(
            [*expected, scratch.noise_norm * (wide / small) ** 0.5], rel=0.05
        )  # two digits are shown


def test_the_limits_shown_are_those_of_the_code():
    assert f"fewer than {READ_FIRST_BELOW:,} files" in PAGE
    assert f"below {FEW_IMAGES:,} images one layer" in PAGE
