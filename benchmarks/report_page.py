"""Time the page of `bass report` on many samples in Chromium: opening, searching, showing a prompt.

    python benchmarks/report_page.py [SAMPLES]

The texts are random words, so they compress worse than those of a model. Needs Chromium and the
package playwright.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

N = 8  # samples of a prompt
WORDS = [f"{verb}_{noun}" for verb in ("get", "set", "sort", "sum") for noun in range(1500)]
SEARCH = """words => new Promise(done => {
  const [field, count] = ["search", "count"].map(id => document.getElementById(id));
  const began = performance.now();
  new MutationObserver(() => {
    if (/^[0-9,]+ of/.test(count.textContent)) done((performance.now() - began) / 1000);
  }).observe(count, { childList: true });
  field.value = words;
  field.dispatchEvent(new Event("input"));
})"""


def write(path: Path, samples: int) -> None:
    """Write lines as `bass generate` does, with texts of about 550 characters."""
    source = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(samples):
            text = " ".join(source.choices(WORDS, k=source.randint(20, 110)))
            row = {"id": f"prompt {number // N}", "sample": number % N, "text": text}
            row |= {"finish_reason": source.choice(("eos", "length")), "tokens": len(text) // 4}
            row |= {"mean_logprob": -source.random(), "seconds": source.random()}
            stream.write(json.dumps(row) + "\n")


def seconds_to_open(page: Page, path: Path) -> float:
    """Return the seconds until the page shows its figures."""
    began = time.perf_counter()
    page.goto(path.as_uri(), wait_until="commit")
    page.wait_for_selector("body[data-ready]", state="attached")
    return time.perf_counter() - began


def main() -> None:
    """Print the size of the page and the seconds of each step."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        lines = Path(folder, "samples.jsonl")
        write(lines, samples)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "bass_cli", "report", str(lines)], check=True)
        made = time.perf_counter() - began
        path = lines.with_suffix(".html")
        print(f"{samples} samples: made in {made:.1f} s, {path.stat().st_size / 1e6:.1f} MB")
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page()
        print(f"open {seconds_to_open(page, path):.2f} s")
        page.keyboard.press("2")
        for words in ("sort_1234", "get_321 s"):
            print(f'search "{words}" {page.evaluate(SEARCH, words):.2f} s')
        began = time.perf_counter()
        page.keyboard.press("j")
        page.wait_for_selector("#detail .chips")
        print(f"show a prompt {time.perf_counter() - began:.2f} s")
        chromium.close()


if __name__ == "__main__":
    main()
