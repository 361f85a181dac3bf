"""A part of the campaign of hostile configurations and files; ``python benchmarks/fuzz.py`` runs all of it."""

import subprocess

import pytest
from pages import ROOT

#: One of each way in which memory, time or code could be taken.
FILES = (
    "npz_label_5000000",
    "png_a_million_squared",
    "checkpoint_runs_code",
    "statement_nests",
    "yaml_aliases",
    "grid_without_end",
)


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fuzz

    return fuzz


def test_what_is_hostile_gets_one_message_and_nothing_else(warm_python):
    names = [f"{number}-{kind}" for number in range(4) for kind in ("number", "tree", "text", "option")]
    campaign = [warm_python, "benchmarks/fuzz.py", "--configurations", "4", "--only", ",".join([*names, *FILES])]
    shown = subprocess.run(campaign, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"{4 + len(FILES)} cases" in shown.stdout
    assert shown.returncode == 0, shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        ({"said": "Traceback (most recent call last):"}, "traceback"),
        ({"status": 3}, "status 3"),
        ({"canary": True}, "code executed"),
        ({"memory": 2e9}, "2.0 GB"),
        ({"seconds": 2.5}, "2.5 s"),
        ({"seconds": 60.0, "status": 0}, None),
        ({}, None),
    ],
)
def test_what_counts_as_a_fault(fuzz, outcome, fault):
    usual = {"status": 2, "seconds": 0.5, "memory": 1e6, "said": "error: x", "canary": False}
    assert fuzz._faults(**{**usual, **outcome}) == (() if fault is None else (fault,))


def test_a_seed_gives_the_same_configurations(fuzz, tmp_path):
    def written(seed, folder):
        for case in fuzz.configurations(5, seed):
            place = tmp_path / folder / case.name
            place.mkdir(parents=True)
            yield case.write(place), (place / "run.yaml").read_bytes()

    assert list(written(1, "a")) == list(written(1, "b"))
    assert list(written(1, "c")) != list(written(2, "d"))


def test_there_are_hostile_files_of_every_format(fuzz):
    names = [case.name for case in fuzz.files()]
    assert len(names) >= 60
    assert set(FILES) <= set(names)
    kinds = ["npz", "png", "jpeg", "gif", "bmp", "tiff", "ppm", "webp", "checkpoint", "safetensors", "weights"]
    kinds += ["statement", "journal", "yaml", "grid", "report", "tiny_imagenet"]
    assert all(any(name.startswith(kind) for name in names) for kind in kinds)
