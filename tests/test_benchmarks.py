"""The benchmark of a step: its arithmetic, and one small run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step

    return step


def row(way, memory_format, seconds, peak_mib):
    return {
        "model": "m",
        "dtype": "fp32",
        "batch_size": 8,
        "way": way,
        "memory_format": memory_format,
        "seconds": seconds,
        "peak_mib": peak_mib,
    }


def test_ratios_are_to_the_ordinary_steps_faster_format(step):
    rows = [
        row("ordinary", "contiguous", 2.0, 100),
        row("ordinary", "channels_last", 1.0, 200),
        row("ours flat", "contiguous", 1.5, 300),
        row("ours flat", "channels_last", 1.8, 100),
        {**row("Opacus ghost", "contiguous", 0.0, 0), "error": "RuntimeError: no"},
    ]
    del rows[-1]["seconds"]
    summary = {entry["way"]: entry for entry in step.summarize(rows)}
    assert summary["ordinary"]["time_ratio"] == 1.0
    assert summary["ours flat"]["time_ratio"] == 1.5
    assert summary["ours flat"]["memory_ratio"] == 1.5
    text = step.table(list(summary.values()))
    assert "| m | fp32 | 8 | ours flat | contiguous | 1500 | 1.50 | 300 | 1.50 |" in text
    assert "RuntimeError: no" in text


@pytest.mark.parametrize("option", ["--rounds", "--threads", "--batch-size"])
def test_numbers_below_one_are_refused(step, option, capsys):
    with pytest.raises(SystemExit):
        step.parse([option, "0"])
    assert f"argument {option}: 0 is below 1" in capsys.readouterr().err


def test_a_small_run_prints_a_table_and_writes_every_row(tmp_path):
    out = tmp_path / "rows.json"
    arguments = [
        "--models",
        "small-cnn",
        "--types",
        "fp32",
        "--formats",
        "contiguous",
        "--rounds",
        "2",
        "--warmup",
        "1",
    ]
    ways = ["--ways", "ours flat", "ours per-layer", "Opacus hooks", "Opacus ghost"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "step.py"), *arguments, *ways, "--json", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.count("| small-cnn | fp32 |") == 5
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["ordinary", "ours flat", "ours per-layer", "Opacus hooks", "Opacus ghost"]
    assert all(len(row["times"]) == 2 and row["seconds"] > 0 and row["peak_mib"] > 0 for row in rows)


def test_a_small_run_of_several_ranks_prints_every_part(tmp_path):
    out = tmp_path / "times.json"
    arguments = ["--model", "small-cnn", "--batch-size", "4", "--rounds", "2", "--warmup", "0", "--json", str(out)]
    shown = subprocess.run(
        [sys.executable, str(BENCHMARKS / "ranks.py"), *arguments], capture_output=True, text=True, check=True
    ).stdout
    times = json.loads(out.read_text())["times"]
    assert {len(values) for values in times.values()} == {2}
    for name in times:
        assert f"| {name} | " in shown
    assert "operations in the time of a gathered byte" in shown
