"""Docstrings name other objects by Sphinx roles, which mkdocstrings shows as they stand."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """:func:`polar` and :class:`~manifold_tying.Stiefel` as plain code."""
    return re.sub(r":(?:attr|class|func|meth|mod):<code>~?([^<]*)</code>", r"<code>\1</code>", html)
