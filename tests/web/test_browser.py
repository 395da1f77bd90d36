"""In a real Chromium: a run is made, damaged, alerted, healed, and the open page shows it by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptguard.testing_service import TOKEN, ServeProcess

pytestmark = pytest.mark.browser
PAGES = ("/", "/runs/1", "/checkpoints/1", "/checkpoints/2", "/jobs", "/jobs/1", "/alerts", "/login")


def opened(browser: Any, **options: Any) -> tuple[Any, list[str]]:
    """A page that notes every error of its console and every request that leaves this machine."""
    page = browser.new_context(**options).new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: wrong.append(request.url) if "127.0.0.1" not in request.url else None)
    return page, wrong


def test_the_open_page_sees_a_save_its_damage_and_its_healing(
    browser: Any, run_folder: Path, tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    (run_folder / "step_10.pt").write_bytes(small_saves[10])
    with ServeProcess(tmp_path / "state", {"runs": [{"path": str(run_folder)}]}) as service:
        page, wrong = opened(browser)
        page.goto(service.url)
        page.get_by_text("1 exact").wait_for(timeout=40_000)
        page.get_by_role("link", name="run", exact=True).click()
        (run_folder / "step_20.pt").write_bytes(small_saves[20])
        page.get_by_role("link", name="step_20.pt").first.wait_for(timeout=20_000)
        page.locator("tr", has_text="step_20.pt").get_by_text("exact").wait_for(timeout=20_000)

        damaged = bytearray(small_saves[20])
        damaged[len(damaged) // 2] ^= 1
        (run_folder / "step_20.pt").write_bytes(damaged)
        page.get_by_text("crc-mismatch: step_20.pt of run is unsafe").first.wait_for(timeout=20_000)
        assert page.locator("dd code", has_text="step_10.pt").count() == 1, "the fall-back is named"
        page.locator("table").get_by_role("link", name="step_20.pt").click()
        page.get_by_text("Do not resume from it.").wait_for()
        page.get_by_text("CRC-32").first.wait_for()

        (run_folder / "step_20.pt").write_bytes(small_saves[20])
        page.locator(".verdict.good").wait_for(timeout=20_000)
        page.goto(f"{service.url}/alerts")
        page.locator(".alert.resolved", has_text="crc-mismatch").wait_for(timeout=20_000)

        # One that was broken when it was rotated away still says why.
        (run_folder / "step_20.pt").write_bytes(damaged)
        page.locator(".alert.error", has_text="crc-mismatch").wait_for(timeout=20_000)
        (run_folder / "step_20.pt").unlink()
        page.goto(f"{service.url}/checkpoints/2")
        page.get_by_text("What held when it went:").wait_for(timeout=20_000)
        page.get_by_text("CRC-32").first.wait_for()
        assert wrong == []


@pytest.mark.parametrize("path", PAGES)
def test_every_page_fits_a_phone_in_the_dark_and_loads_nothing_from_elsewhere(
    browser: Any, served: ServeProcess, path: str
) -> None:
    page, wrong = opened(browser, viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.goto(served.url + path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert page.locator("h1").count() == 1
    assert page.evaluate(
        "[...document.querySelectorAll('svg[role],input:not([type=hidden]),button')].every("
        "e => e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim())"
    )
    assert wrong == []


def test_a_person_signs_in_runs_a_job_and_signs_out_by_keyboard_alone(
    browser: Any, served: ServeProcess
) -> None:
    page, wrong = opened(browser)
    page.goto(f"{served.url}/jobs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.get_by_role("link", name="Sign in").first.focus()
    page.keyboard.press("Enter")
    page.get_by_label("Token").wait_for()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("That is not the token.").wait_for()
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Run scrub").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="scrub").wait_for()
    page.locator(".badge.done").wait_for(timeout=20_000)
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("link", name="Sign in").first.wait_for()
    # A refused sign-in is an answer of 403, which Chromium notes as an error of the console.
    assert [text for text in wrong if "403" not in text] == []


def test_names_from_a_checkpoint_are_words_on_the_page_and_never_html(
    browser: Any, served: ServeProcess
) -> None:
    page, wrong = opened(browser)
    for path in ("/", "/runs/1", "/alerts", "/checkpoints/1", "/checkpoints/2", "/checkpoints/3"):
        page.goto(served.url + path)
        assert page.evaluate("document.querySelectorAll('main script').length") == 0
    page.goto(f"{served.url}/runs/1")
    assert page.get_by_text("<script>alert(1)").count() > 0
    assert wrong == []


def test_an_update_keeps_focus_and_what_was_opened(browser: Any, served: ServeProcess) -> None:
    page, wrong = opened(browser)
    page.goto(f"{served.url}/checkpoints/1")
    page.locator("#tensor-table summary").click()
    was_open = page.locator("#tensor-table").evaluate("e => e.open")
    page.locator('main a[href="/runs/1"]').focus()
    page.wait_for_function(
        "before => document.getElementById('updated').textContent !== before",
        arg=page.locator("#updated").text_content(),
        timeout=15_000,
    )
    assert page.locator("#tensor-table").evaluate("e => e.open") == was_open
    assert page.evaluate("document.activeElement.getAttribute('href')") == "/runs/1"
    assert wrong == []
