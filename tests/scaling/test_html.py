"""The HTML report in a real browser: offline, without console errors, its sliders live, its numbers the JSON's."""

import json
import os
import re
import shutil
import subprocess

import pytest

import scaling
from scaling.__main__ import main

CHROMIUM, DRIVER = "chromium", "chromedriver"


@pytest.fixture(scope="module")
def installed():
    """Paths of Chromium and its driver, installed from the system's packages where that is allowed."""
    if not (shutil.which(CHROMIUM) and shutil.which(DRIVER)):
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            pytest.skip("no Chromium, and no right to install it from the system's packages")
        packages = ("chromium", "chromium-driver", "fonts-dejavu-core")
        for command in (("update",), ("install", "-y", "--no-install-recommends", *packages)):
            done = subprocess.run(["apt-get", "-qq", *command], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"Chromium could not be installed: apt-get {command[0]} failed")
    return shutil.which(CHROMIUM), shutil.which(DRIVER)


@pytest.fixture
def browser(installed, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = installed[0]
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(installed[1]))
    driver.get("about:blank")
    driver.get_log(
        "performance"
    )  # reading clears it: the distribution's own start page is no report
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def variant_path(paper_path, tmp_path_factory):
    """The paper's looped runs with losses a little lower, as a variant without r = 1 runs."""
    frame = scaling.read_table(paper_path)
    frame = frame[frame["recurrences"] > 1].assign(val_loss=lambda runs: runs["val_loss"] - 0.01)
    path = tmp_path_factory.mktemp("variant") / "variant <b>&.csv"
    scaling.write_table(frame, path)
    return path


@pytest.fixture(scope="module")
def report(paper_path, variant_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    paths = [str(folder / name) for name in ("report.html", "report.md", "report.json")]
    arguments = ["--split", "regression", "--compare", str(variant_path), "--out", *paths]
    assert main(["report", str(paper_path), *arguments]) == 0
    return folder


def curve(browser):
    """Loss of the first curve at its first width."""
    return browser.execute_script("return document.getElementById('isoflops').data[0].y[0]")


def slide(browser, name, value):
    browser.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('input'))",
        name,
        value,
    )


def test_the_page_works_offline_and_its_sliders_move_the_curves(browser, report):
    browser.get((report / "report.html").as_uri())
    figures = ("isoflops", "frontier", "residuals", "histogram", "delta")
    for name in figures:
        script = f"return document.querySelectorAll('#{name} .main-svg').length"
        assert browser.execute_script(script) > 0, name

    value = json.loads((report / "report.json").read_text(encoding="utf-8"))
    text = browser.find_element("tag name", "body").text
    assert f"{value['phi']:.4f}" in text
    low, high = value["phi_ci"]
    assert f"[{low:.3f}, {high:.3f}]" in text
    assert f"{value['comparison']['delta_phi']:+.4f}" in text
    assert f"{value['laws']['scores'][0]['r2']:.4f}" in text
    assert "variant <b>&.csv" in text  # shown as text, never as markup

    # The sliders begin at the fitted φ itself, not at the nearest step.
    start = browser.execute_script("return Number(document.getElementById('phi').value)")
    assert start == pytest.approx(value["phi"], rel=1e-12)

    # r = 1 does not depend on φ; r = 2 does; all depend on C.
    looped = "return document.getElementById('isoflops').data.find(t => t.name === 'r = 2').y[0]"
    before, unlooped = browser.execute_script(looped), curve(browser)
    slide(browser, "phi", 1.0)
    assert browser.execute_script(looped) < before
    assert curve(browser) == unlooped
    slide(browser, "budget", 18.0)
    assert curve(browser) != unlooped

    # The curve is the law of the JSON, computed here without the page's script.
    law, one = value, browser.execute_script("return data.architectures[0]")
    d = one["smallest"] / 2
    n_eff = sum(
        coefficient * d**power
        for key in ("n_once", "n_rec")
        for coefficient, power in zip(one[key], (1, 2), strict=True)
    )
    tokens = 1e18 / (one["flops"][0] * d + one["flops"][1] * d * d)
    expected = law["E"] + law["A"] * n_eff ** -law["alpha"] + law["B"] * tokens ** -law["beta"]
    assert curve(browser) == pytest.approx(expected, rel=1e-9)  # pow of two languages

    errors = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert errors == []
    fetched = [
        url
        for line in browser.get_log("performance")
        for url in re.findall(r'"url":"(https?://[^"]+)"', line["message"])
    ]
    assert fetched == []


def test_a_table_without_budgets_says_why_there_are_no_curves(
    browser, make_grid, known_law, tmp_path
):
    frame = make_grid(known_law, noise=0.01).drop(columns="budget_flops")
    scaling.write_table(frame, tmp_path / "runs.csv")
    assert main(["report", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "r.html")]) == 0
    browser.get((tmp_path / "r.html").as_uri())
    assert "budget_flops" in browser.find_element("id", "law").text
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []


def test_markdown_and_page_say_the_same(report):
    text = (report / "report.md").read_text(encoding="utf-8")
    page = (report / "report.html").read_text(encoding="utf-8")
    for heading in re.findall(r"^#+ ([^\n<&]+)$", text, flags=re.MULTILINE):
        assert heading in page
