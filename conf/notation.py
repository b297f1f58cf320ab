"""The text form of values: PyYAML's YAML 1.1, but with the numbers of YAML 1.2, and with dates as texts."""

import re
from typing import Any

import yaml
from yaml.composer import ComposerError

_INT, _FLOAT, _DATE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
# In YAML 1.1 these are numbers too: 010 (octal: 8), 1:30 (base 60: 90) and 1_000. But 1e-4 is a text.
_NUMBERS = {
    _INT: re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
_RESOLVERS = {
    first: [
        *((tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS),
        *(_NUMBERS.items() if first in {*"-+.0123456789"} else ()),
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_WITHOUT_DATES = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE] for first, resolvers in _RESOLVERS.items()
}


class _Loader(yaml.SafeLoader):
    """A loader that refuses a key that occurs twice."""

    yaml_implicit_resolvers = _WITHOUT_DATES

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping. Keys are checked here, before merging, because `<<` may merge the same keys."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ComposerError(
                        problem=f"the key {key.value!r} is there twice: only the second one would count",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return the number that a text stands for."""
        text = str(self.construct_scalar(node))
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes a text if `_Loader` would read it as a number."""

    yaml_implicit_resolvers = _RESOLVERS


_Loader.add_constructor(_INT, _Loader.construct_yaml_int)


def parse(text: str | bytes, where: str) -> Any:
    """Parse YAML: a text, or the content of a file.

    Raises:
        ValueError: It is not a text or not YAML; the message says where.
    """
    try:
        return yaml.load(text.decode() if isinstance(text, bytes) else text, Loader=_Loader)
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not a text file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{where}: no valid YAML{place}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: no valid YAML: {' '.join(str(error).split())}") from None


def text_of(values: Any, **options: Any) -> str:
    """Write values as YAML that `parse` reads back, in their order.

    Args:
        values: Plain values.
        options: Options of `yaml.dump` for the layout.
    """
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, **options))
