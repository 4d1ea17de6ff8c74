"""Pages in a real Chromium: a picture of each at two widths, and the text that a reader cannot see.

One start serves all pages: a page of frames, each as wide as a screen, whose script measures.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.thorough import IS_THOROUGH

WIDTHS = (1400, 400)  # a desktop's and a phone's
GAP = 20  # between frames in the picture
# Of the picture: Chromium draws no more than this, and what is not drawn is measured all the same.
HEIGHT = 16_000 if IS_THOROUGH else 2_000
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
SCRIPT = """
const SLACK = 0.75;  // pixels that rounding may take
function problems(page, width) {
  const found = [], note = (kind, text) => found.push(`${width}: ${kind}: ${text.trim()}`);
  const view = page.defaultView, root = page.documentElement;
  if (root.scrollWidth > root.clientWidth) note("wider than the screen", `${root.scrollWidth}`);
  const labels = [];
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (!node.data.trim() || node.parentElement.closest("script,style")) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (!box.width) continue;
      let scrolls = false;
      for (let at = node.parentElement; at && at !== page.body; at = at.parentElement) {
        const style = view.getComputedStyle(at), own = at.getBoundingClientRect();
        const hides = (way) => ["hidden", "clip"].includes(way);
        const tall = box.top < own.top - SLACK || box.bottom > own.bottom + SLACK;
        const wide = box.left < own.left - SLACK || box.right > own.right + SLACK;
        if (hides(style.overflowY) && tall) note("cut off above or below", node.data);
        if (hides(style.overflowX) && wide && !scrolls) note("cut off at a side", node.data);
        if (at.tagName === "svg" && (tall || wide)) note("outside of its picture", node.data);
        if (["auto", "scroll"].includes(style.overflowX)) {
          if (at.scrollWidth > at.clientWidth && !at.matches("pre, .scroll"))
            note("scrolls without a hint", node.data);
          scrolls = true;
        }
      }
      if (!scrolls && (box.left < -SLACK || box.right > root.clientWidth + SLACK))
        note("outside of the screen", node.data);
      const plot = node.parentElement.closest(".plot");
      if (plot) labels.push({ plot, box, text: node.data });
    }
  }
  labels.forEach((one, i) => labels.slice(i + 1).forEach((other) => {
    if (one.plot !== other.plot) return;
    const a = one.box, b = other.box;
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 4) note("words over words", `${one.text} / ${other.text}`);
  }));
  return found;
}
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    page.querySelectorAll("details").forEach((one) => { one.open = true; });
    frame.style.height = `${page.documentElement.scrollHeight}px`;
    (found[frame.title] ??= []).push(...problems(page, frame.clientWidth));
  }
  document.querySelector("pre").textContent = JSON.stringify(found);
});
"""


def look_at(pages: Mapping[str, str], picture: Path) -> dict[str, list[str]]:
    """The problems of each page (HTML by name) at `WIDTHS`; draws all of them in `picture`.

    Skips the test where there is no Chromium.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("needs chromium (Debian's package), which `make test` installs as root")
    frames = "".join(
        f'<iframe title="{escape(name)}" style="width:{width}px" srcdoc="{escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in WIDTHS
    )
    style = f"body{{margin:0}} iframe{{border:0;margin-right:{GAP}px;vertical-align:top}}"
    harness = picture.with_suffix(".html")
    harness.write_text(
        f'<!doctype html><meta charset="utf-8"><style>{style}</style><body>{frames}'
        f"<pre hidden></pre><script>{SCRIPT}</script>",
        encoding="utf-8",
    )
    size = f"{sum(WIDTHS) + 2 * GAP + 4},{HEIGHT}"
    command = [program, *OPTIONS, f"--user-data-dir={picture.with_suffix('.profile')}"]
    command += [f"--window-size={size}", f"--screenshot={picture}", "--dump-dom"]
    done = subprocess.run(
        [*command, harness.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    result = re.search(r"<pre hidden[^>]*>(.*?)</pre>", done.stdout, re.DOTALL)
    assert result, done.stderr[-2000:]
    problems: dict[str, Any] = json.loads(unescape(result[1]))
    return problems
