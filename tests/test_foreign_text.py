"""YAML and JSON beyond all bounds are refused before anything is built of them."""

from pathlib import Path

import pytest
import yaml

from dp_lightning.errors import DataError
from dp_lightning.foreign_text import DEEPEST, LARGEST_YAML, MOST_VALUES, RepeatedKey, load_yaml, read_json, read_text

ALIASES = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1'}]" for i in range(12))
CHAIN = "\n".join(f"a{i}: &a{i} [{f'*a{i - 1}' if i else '1'}]" for i in range(DEEPEST + 1))


@pytest.mark.parametrize(
    ("text", "message", "built"),
    [
        (ALIASES, "more than 20,000 values", False),
        (CHAIN, "nested deeper than 40 levels", False),
        ("[" * 100_000, "nested deeper", False),
        ("a: &a [*a]", r"alias \*a", False),
        ("a: *b", r"alias \*b", False),
        ("x" * (LARGEST_YAML + 1), "at most 1,048,576", False),
        ("[" + "1," * (MOST_VALUES + 1) + "]", "more than 20,000 values", False),
        ("a: 2024-99-99", "a value cannot be read", True),
        ("a: " + "9" * 5_000, "a value cannot be read", True),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor", True),
    ],
)
def test_what_no_configuration_is_like_is_refused_before_more_is_read(text, message, built, monkeypatch):
    events, loaded = [], []
    parse = yaml.parse
    monkeypatch.setattr(yaml, "parse", lambda *text, **by: (events.append(e) or e for e in parse(*text, **by)))
    with pytest.raises(yaml.YAMLError, match=message):
        load_yaml(text, lambda text: loaded.append(text) or yaml.safe_load(text))
    assert len(events) <= MOST_VALUES + 10  # the beginnings of the stream, of its documents and collections
    assert bool(loaded) == built  # building the others takes a long time, or does not end


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {b: [1, 2]}\nc: *a\nd: {<<: *a, e: 1}",
        "[" * DEEPEST + "]" * DEEPEST,
        "a: &a 1\nb: [*a, *a]",
        "",
        "a: 'é'\n---",
        "a: {b: 1}\nc: {b: 1, d: [b, b]}",
        "a: &a {b: 1}\nc: &c {b: 2, d: 3}\ne: {<<: *a, <<: *c, b: 4}",
        "[" + "1," * (MOST_VALUES - 2) + "]",
    ],
)
def test_what_is_within_the_bounds_is_what_the_loader_makes_of_it(text):
    assert load_yaml(text, lambda text: list(yaml.safe_load_all(text))) == list(yaml.safe_load_all(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\n\na: 3", "it has 'a' twice, in lines 1 and 4; keep one"),
        ("x:\n- y:\n    a: {b: 1}\n    # a\n    a: 2", "it has 'a' twice, in lines 3 and 5; keep one"),
        ("x: {a: 1, 'a': 2}", "it has 'a' twice, in line 1; keep one"),
        ("a: &a {<<: {b: 1, b: 2}}\nc: *a", "it has 'b' twice, in line 1; keep one"),
    ],
)
def test_a_key_that_a_mapping_has_twice_is_refused(text, message):
    with pytest.raises(RepeatedKey, match=f"^{message}$"):
        load_yaml(text, yaml.safe_load)


def test_a_text_is_read_from_a_regular_file_of_a_bounded_size(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(DataError, match=r"x.json has 8 bytes, but at most 7 are read"):
        read_text(path, most=7)
    with path.open("wb") as file:
        file.truncate(10**12)  # takes no disk
    with pytest.raises(DataError, match=r"x.json has 1,000,000,000,000 bytes"):
        read_json(path)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 200_000, b"9" * 5_000, b"{"])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=r"x.json is no"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(path):
    with pytest.raises(DataError, match=f"{path} is not a regular file"):
        read_json(Path(path))
