"""Small pieces of HTML. Every function here takes text and escapes it; arguments called ``markup`` are HTML already."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from manifold_tying.training.report._numbers import DASH
from manifold_tying.training.report._palette import SVG_DASHES, Look


def section(name: str, heading: str, markup: str) -> str:
    """A part of the page under its heading, which names it for screen readers and links."""
    title = f'<h2 id="{name}">{escape(heading)}</h2>'
    return f'<section class="{name}" aria-labelledby="{name}">\n{title}\n{markup}\n</section>'


def scrolling(label: str, markup: str) -> str:
    """A box that scrolls sideways, also from the keyboard, when its content is wider than the screen."""
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">\n{markup}\n</div>'


def table(label: str, head: Sequence[str], body: Iterable[str]) -> str:
    """A table of ready rows in a box that scrolls; the cells of the head are markup, by which the script sorts."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    rows = "\n".join(body)
    markup = f"<table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return scrolling(label, markup)


def number_attribute(value: Any) -> str:
    """Of a table's cell: the number that it is sorted by; nothing for what is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return f' data-value="{value!r}"' if number else ""


def data_block(value: Any) -> str:
    """JSON for the script. Nothing in it can end the block or open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json">{text}</script>\n'


def swatch(look: Look) -> str:
    """A piece of an arm's line."""
    style = f"stroke: {look.variable}; stroke-dasharray: {SVG_DASHES[look.dashes]}"
    return f'<svg class="swatch" viewBox="0 0 20 10" aria-hidden="true"><path d="M1 5H19" style="{style}"/></svg>'


def definitions(entries: Iterable[tuple[str, str]], kind: str = "facts") -> str:
    """A definition list of markup."""
    items = "\n".join(f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in entries)
    return f'<dl class="{kind}">\n{items}\n</dl>'


def text_of(value: Any) -> str:
    """A setting as escaped text: a dash for none, six digits of a fraction, what is nested in a row."""
    match value:
        case None:
            return DASH
        case str():
            return escape(value)
        case float():
            return f"{value:.6g}"
        case Mapping():
            return ", ".join(f"{words_of(str(key))} {text_of(inner)}" for key, inner in value.items())
        case list():
            return ", ".join(map(text_of, value))
        case _:
            return escape(json.dumps(value))


def words_of(key: str) -> str:
    """batch_size as it is read: batch size, escaped."""
    return escape(key.replace("_", " "))
