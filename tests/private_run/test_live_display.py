"""The lines that the screen of a run shows: their widths, their order, and what a file is not given."""

from dataclasses import replace

import pytest

from dp_lightning.private_run.live_display import Progress, block, duration, live_lines, log_line

LONG = Progress(
    step=123,
    num_steps=45_678,
    epoch=12,
    num_epochs=1_000,
    part="batch 103 of 256",
    fraction=0.4,
    epsilon=1.434,
    target=8.0,
    accuracies={"test/accuracy": 0.87112},
    losses={"test/loss": 0.5, "unprotected/train_loss": 1.23456},
    seconds=3_723.0,
    seconds_left=400_000.0,
)


@pytest.mark.parametrize("width", [20, 79, 119])
def test_no_line_is_wider_than_the_terminal(width):
    lines = live_lines(LONG, width)
    assert 2 <= len(lines) <= 4
    assert max(map(len, lines)) <= width


def test_a_wide_terminal_has_a_longer_bar_and_fewer_lines():
    assert len(live_lines(LONG, 119)) < len(live_lines(LONG, 79))
    narrow, wide = (live_lines(replace(LONG, part=""), width)[0] for width in (79, 119))
    assert sum(wide.count(mark) for mark in "━─") > sum(narrow.count(mark) for mark in "━─") > 0


def test_the_budget_comes_before_the_accuracy_and_losses_come_last():
    text = "\n".join(live_lines(LONG, 119))
    shown = [
        "step 123/45678",
        "batch 103 of 256",
        "1:02:03 elapsed",
        "4 d 15:06 left",
        "epoch 12/1000",
        "epsilon at most 1.43 of 8.00",
        "test/accuracy 0.871",
        "test/loss 0.500",
        "unprotected/train_loss 1.23",
    ]
    assert [text.index(part) for part in shown] == sorted(text.index(part) for part in shown)


def test_the_bar_grows_with_the_steps_and_inside_of_one():
    filled = [
        live_lines(Progress(step=step, num_steps=4, epoch=1, num_epochs=1, fraction=part), 79)[0].count("━")
        for step, part in ((0, 0.0), (0, 0.5), (1, 0.0), (4, 0.0))
    ]
    assert filled[0] == 0
    assert filled == sorted(set(filled))
    whole = live_lines(Progress(step=4, num_steps=4, epoch=1, num_epochs=1), 79)[0]
    assert "─" not in whole


def test_a_terminal_without_other_characters_gets_ascii():
    assert all(line.isascii() for line in live_lines(LONG, 119, ascii_only=True))


def test_a_file_gets_neither_losses_nor_the_number_of_examples_drawn():
    line = log_line(LONG, "10:11:12")
    assert line.startswith("10:11:12  epoch 12/1000  step 123/45678  epsilon at most 1.43 of 8.00  test/accuracy 0.871")
    assert "loss" not in line
    assert "batch" not in line


def test_a_run_without_noise_shows_no_epsilon():
    without = replace(LONG, epsilon=None)
    assert "epsilon" not in log_line(without, "") + "".join(live_lines(without, 119))


def test_texts_are_wrapped_beside_their_labels_and_shown_on_a_terminal_without_control_characters():
    lines = block([("data", "a \x1b[31mred\nname"), ("empty", ""), ("plan", "word " * 30)], 40)
    assert lines[0] == "data  a \\x1b[31mred\\nname"
    assert len(lines) > 3
    assert all(line.startswith("      word") for line in lines[2:])
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3_599, "59:59"), (7_200, "2:00:00"), (180_000, "2 d 02:00")]
)
def test_durations_are_short(seconds, shown):
    assert duration(seconds) == shown
