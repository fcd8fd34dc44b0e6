"""The report page in a real browser: headless Chromium, driven by Selenium, on a real ablation."""

import base64
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import lacking
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from training_runs import config, text

from manifold_tying.training import AblateConfig, ablate
from manifold_tying.training.report import load_experiment, write_report

ARMS = ("transpose", "pit-trainable", "poet-block")
STEPS, EVERY, SEEDS = 12, 4, 2
SPEEDS = dict(zip(ARMS, (9_876.0, 12_345.0, 101.0), strict=True))  # as text they are in another order
INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver"
CONTRAST = Path(__file__).with_name("contrast.js").read_text()


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    settings = config(folder, text(folder), eval_every=EVERY, equivalence_lr=2e-3).settings
    out = folder / "out"
    rows = ablate(AblateConfig(out=out, arms=",".join(ARMS), seeds=SEEDS, settings=settings))
    rows = [row | {"tokens_per_second": SPEEDS[row["arm"]]} for row in rows]
    (out / "summary.json").write_text(json.dumps(rows))
    write_report(load_experiment(out), out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        lacking(f"no Chromium or no chromedriver here; {INSTALL}")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, experiment: Path) -> Iterator[webdriver.Chrome]:
    """The page as it opens, on a wide screen; nothing it does may be worth a line in the console."""
    look(browser)
    browser.get((experiment / "report.html").as_uri())
    yield browser
    assert browser.get_log("browser") == []


def look(browser: webdriver.Chrome, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def all_of(page: webdriver.Chrome | WebElement, selector: str) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, selector)


def one_of(page: webdriver.Chrome | WebElement, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def pixels(element: WebElement) -> np.ndarray:
    """The element's colours as integers, 0xRRGGBB; also where no script may run, to scroll to it."""
    clip = {**element.rect, "scale": 1}
    shot = element.parent.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    return np.asarray(image, dtype=int) @ [0x10000, 0x100, 1]


def plot_named(page: webdriver.Chrome, name: str) -> WebElement:
    return one_of(page, f"figure[aria-labelledby=figure-{name}] .plot")


def numbers(words: str) -> list[float]:
    """5.6279 (5.5582 to 5.6983), and 1.2×10⁻⁷."""
    raised = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    plain = [word.strip("()").replace("−", "-") for word in words.split() if word != "to"]
    return [
        float(mantissa) * 10.0 ** int(power.translate(raised) or 0)
        for mantissa, _, power in (w.partition("×10") for w in plain)
    ]


def measured(experiment: Path, arm: str, quantity: str, step: int) -> list[float]:
    """Mean, lowest and highest over the seeds, from the files of the runs."""
    values = []
    for seed in range(SEEDS):
        lines = (experiment / f"{arm}-{seed}" / "metrics.jsonl").read_text().splitlines()
        values.append(json.loads(lines[step - 1])[quantity])
    return [float(np.mean(values)), min(values), max(values)]


def test_the_console_is_silent_and_would_not_be(page: webdriver.Chrome) -> None:
    assert page.get_log("browser") == []
    page.execute_script("console.error('heard')")
    assert ["heard" in line["message"] for line in page.get_log("browser")] == [True]
    page.execute_script("document.body.append(Object.assign(document.createElement('script'), {text: 'window.x = 1'}))")
    assert page.execute_script("return window.x") is None, "no script but the page's own"
    assert "Content Security Policy" in page.get_log("browser")[0]["message"]


def test_every_figure_has_a_name_and_is_drawn(page: webdriver.Chrome, experiment: Path) -> None:
    figures = all_of(page, "figure")
    assert len(figures) == len(list(experiment.glob("*.png"))) >= 12
    for figure in figures:
        picture = one_of(figure, ".plot > svg")
        heading = figure.find_element(By.XPATH, "preceding-sibling::h3").text
        assert figure.accessible_name == heading and heading in picture.accessible_name
        assert picture.size["width"] > 300 and picture.size["height"] > 150
    assert len(np.unique(pixels(picture))) > 30


def test_the_value_under_the_pointer_is_the_measured_one(page: webdriver.Chrome, experiment: Path) -> None:
    for name, quantity in (("val-loss-tokens", "val_loss"), ("delta-ti", "delta_ti")):
        plot = plot_named(page, name)
        assert not one_of(plot, ".readout").is_displayed()
        panel = json.loads(one_of(plot, "script").get_attribute("textContent") or "")["panels"][0]
        svg = one_of(plot, "svg")
        scale = svg.size["width"] / float((svg.get_dom_attribute("viewBox") or "").split()[2])
        left, top, width, height = (part * scale for part in panel["box"])
        low, high = panel["x"]
        x = left + width * (80 * 8 - low) / (high - low)  # 5 sequences of 16 tokens, after 8 steps
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
        offsets = round(x - svg.size["width"] / 2), round(top + height / 2 - svg.size["height"] / 2)
        ActionChains(page).move_to_element_with_offset(svg, *offsets).perform()
        assert one_of(plot, ".readout p").text == "640 tokens"
        for place, arm in enumerate(ARMS):
            expected = measured(experiment, arm, quantity, step=8)
            got = numbers(one_of(plot, f"dd[data-arm='{place}']").text)
            np.testing.assert_allclose(got, expected, rtol=6e-5)
    ActionChains(page).move_to_element(one_of(page, "h1")).perform()
    assert not one_of(plot, ".readout").is_displayed()


def test_the_arrow_keys_read_the_values_too(page: webdriver.Chrome, experiment: Path) -> None:
    plot = plot_named(page, "val-loss-tokens")
    assert "arrow keys" in plot.accessible_name
    page.execute_script("arguments[0].focus()", plot)
    for key, step in (
        (Keys.ARROW_RIGHT, 4),
        (Keys.ARROW_RIGHT, 8),
        (Keys.END, 12),
        (Keys.ARROW_LEFT, 8),
        (Keys.HOME, 4),
    ):
        plot.send_keys(key)
        assert one_of(plot, ".readout p").text == f"{80 * step} tokens"
        got = numbers(one_of(plot, "dd[data-arm='1']").text)
        np.testing.assert_allclose(got, measured(experiment, ARMS[1], "val_loss", step), rtol=6e-5)
    plot.send_keys(Keys.ESCAPE)
    assert not one_of(plot, ".readout").is_displayed()


def test_an_arm_can_be_hidden_and_shown(page: webdriver.Chrome) -> None:
    boxes = all_of(page, ".arms input")
    assert [box.accessible_name for box in boxes] == list(ARMS)
    svg = one_of(plot_named(page, "val-loss-tokens"), "svg")
    blue = 0x0072B2

    def drawn() -> list[bool]:
        """Of each arm: whether all of it is seen; False where none of it is."""
        found = []
        for place in range(len(ARMS)):
            parts = f"[...document.querySelectorAll('.plot .arm-{place}')]"
            seen = page.execute_script(f"return {parts}.map(part => getComputedStyle(part).display !== 'none')")
            assert len(seen) > 20 and len(set(seen)) == 1
            found.append(seen[0])
        return found

    assert drawn() == [True] * 3 and (pixels(svg) == blue).any()
    boxes[0].click()
    assert drawn() == [False, True, True] and not (pixels(svg) == blue).any()
    rows = all_of(page, "#results ~ .scroll tbody tr")
    assert [float(row.value_of_css_property("opacity")) < 1 for row in rows] == [True, False, False]
    plot = plot_named(page, "val-loss-tokens")
    page.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.END)
    assert [cell.text for cell in all_of(plot, ".readout dt")] == list(ARMS[1:])
    look(page, media="print")
    assert drawn() == [True] * 3, "paper shows every arm"
    assert not one_of(page, ".arms").is_displayed() and not one_of(plot, ".readout").is_displayed()
    look(page)
    boxes[0].send_keys(Keys.SPACE)
    assert drawn() == [True] * 3


def column(page: webdriver.Chrome, name: str) -> tuple[WebElement, list[str], list[str]]:
    """A column's heading in the results, its cells from above, and the arms beside them."""
    table = all_of(page, "table")[0]
    heads = all_of(table, "thead th")
    place = next(i for i, head in enumerate(heads) if head.text.replace("\n", " ").startswith(name))
    rows = all_of(table, "tbody tr")
    cells = [all_of(row, "th, td")[place].text.split("\n")[0] for row in rows]
    return heads[place], cells, [one_of(row, "th").text for row in rows]


def test_tables_sort_by_number_and_go_back(page: webdriver.Chrome) -> None:
    head, cells, arms = column(page, "speed")
    assert cells == ["9,876", "12,345", "101"] and arms == list(ARMS)
    button = one_of(head, "button")
    button.click()
    assert column(page, "speed")[1] == ["101", "9,876", "12,345"] and head.get_attribute("aria-sort") == "ascending"
    button.send_keys(Keys.ENTER)
    assert column(page, "speed")[1] == ["12,345", "9,876", "101"] and head.get_attribute("aria-sort") == "descending"
    other = column(page, "val loss")[0]
    one_of(other, "button").click()
    losses = [float(cell) for cell in column(page, "val loss")[1]]
    assert losses == sorted(losses) and head.get_attribute("aria-sort") is None
    for _ in range(2):
        one_of(other, "button").click()
    assert column(page, "val loss")[2] == list(ARMS) and other.get_attribute("aria-sort") is None


def test_what_has_no_number_stands_last_in_both_directions(page: webdriver.Chrome) -> None:
    head, cells, _ = column(page, "defect")
    assert cells[0] == cells[2] == "—" != cells[1]
    for _ in range(2):
        one_of(head, "button").click()
        assert column(page, "defect")[1][1:] == ["—", "—"]


def test_the_page_is_no_wider_than_a_small_screen(page: webdriver.Chrome) -> None:
    width = 360
    look(page, width=width)
    page.refresh()
    assert page.execute_script("return document.documentElement.scrollWidth") == width
    for name in ("val-loss-tokens", "singular-values"):
        plot = plot_named(page, name)
        page.execute_script("arguments[0].focus()", plot)
        plot.send_keys(Keys.END)
        assert one_of(plot, ".readout").is_displayed()
        assert page.execute_script("return document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(page: webdriver.Chrome, scheme: str) -> None:
    look(page, scheme=scheme)
    page.refresh()
    plot = plot_named(page, "val-loss-tokens")
    page.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.END)
    found: list[dict[str, Any]] = page.execute_script(CONTRAST)
    assert len(found) > 200 and {"text", "td", "figcaption", "dd"} <= {one["tag"] for one in found}
    dark = luminance(found[0]["paper"]) < 0.1
    assert dark == (scheme == "dark")
    for one in found:
        light, deep = sorted((luminance(one["ink"]), luminance(one["paper"])), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5, one


def luminance(colour: list[float]) -> float:
    """Relative luminance of sRGB, as WCAG 2 defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else math.pow((c + 0.055) / 1.055, 2.4) for c in (part / 255 for part in colour)
    ]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def test_it_prints(page: webdriver.Chrome) -> None:
    look(page, media="print")
    printed = page.execute_cdp_cmd(
        "Page.printToPDF", {"preferCSSPageSize": True, "paperWidth": 8.27, "paperHeight": 11.69}
    )
    document = base64.b64decode(printed["data"])
    pages = len(re.findall(rb"/Type\s*/Page\b", document))
    assert document.startswith(b"%PDF") and 3 <= pages <= 20
