"""What every page of the project begins with: one file, no script, nothing fetched."""

from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from pipelines.dataset.report.style import STYLE

_POLICY = (
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; """
    """style-src 'unsafe-inline'">"""
)
_GENERATOR = '<meta name="generator" content="Groundswell">'
PAGE_MARK = _GENERATOR.encode()
"""What a page of the project has in its head."""
_BASE = f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{_POLICY}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{_GENERATOR}
"""
_BASE += """\
<title>{% block title %}{% endblock %}</title>
<style>
{{ style|safe }}</style>
</head>
<body>
{% block body %}{% endblock %}
</body>
</html>
"""
_PARTS = """\
{%- macro picture(plot, text) -%}
<picture><source media="(prefers-color-scheme: dark)" srcset="{{ plot.dark }}">
<img src="{{ plot.light }}" width="{{ plot.width }}" height="{{ plot.height }}" alt="{{ text }}"></picture>
{%- endmacro -%}
{%- macro number(value) -%}{{ "{:,}".format(value) }}{%- endmacro -%}
"""


def render(template: str, style: str = "", **values: Any) -> str:
    """Give a page as text.

    Names and ids come from unchecked archives and from files of other people. So everything is escaped, and the page's
    own policy forbids scripts and addresses.

    Args:
        template: A template of Jinja; it extends "base" (blocks `title` and `body`), and "parts" has macros for it.
        style: Further style sheet.
        **values: What the template shows. A name that it uses and that is not here is an error.
    """
    environment = Environment(
        loader=DictLoader({"base": _BASE, "parts": _PARTS}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(template).render(style=STYLE + style, **values)
