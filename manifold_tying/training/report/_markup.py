"""Small pieces of HTML. Every function here takes text and escapes it; arguments called ``markup`` are HTML already."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ._numbers import DASH


def section(name: str, heading: str, markup: str) -> str:
    """A part of the page under its heading, which names it for screen readers and links."""
    title = f'<h2 id="{name}">{escape(heading)}</h2>'
    return f'<section class="{name}" aria-labelledby="{name}">\n{title}\n{markup}\n</section>'


def scrolling(label: str, markup: str) -> str:
    """A box that scrolls sideways, also from the keyboard, when its content is wider than the screen."""
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">\n{markup}\n</div>'


def table(caption_markup: str, head: Sequence[str], body: Iterable[str]) -> str:
    """A table of ready rows; the caption and the cells of the head are markup."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    rows = "\n".join(body)
    head_markup = f"<caption>{caption_markup}</caption>\n<thead><tr>{cells}</tr></thead>"
    return f"<table>\n{head_markup}\n<tbody>\n{rows}\n</tbody>\n</table>"


def definitions(entries: Iterable[tuple[str, str]], kind: str = "facts") -> str:
    """A definition list of markup."""
    items = "\n".join(f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in entries)
    return f'<dl class="{kind}">\n{items}\n</dl>'


def text_of(value: Any) -> str:
    """A setting as escaped text: a dash for none, JSON for what is nested."""
    if value is None:
        return DASH
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def words_of(key: str) -> str:
    """batch_size as it is read: batch size, escaped."""
    return escape(key.replace("_", " "))
