"""What every page of the project begins with: one file, no script, nothing fetched."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_POLICY = (
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; """
    """style-src 'unsafe-inline'">"""
)
_GENERATOR = '<meta name="generator" content="Groundswell">'
PAGE_MARK = _GENERATOR.encode()
"""What a page of the project has in its head."""


def render(template: str, **values: Any) -> str:
    """Give a page as text.

    Names and ids come from unchecked archives and from files of other people. So everything is escaped, and the page's
    own policy forbids scripts and addresses.

    Args:
        template: Path of a template of Jinja in `pipelines`. It extends `dataset/report/base.html` (blocks `title`,
            `style` and `body`), and `dataset/report/parts.html` has macros for it.
        **values: What the template shows. A name that it uses and that is not here is an error.
    """
    environment = Environment(
        loader=PackageLoader("pipelines", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(policy=_POLICY, generator=_GENERATOR, **values)
