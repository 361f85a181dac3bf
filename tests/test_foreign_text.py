"""A key that a mapping has twice is refused, and what cannot be read is one kind of error."""

import pytest
import yaml

from dp_lightning.errors import DataError
from dp_lightning.foreign_text import RepeatedKey, load_yaml, read_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\n\na: 3", "it has 'a' twice, in lines 1 and 4; keep one"),
        ("x:\n- y:\n    a: {b: 1}\n    # a\n    a: 2", "it has 'a' twice, in lines 3 and 5; keep one"),
        ("x: {a: 1, 'a': 2}", "it has 'a' twice, in line 1; keep one"),
    ],
)
def test_a_key_that_a_mapping_has_twice_is_refused(text, message):
    with pytest.raises(RepeatedKey, match=f"^{message}$"):
        load_yaml(text, yaml.safe_load)


@pytest.mark.parametrize("text", ["a: &a {b: [1, 2]}\nc: *a\nd: {<<: *a, b: 1}", "", "a: {b: 1}\nc: {b: 1}"])
def test_other_texts_are_what_the_loader_makes_of_them(text):
    assert load_yaml(text, yaml.safe_load) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["a: *b", "a: 2024-99-99", "a: !!python/object/apply:os.system [true]", "["])
def test_what_is_no_yaml_is_an_error_of_yaml(text):
    with pytest.raises(yaml.YAMLError):
        load_yaml(text, yaml.safe_load)


@pytest.mark.parametrize("content", [b"\xff", b"{"])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=r"x.json is not"):
        read_json(tmp_path / "x.json")
