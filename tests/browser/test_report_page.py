"""The report page in a real browser: headless Chromium, driven by Selenium, on a real ablation."""

import base64
import io
import json
import math
import re
import shutil
import time
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
from selenium.webdriver.support.ui import Select, WebDriverWait
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
    settings = config(folder, text(folder), eval_every=EVERY, body_lr=2e-3).settings
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


# Marks the page as it opens, until something is clicked or chosen in it.
MARK = """
document.body.dataset.untouched = 'yes';
for (const event of ['click', 'change', 'keydown'])
    addEventListener(event, () => delete document.body.dataset.untouched, true);
"""


@pytest.fixture
def page(browser: webdriver.Chrome, experiment: Path) -> Iterator[webdriver.Chrome]:
    """The page as it opens, on a wide screen; nothing it does may be worth a line in the console."""
    look(browser)
    if not browser.execute_script("return document.body.dataset.untouched"):
        load(browser, experiment)
        browser.execute_script(MARK)
    yield browser
    assert browser.get_log("browser") == []


def load(browser: webdriver.Chrome, experiment: Path) -> None:
    browser.get((experiment / "report.html").as_uri())
    wait_for(browser, "return document.body.dataset.drawn")


def wait_for(browser: webdriver.Chrome, condition: str, *arguments: Any) -> Any:
    return WebDriverWait(browser, 20, 0.05).until(lambda page: page.execute_script(condition, *arguments))


def look(browser: webdriver.Chrome, width: int = 1400, scheme: str = "light", media: str = "screen") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def all_of(page: webdriver.Chrome | WebElement, selector: str) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, selector)


def one_of(page: webdriver.Chrome | WebElement, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def pixels(element: WebElement) -> np.ndarray:
    """The element's colours as integers, 0xRRGGBB."""
    image = Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB")
    return np.asarray(image, dtype=int) @ [0x10000, 0x100, 1]


def plot_named(page: webdriver.Chrome, name: str) -> WebElement:
    return one_of(page, f"figure[aria-labelledby=figure-{name}] .plot")


def full(plot: WebElement, path: str) -> Any:
    """What plotly made of the figure: _fullLayout.yaxis.range."""
    return plot.parent.execute_script(f"return arguments[0].{path}", plot)


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


def test_the_value_under_the_pointer_is_the_measured_one(page: webdriver.Chrome, experiment: Path) -> None:
    for name, quantity in (("val-loss-tokens", "val_loss"), ("delta-ti", "delta_ti")):
        plot = plot_named(page, name)
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        x = full(plot, "_fullLayout.xaxis._offset") + full(plot, "_fullLayout.xaxis.l2p(640)")  # 5 x 16 tokens, 8 steps
        ActionChains(page).move_to_element_with_offset(plot, round(x - plot.size["width"] / 2), 0).perform()
        shown = wait_for(page, "return arguments[0].querySelector('.hoverlayer').textContent", plot)
        for arm in ARMS:
            mean, low, high = measured(experiment, arm, quantity, step=8)
            found = re.search(rf"{arm} : (\S+) \((\S+) to ([^)]+)\)", shown)
            assert found, shown
            np.testing.assert_allclose([float(value) for value in found.groups()], [mean, low, high], rtol=6e-5)
        assert ("perplexity" in shown) == (quantity == "val_loss") and " at " not in shown


def test_text_can_be_read_in_both_schemes(page: webdriver.Chrome) -> None:
    page.execute_script("document.querySelector('details').open = true")
    for scheme, paper in (("dark", "#14171c"), ("light", "#ffffff")):
        look(page, scheme=scheme)
        wait_for(
            page, "return arguments[0].layout.paper_bgcolor === arguments[1]", plot_named(page, "turning-P"), paper
        )
        found: list[dict[str, Any]] = page.execute_script(CONTRAST)
        assert len(found) > 200 and {"text", "td", "figcaption", "dd"} <= {one["tag"] for one in found}
        assert (luminance(found[0]["paper"]) < 0.1) == (scheme == "dark")
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
    assert max(plot.size["width"] for plot in all_of(page, ".plot svg.main-svg")) <= 640


def test_every_figure_has_a_name_and_is_drawn(page: webdriver.Chrome) -> None:
    figures = all_of(page, "figure")
    assert len(figures) == 12
    for figure in figures:
        plot = one_of(figure, ".plot")
        heading = figure.find_element(By.XPATH, "preceding-sibling::h3").text
        assert figure.accessible_name == heading and heading in plot.accessible_name
        assert one_of(plot, "svg.main-svg").size["height"] > 300 < plot.size["width"] and not all_of(plot, "img")
        buttons = [button.get_dom_attribute("data-title") for button in all_of(plot, ".modebar-btn")]
        assert buttons == ["Zoom", "Pan", "Reset axes", "Download as PNG", "Download as SVG"], "none sends it anywhere"
        colours = set(
            page.execute_script(
                "return arguments[0].data.filter(one => one.meta).map(one => one.meta.arm + one.line.color)", plot
            )
        )
        assert colours <= {"0#0072B2", "1#D55E00", "2#009E73"}, "an arm has one colour"
    assert len(np.unique(pixels(plot))) > 30
    choice = Select(one_of(figure, "select"))  # of a weight
    shown = "return arguments[0].data.filter(one => one.visible && one.meta).map(one => one.meta.weight)"
    assert len(choice.options) == 7 and set(page.execute_script(shown, plot)) == {choice.options[0].text}
    choice.select_by_index(6)
    assert set(page.execute_script(shown, plot)) == {choice.options[6].text}


def test_an_arm_can_be_hidden_and_shown_and_axes_rescale(page: webdriver.Chrome) -> None:
    boxes = all_of(page, ".arms input")
    assert [box.accessible_name for box in boxes] == list(ARMS)
    plot = plot_named(page, "delta-ti")
    arms = "arguments[0].data.filter(one => one.visible === true && one.meta).map(one => one.meta.arm)"
    shown, count = f"return {arms}", f"return new Set({arms}).size"
    whole = full(plot, "_fullLayout.yaxis.range")
    assert set(page.execute_script(shown, plot)) == {0, 1, 2} and (pixels(plot) == 0x0072B2).any()
    boxes[0].click()
    boxes[2].click()
    assert set(page.execute_script(shown, plot)) == {1}
    legend = one_of(plot, ".legend").location["y"] - plot.location["y"]
    assert not (pixels(plot)[: int(legend)] == 0x0072B2).any(), "only its name is left"
    low, high = full(plot, "_fullLayout.yaxis.range")
    assert high - low < (whole[1] - whole[0]) / 4
    rows = all_of(page, "#results ~ .scroll tbody tr")
    assert [float(row.value_of_css_property("opacity")) < 1 for row in rows] == [True, False, True]
    look(page, media="print")
    wait_for(page, f"{count} === 3", plot)  # paper shows every arm
    assert not one_of(page, ".arms").is_displayed()
    look(page)
    wait_for(page, f"{count} === 1", plot)
    boxes[0].send_keys(Keys.SPACE)
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    all_of(plot, ".legendtoggle")[2].click()  # a name in any figure does the same
    wait_for(page, "return document.querySelectorAll('.arms input:checked').length === 3")
    np.testing.assert_allclose(full(plot, "_fullLayout.yaxis.range"), whole)


def test_a_figure_is_saved_as_png_and_svg(page: webdriver.Chrome, tmp_path: Path) -> None:
    look(page, scheme="dark")
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    plot = plot_named(page, "defect")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    for place, name in ((3, "defect.png"), (4, "defect.svg")):
        all_of(plot, ".modebar-btn")[place].click()
        deadline = time.monotonic() + 20
        while not (tmp_path / name).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    picture = Image.open(tmp_path / "defect.png").convert("RGB")
    assert picture.width > 800 and picture.getpixel((2, 2)) == (255, 255, 255), "white whatever the screen is"
    drawing = (tmp_path / "defect.svg").read_text()
    assert drawing.startswith("<svg") and ARMS[1] in drawing and "rgb(213, 94, 0)" in drawing


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
    assert column(page, "defect")[1][0] == column(page, "defect")[1][2] == "—" != column(page, "defect")[1][1]
    for _ in range(2):  # what has no number stands last in both directions
        one_of(column(page, "defect")[0], "button").click()
        assert column(page, "defect")[1][1:] == ["—", "—"]


def test_the_page_is_no_wider_than_a_small_screen(browser: webdriver.Chrome, experiment: Path) -> None:
    look(browser, width=360)
    load(browser, experiment)
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 360
    assert all(plot.size["width"] <= 360 for plot in all_of(browser, ".plot svg.main-svg"))
    assert browser.get_log("browser") == []


def test_without_a_script_the_values_are_there(browser: webdriver.Chrome, experiment: Path) -> None:
    look(browser)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get((experiment / "report.html").as_uri())
        assert not all_of(browser, ".modebar") and not one_of(browser, ".arms").is_displayed()
        plots = all_of(browser, ".plot")
        assert (
            len(plots) == 12 and "The values are below" in plots[0].text and "Last values" in plots[0].accessible_name
        )
        assert len(all_of(browser, "figure details td")) > 100
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
