"""The common start of all pages of the project: one file, no script, nothing to fetch."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipelines.machine.console import printable

_GENERATOR = '<meta name="generator" content="Groundswell">'
PAGE_MARK = _GENERATOR.encode()
"""Text in the head of every page of the project."""


def render(template: str, **values: Any) -> str:
    """Return a page as text.

    Names and ids come from unchecked archives and foreign files. So everything is escaped, and the page's own policy
    forbids scripts and addresses.

    Args:
        template: Path of a Jinja template in `pipelines`. It extends `dataset/report/base.html` (blocks `title`,
            `style` and `body`), and can use the macros of `dataset/report/parts.html`.
        **values: Values that the template shows. A name that the template uses without a value is an error.
    """
    environment = Environment(
        loader=PackageLoader("pipelines", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return printable(environment.get_template(template).render(generator=_GENERATOR, **values))
