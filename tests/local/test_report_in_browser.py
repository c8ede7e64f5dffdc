"""The report as a browser shows it: nothing fetched, nothing logged, nothing wider than the page."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.buffers.curriculum.tally import BINS
from midstream.hooks.credit.kept import described, keep
from midstream.local.events import EVENTS_FOLDER, EventWriter
from midstream.local.report.page import write_report
from tests.buffers.made import played
from tests.local.synthetic_events import write_run
from tests.local.synthetic_history import append, line, source, write_history

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STRATEGIES = ("wait", "discard", "restart", "continue", "naive", "curriculum")
PLOTS = 8 + 3
"""Of all strategies, and of the one with a curriculum."""
LONG_WORD = "a-value-without-any-space-" * 12


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    for strategy in STRATEGIES:
        write_run(run_dir, strategy, steps=16)
        (run_dir / strategy / "config.yaml").write_text(f"seed: 0\nname: {LONG_WORD}\n")
    rollout = played((3, {LONG_WORD: "x" * 900}), (4, {"\x1b\n\udcff": "y" * 9}), (5, {"c": "z" * 3000}))
    kept = [described(rollout, version=5 + index, index=index, step=0) for index in range(3)]
    keep(run_dir / "continue", 0, kept)
    write_history(run_dir / "curriculum", 16)
    append(run_dir / "curriculum", line(15, **{LONG_WORD: source(played=1, pass_rates=[1] * BINS)}))
    with EventWriter(run_dir / "curriculum" / EVENTS_FOLDER) as events:
        for version in (0, 8, 16):
            events.write("evaluation", version=version, reward_mean=0.2 + 0.02 * version)
    return write_report(run_dir)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver_binary = shutil.which("chromedriver")
    if binary is None or driver_binary is None:
        pytest.skip("no Chromium with chromedriver is installed; `make setup-browser` installs one")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_binary))
    yield driver
    driver.quit()


def open_page(browser: Any, page: Path, width_px: int, scheme: str = "light") -> None:
    metrics = {"width": width_px, "height": 900, "deviceScaleFactor": 1, "mobile": width_px < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())


@pytest.mark.parametrize("width_px", [400, 1400])
def test_the_page_fits_its_window_and_asks_for_nothing(browser: Any, report: Path, width_px: int) -> None:
    browser.get_log("browser"), browser.get_log("performance")
    open_page(browser, report, width_px)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width_px
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()]


@pytest.mark.parametrize("width_px", [400, 1400])
def test_each_plot_is_shown_once_with_its_letters_inside(browser: Any, report: Path, width_px: int) -> None:
    open_page(browser, report, width_px)
    plots = browser.execute_script("""
        return [...document.querySelectorAll('figure')].map(figure => {
            const drawings = [...figure.querySelectorAll('svg')];
            const shown = drawings.filter(svg => svg.getBoundingClientRect().width);
            const card = figure.getBoundingClientRect();
            const letters = shown.flatMap(svg => [...svg.querySelectorAll('text')]);
            return {
                shown: shown.length,
                drawn: shown[0].querySelectorAll('path').length,
                outside: letters.filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.left < card.left || box.right > card.right;
                }).map(text => text.textContent),
                smallest_px: Math.min(...letters.map(text => text.getBoundingClientRect().height)),
            };
        })""")
    assert len(plots) == PLOTS
    for plot in plots:
        assert plot["shown"] == 1
        assert plot["drawn"] > 10
        assert plot["outside"] == []
        assert plot["smallest_px"] >= 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_bars_of_workspaces_are_as_wide_as_their_shares(browser: Any, report: Path, scheme: str) -> None:
    open_page(browser, report, 1400, scheme)
    bars = browser.execute_script("""
        return [...document.querySelectorAll('.bar')].map(bar => [...bar.children].map(part => ({
            share: part.getBoundingClientRect().width / bar.getBoundingClientRect().width,
            colour: getComputedStyle(part).backgroundColor,
        })))""")
    assert len(bars) == 3
    for bar in bars:
        assert [part["share"] for part in bar] == pytest.approx([0.23, 0.0, 0.77], abs=0.01)
        assert len({part["colour"] for part in bar}) == 3


def test_whoever_does_not_see_the_plots_hears_what_they_show(browser: Any, report: Path) -> None:
    open_page(browser, report, 1400)
    names = browser.execute_script(
        "return [...document.querySelectorAll('[role=img]')].map(image => image.getAttribute('aria-label'))"
    )
    assert len(names) == PLOTS + 3
    assert all(any(digit.isdigit() for digit in name) for name in names)
    headers = browser.execute_script("""
        const results = document.querySelector('table');
        return [...results.querySelectorAll('thead th[scope=col]')].map(cell => cell.innerText.trim())""")
    assert headers[1:] == list(STRATEGIES)


def test_letters_stand_out_from_the_page_by_day_and_by_night(browser: Any, report: Path) -> None:
    for scheme in ("light", "dark"):
        open_page(browser, report, 1400, scheme)
        texts = browser.execute_script("""
            const rgb = colour => colour.match(/[0-9.]+/g).slice(0, 3).map(Number);
            const ground = getComputedStyle(document.querySelector('figure')).backgroundColor;
            const parts = document.querySelectorAll('figcaption, figcaption strong, figure svg text, td, th');
            const ink = part => getComputedStyle(part)[part.tagName == 'text' ? 'fill' : 'color'];
            return [...parts].map(part => [rgb(ink(part)), rgb(ground)])
        """)
        assert min(contrast(*pair) for pair in texts) >= 2.5
        greys = [pair for pair in texts if max(pair[0]) - min(pair[0]) < 40]
        assert min(contrast(*pair) for pair in greys) >= 4.5


def contrast(one: list[float], other: list[float]) -> float:
    """The ratio of luminances that WCAG 2 asks to be at least 4.5 for text."""
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(rgb: list[float]) -> float:
    parts = [part / 255 for part in rgb]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
