"""A matplotlib figure as SVG that stands in a page: the page's colours and font, no identifier used twice, no date."""

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

POINTS_PER_INCH = 72  # matplotlib's unit in SVG
ARM = re.compile(r"arm-\d+")
REFERRING = ("href", "clip-path")
REFERENCE = re.compile(r"#([\w.-]+)")
FRACTION = re.compile(r"-?\d+\.\d+")
FONT = re.compile(r"font-family: [^;]*;? ?")
NO_ROTATION = re.compile(r" ?rotate\(-0 [^)]*\)")
NUMBERS = ("d", "x", "y", "width", "height", "transform", "points")


def svg_of(figure: Figure, name: str, colours: Mapping[str, str]) -> str:
    """What is inside the figure's svg element, whose view box is the figure in points.

    Groups that were marked with an arm get the classes ``arm`` and ``arm-<place>``; other identifiers go, but for those that
    something refers to, which are numbered behind ``name``. ``colours`` translates hexadecimal colours of styles.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for child in list(root):
        if _plain(child.tag) == "metadata" or child.find("{*}style") is not None:
            root.remove(child)
    names: dict[str, str] = {}
    for element in root.iter():
        for key, value in element.attrib.items():
            if _plain(key) in REFERRING and (found := REFERENCE.search(value)):
                names.setdefault(found[1], f"{name}-{len(names)}")
    for element in root.iter():
        _tidy(element, names, {key.lower(): value for key, value in colours.items()})
    return "".join(ElementTree.tostring(child, encoding="unicode") for child in root)


def _tidy(element: ElementTree.Element, names: Mapping[str, str], colours: Mapping[str, str]) -> None:
    element.tag = _plain(element.tag)
    attributes = {_plain(key): value for key, value in element.attrib.items()}
    identifier = attributes.pop("id", "")
    if ARM.fullmatch(identifier):
        attributes["class"] = f"arm {identifier}"
    elif identifier in names:
        attributes["id"] = names[identifier]
    for key in REFERRING:
        if key in attributes:
            attributes[key] = REFERENCE.sub(lambda found: f"#{names[found[1]]}", attributes[key])
    if "style" in attributes:
        style = FONT.sub("", attributes["style"])
        attributes["style"] = re.sub(r"#[0-9a-f]{6}", lambda found: colours.get(found[0], found[0]), style)
    for key in NUMBERS:
        if key in attributes:
            attributes[key] = FRACTION.sub(_rounded, NO_ROTATION.sub("", attributes[key])).replace("\n", "").strip()
    element.attrib.clear()
    element.attrib.update({key: value for key, value in attributes.items() if value})
    if element.tag != "text":  # white space between elements; that of a text is the text's
        element.text = element.text if element.text and element.text.strip() else None
    element.tail = None


def _rounded(number: re.Match[str]) -> str:
    """A hundredth of a point is finer than any screen."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _plain(name: str) -> str:
    """Without its namespace: in HTML the parser knows what is SVG."""
    return name.rpartition("}")[2]
