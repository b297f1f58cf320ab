"""The common start of all pages of the project: one file, no script but ours, nothing to fetch."""

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipelines.machine.console import printable

_GENERATOR = '<meta name="generator" content="Groundswell">'
PAGE_MARK = _GENERATOR.encode()
"""Text in the head of every page of the project."""


def render(template: str, *, scripts: Sequence[str] = (), packed: Sequence[str] = (), **values: Any) -> str:
    """Return a page as text.

    Names and ids come from unchecked archives and foreign files. So everything is escaped, and the page's own policy
    forbids addresses, and all scripts but the given ones, which are named by their hash.

    Args:
        template: Path of a Jinja template in `pipelines`. It extends `dataset/report/base.html` (blocks `title`,
            `style` and `body`), and can use the macros of `dataset/report/parts.html`.
        scripts: Scripts at the end of the page.
        packed: Further scripts, which the page may unpack and run.
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
    texts = [printable(script) for script in scripts]  # as the page will hold them
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*texts, *packed)]
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    page = environment.get_template(template)
    return printable(page.render(generator=_GENERATOR, scripts=texts, hashes=hashes, **values))
