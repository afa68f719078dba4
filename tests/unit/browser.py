"""A page as headless Chromium sees it: what is drawn, what overflows, what the console says, how many sheets."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((result for name in NAMES if (result := shutil.which(name))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--allow-file-access-from-files", "--virtual-time-budget=10000", "--enable-logging=stderr", "--hide-scrollbars",
]  # fmt: skip

# A frame has any width, a headless window none below 500.
PROBE = """<!doctype html><body style="margin:0">
<iframe id="page" src="PAGE" style="border:0;width:WIDTHpx;height:4000px"></iframe>
<pre id="found"></pre><script>
const frame = document.getElementById("page");
frame.addEventListener("load", () => setTimeout(() => {
  const inside = frame.contentDocument, root = inside.documentElement;
  const charts = [...inside.querySelectorAll(".chart")].map((place) => ({
    title: place.getAttribute("aria-label"),
    svgs: place.querySelectorAll("svg.main-svg").length,
    shapes: place.querySelectorAll(".trace path, .trace .point, .bars .point, .scatterlayer path").length,
    width: Math.max(0, ...[...place.querySelectorAll("svg.main-svg")].map((svg) => svg.getBoundingClientRect().right)),
    room: place.closest(".card").getBoundingClientRect().right,
  }));
  document.getElementById("found").textContent = JSON.stringify({
    width: root.clientWidth, scroll: root.scrollWidth, charts,
    titles: [...inside.querySelectorAll("h1, h2, h3")].map((each) => each.textContent),
  });
}, 2500));
</script>"""


def look(page: Path, width: int, place: Path) -> dict:
    """Return {"width", "scroll", "charts", "titles", "console"} of the page in a frame of `width` pixels."""
    probe = place / f"probe-{width}.html"
    probe.write_text(PROBE.replace("PAGE", page.as_uri()).replace("WIDTH", str(width)))
    done = _run(place, ["--dump-dom", f"--window-size={max(width, 500)},4000", probe.as_uri()])
    result = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert result and result[1], done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(html.unescape(result[1])), "console": console}


def on_paper(page: Path, place: Path) -> tuple[int, list[tuple[float, float]]]:
    """Return the number of sheets, and of each chart, as laid out there, the right edges of drawing and card."""
    copy, target = place / "paper.html", place / "paper.pdf"
    copy.write_text(page.read_text().replace("</body>", f"<script>{PAPER_PROBE}</script></body>"))
    _run(place, [f"--print-to-pdf={target}", "--no-pdf-header-footer", copy.as_uri()])
    content = target.read_bytes()
    title = re.search(rb"/Title \((\[.*?\])\)", content, re.S)
    assert title, "the page was not told that it is printed"
    return len(re.findall(rb"/Type\s*/Page\b", content)), json.loads(title[1])


PAPER_PROBE = """
window.matchMedia("print").addEventListener("change", () => {
  const right = (each) => Math.round(each.getBoundingClientRect().right);
  document.title = JSON.stringify([...document.querySelectorAll(".chart")].map((place) =>
    [Math.max(...[...place.querySelectorAll("svg.main-svg")].map(right)), right(place.closest(".card"))]));
});
"""


def _run(place: Path, arguments: list[str]) -> subprocess.CompletedProcess:
    assert CHROMIUM
    profile = place / "profile"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
