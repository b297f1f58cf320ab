"""Keys of the configuration, found by path."""

from conf.keys import nested


def test_settings_become_a_mapping_per_section() -> None:
    assert nested({"a.b": "1", "a.c.d": "2", "e": "3"}) == {"a": {"b": "1", "c": {"d": "2"}}, "e": "3"}


def test_a_key_within_a_value_is_left_out() -> None:
    settings = {"a.b": "x", "a.b.c": "1"}
    assert nested(settings) == nested(dict(reversed(settings.items()))) == {"a": {"b": "x"}}
