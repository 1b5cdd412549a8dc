"""The page of `bass report` in a real browser. Without Chromium or playwright these tests are skipped;
what the page holds is tested without them in test_report.py."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tokenizer
from scored import line, write

from bass_cli.config.evaluation_commands import ReportArgs
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.console import Screen
from bass_cli.report import server
from bass_cli.report.command import run
from bass_cli.report.runs import Reader
from bass_cli.report.server import Follower, Server
from bass_cli.report.sources import find_sources

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
if CHROMIUM is None:
    pytest.skip("Chromium is not installed", allow_module_level=True)

HOSTILE = (
    "<script>window.forged = 1</script></script><img src=x onerror='window.forged = 1'>"
    "<svg onload='window.forged = 1'>{{ 7 * 7 }}&lt;b&gt; \u202ereversed\u202c \0 \x1b[31m \ud800 end"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page of the browser. `faults`: errors and warnings of its console; `requests`: addresses."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address: str) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready]", state="attached")
        return self.page


@pytest.fixture
def tab(chromium: Any, here: Path) -> Iterator[Tab]:
    found = Tab(chromium, viewport={"width": 1200, "height": 800})
    yield found
    found.context.close()
    assert found.faults == []


def page_of(*paths: str) -> str:
    run(ReportArgs(runs=list(paths), out="page.html", overwrite=True), Screen(True))
    return Path("page.html").absolute().as_uri()


def rows(count: int, n: int = 2) -> list[dict[str, Any]]:
    return [
        {"id": f"prompt {number}", "sample": sample, "text": f"text {number}.{sample}\n<b>bold</b>",
         "finish_reason": "length" if number % 3 == 0 else "eos", "tokens": 5 + number, "mean_logprob": -0.1 * number}
        for number in range(count) for sample in range(n)
    ]  # fmt: skip


def shown(page: Any) -> list[str]:
    return page.locator("#rows .prompt .id").all_inner_texts()


def test_hostile_texts_are_shown_as_text_and_run_nothing(tab: Tab) -> None:
    names = ("id", "text", "prompt", "error", "finish_reason")
    row = {"sample": 0, "meta": {"key": HOSTILE}, **dict.fromkeys(names, HOSTILE)}
    page = tab.open(page_of(write("<img src=x onerror=alert(1)>.jsonl", [row])))
    address = page.url
    page.keyboard.press("2")
    page.keyboard.press("j")
    text = page.locator("#detail article pre.text")
    expected = HOSTILE
    for character in "\u202e\u202c\0\x1b\ud800":
        expected = expected.replace(character, f"U+{ord(character):04X}")
    assert text.text_content() == expected
    assert page.evaluate("window.forged") is None
    assert page.locator("#detail img, #detail script, #table img, #summary img").count() == 0
    assert page.locator("#detail pre .hidden-character").count() >= 10  # of the prompt and the text
    assert page.evaluate("getComputedStyle(document.querySelector('pre.text')).unicodeBidi") in (
        "isolate",
        "plaintext",
    )
    assert tab.requests == [address.partition("#")[0]]


@pytest.mark.slow
def test_keys_move_between_prompts_and_samples(tab: Tab) -> None:
    page = tab.open(page_of(write("f.jsonl", rows(40))))
    heading, pressed = (
        page.locator("#detail h2"),
        page.locator("#detail .chips [aria-pressed=true]"),
    )
    page.keyboard.press("2")
    for keys, prompt, sample in (
        ("j", 0, 0),
        ("jj", 2, 0),
        ("l", 2, 1),
        ("l", 2, 1),
        ("h", 2, 0),
        ("k", 1, 0),
    ):
        for key in keys:
            page.keyboard.press(key)
        playwright.expect(heading).to_have_text(f"prompt {prompt}")
        playwright.expect(pressed).to_have_text(re.compile(f"^{sample}"))
    page.keyboard.press("End")
    playwright.expect(heading).to_have_text("prompt 39")
    playwright.expect(page.locator(".prompt.chosen")).to_be_in_viewport()
    page.keyboard.press("Escape")
    playwright.expect(heading).to_have_count(0)
    page.keyboard.press("?")
    playwright.expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["-1", "0.5", "99", "x", "1e999"])
def test_an_address_with_a_wrong_sample_shows_one_that_exists(tab: Tab, sample: str) -> None:
    page = tab.open(f"{page_of(write('f.jsonl', rows(2)))}#/samples/prompt%201/{sample}")
    number = 1 if sample in ("99", "1e999") else 0
    playwright.expect(page.locator("#detail article pre.text")).to_contain_text(f"text 1.{number}")


@pytest.mark.slow
def test_search_filters_and_order_choose_the_prompts(tab: Tab) -> None:
    page = tab.open(page_of(write("f.jsonl", rows(40))))
    count = page.locator("#count")
    page.keyboard.press("2")
    for words, found in (
        ("TEXT 7.1", 1),
        ("<b>bold</b>", 40),
        ("prompt 3", 11),
        (".*", 0),
        ("", 40),
    ):
        page.fill("#search", words)
        playwright.expect(count).to_have_text(f"{found} of 40 prompts")
    page.get_by_role("button", name="cut 14").click()
    playwright.expect(count).to_have_text("14 of 40 prompts")
    page.select_option("#order", "longest")
    assert shown(page)[:2] == ["prompt 39", "prompt 36"]
    page.get_by_role("button", name="all 40").click()
    page.select_option("#order", "unlikeliest")
    assert shown(page)[0] == "prompt 39"
    page.fill("#search", "text 7.1")
    playwright.expect(count).to_have_text("1 of 40 prompts")
    page.locator("#search").press("Enter")
    playwright.expect(page.locator("#detail h2")).to_have_text("prompt 7")
    page.locator("#detail").get_by_role("button", name="1", exact=True).click()
    assert page.locator("#detail article mark, #detail article .hit").all_inner_texts() == [
        "text 7.1"
    ]


@pytest.mark.slow
def test_a_file_without_verdicts_has_no_filter_for_failures(tab: Tab) -> None:
    lines = rows(4)
    lines[0]["finish_reason"] = "budget"
    lines[1]["text"] = "\0" * 300_000 + "end"
    page = tab.open(page_of(write("f.jsonl", lines)))
    page.keyboard.press("2")
    assert page.locator("#filters .chip").all_inner_texts() == ["all 4", "cut 2"]
    page.keyboard.press("j")
    page.keyboard.press("l")
    expected = "U+0000 × 300000end"
    playwright.expect(page.locator("#detail article pre.text")).to_have_text(expected)


@pytest.mark.slow
def test_two_runs_show_the_same_sample_number(tab: Tab) -> None:
    some = [row for row in rows(2, n=3) if row["sample"] != 1]
    page = tab.open(page_of(write("a.jsonl", rows(2, n=3)), write("b.jsonl", some)))
    page.keyboard.press("2")
    page.keyboard.press("j")
    texts = page.locator("#detail article pre.text")
    for keys, left, right in (("", "0.0", "0.0"), ("ll", "0.2", "0.2")):
        for key in keys:
            page.keyboard.press(key)
        for side, text in ((0, left), (1, right)):
            playwright.expect(texts.nth(side)).to_contain_text(f"text {text}")


@pytest.mark.slow
def test_two_runs_are_beside_each_other_with_the_lines_that_differ(tab: Tab) -> None:
    one, other = rows(4), rows(4)
    other[2]["text"] = "text 1.0\nanother line"
    page = tab.open(page_of(write("a.jsonl", one), write("b.jsonl", other)))
    page.keyboard.press("2")
    page.get_by_role("button", name="texts differ 1").click()
    assert shown(page) == ["prompt 1"]
    page.keyboard.press("j")
    sides = page.locator("#detail article")
    playwright.expect(sides).to_have_count(2)
    assert sides.locator("h3").all_inner_texts() == ["a.jsonl", "b.jsonl"]
    assert sides.locator(".differs").all_inner_texts() == ["<b>bold</b>", "another line"]
    page.keyboard.press("b")
    playwright.expect(sides).to_have_count(1)


@pytest.mark.slow
def test_a_browser_without_the_newest_decoder_shows_the_texts(tab: Tab) -> None:
    """Uint8Array.fromBase64 is of 2025."""
    tab.context.add_init_script("delete Uint8Array.fromBase64")
    page = tab.open(page_of(write("a.jsonl", rows(2))))
    assert page.evaluate("typeof Uint8Array.fromBase64") == "undefined"
    page.keyboard.press("2")
    page.keyboard.press("j")
    assert page.locator("#detail article pre.text").text_content() == "text 0.0\n<b>bold</b>"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_drafted_tokens_are_underlined_with_a_legend_and_a_switch(
    chromium: Any, here: Path, logprobs: bool, theme: str
) -> None:
    write_tokenizer(here)
    tokenizer = Tokenizer.load(here)
    ids = [*tokenizer.encode_part("the cat sat"), 2]
    marks = [place % 2 for place in range(len(ids))]
    marks[-1] = 1  # the end of the sample comes after the text
    row = {"id": "a", "sample": 0, "text": "the cat sat", "finish_reason": "eos",
           "token_ids": ids, "token_drafted": marks}  # fmt: skip
    row |= {"token_logprobs": [-3.0] * len(ids)} if logprobs else {}
    results = {"target": str(here), "vocabulary": tokenizer.fingerprint()}
    tab = Tab(chromium, color_scheme=theme, viewport={"width": 900, "height": 700})
    page = tab.open(page_of(write("f.jsonl", [row], results=results)))
    page.keyboard.press("2")
    page.keyboard.press("j")
    drafted = page.locator("#detail pre.text .drafted")
    expected = [tokenizer.decode([id_]) for id_, mark in zip(ids, marks, strict=True) if mark][:-1]
    playwright.expect(drafted).to_have_count(len(expected))
    assert drafted.all_text_contents() == expected
    playwright.expect(page.locator("#detail .strip .drafted")).to_have_count(1)
    playwright.expect(page.locator("#detail article .note").first).to_contain_text(
        f"{sum(marks)} of {len(ids)} tokens"
    )
    line = "getComputedStyle(document.querySelector('pre.text .drafted')).textDecorationLine"
    assert page.evaluate(line) == "underline"
    assert page.locator("#detail .shade4").count() == (len(ids) if logprobs else 0)
    page.keyboard.press("d")
    playwright.expect(page.locator("#detail .drafted")).to_have_count(0)
    assert page.locator("#detail pre.text").text_content() == "the cat sat"
    page.get_by_role("button", name="underline drafted tokens").click()
    playwright.expect(drafted).to_have_count(len(expected))
    assert tab.faults == []
    tab.context.close()


@pytest.mark.slow
def test_a_phone_shows_the_list_or_a_prompt(chromium: Any, here: Path) -> None:
    tab = Tab(chromium, viewport={"width": 390, "height": 800}, color_scheme="dark", has_touch=True)
    page = tab.open(page_of(write("a.jsonl", rows(30)), write("b.jsonl", rows(30))))
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) <= 390
    page.locator("#tab-samples").tap()
    page.locator(".prompt").nth(2).tap()
    playwright.expect(page.locator("#detail h2")).to_be_visible()
    playwright.expect(page.locator("#list")).to_be_hidden()
    assert page.evaluate(width) <= 390
    page.get_by_role("button", name="prompts").tap()
    playwright.expect(page.locator("#list")).to_be_visible()
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    page.locator("#theme").tap()
    assert page.evaluate(back) != dark
    assert tab.faults == []
    tab.context.close()


@pytest.mark.slow
def test_a_page_that_is_served_follows_the_file(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BUSY", float("inf"))
    monkeypatch.setattr(server, "INTERVAL", 0.05)
    write("f.jsonl", [line(0, 0, "first")])
    (source,) = find_sources(["f.jsonl"])
    with Server(Follower([Reader(source)]), 0) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,)).start()
        try:
            page = tab.open(running.address)
            page.keyboard.press("2")
            playwright.expect(page.locator("#count")).to_have_text("1 of 1 prompts")
            page.keyboard.press("j")
            page.evaluate("window.kept = 1")
            with open("f.jsonl", "a") as stream:
                stream.write(
                    "".join(json.dumps(line(number, 0, "later")) + "\n" for number in (1, 2))
                )
            playwright.expect(page.locator("#count")).to_have_text("3 of 3 prompts")
            playwright.expect(page.locator("#status")).to_have_text("live · 3 samples")
            assert page.locator("#detail article pre.text").text_content() == "first"
            assert page.evaluate("window.kept") == 1  # the page was not loaded again
            assert all(address.startswith(running.address) for address in tab.requests)
        finally:
            tab.page.goto("about:blank")
            running.shutdown()
