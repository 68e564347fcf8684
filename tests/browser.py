"""Pages in headless Chromium: what overflows, cannot be read, has no name or asks for something."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (1400, 400)
SCHEMES = {"light": "1", "dark": "0"}  # blink's numbers of them

HARNESS = """<!DOCTYPE html><html style="color-scheme: light dark"><head><meta charset="utf-8"><title>harness</title>
<link rel="icon" href="data:,"></head><body><script>
const pages = PAGES, widths = WIDTHS, findings = [];
function channels(text) {
  const numbers = text.match(/[0-9.]+/g).map(Number);
  return numbers.length > 3 ? numbers : [...numbers.slice(0, 3), 1];
}
function over(front, back) { return [0, 1, 2].map(i => front[i] * front[3] + back[i] * (1 - front[3])).concat(1); }
function luminance(colour) {
  const linear = colour.slice(0, 3).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}
function ground(element, view) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const colour = channels(view.getComputedStyle(at).backgroundColor);
    if (colour[3] > 0) layers.push(colour);
    if (colour[3] === 1) break;
  }
  return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255, 1]);
}
function onPicture(element) {
  const drawing = element.closest("svg");
  if (!drawing) return false;
  const box = element.getBoundingClientRect(), x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
  return [...drawing.querySelectorAll("image")].some(image => {
    const there = image.getBoundingClientRect();
    return there.left <= x && x <= there.right && there.top <= y && y <= there.bottom;
  });
}
function unreadable(page, view) {
  const found = new Set(), walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.closest("style, script, defs") || onPicture(element)) continue;
    const style = view.getComputedStyle(element);
    const back = ground(element, view);
    const ink = over(channels(element.closest("svg") ? style.fill : style.color), back);
    const [dark, light] = [luminance(ink), luminance(back)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.add(`${ratio.toFixed(2)}: ${element.tagName} ${text.slice(0, 40)}`);
  }
  return [...found];
}
function unnamed(page) {
  const named = e => (e.getAttribute("aria-label") || "").trim() || e.querySelector(":scope > title");
  const bad = [...page.querySelectorAll("svg")].filter(e => e.getAttribute("role") !== "img" || !named(e));
  bad.push(...[...page.querySelectorAll("img")].filter(e => !e.hasAttribute("alt")));
  bad.push(...[...page.querySelectorAll("[role=region]")].filter(e => !named(e)));
  bad.push(...[...page.querySelectorAll("a, summary")].filter(e => !e.textContent.trim()));
  return bad.map(e => e.outerHTML.slice(0, 120));
}
function cut(page) {
  return [...page.querySelectorAll("svg text")].filter(text => {
    const box = text.getBoundingClientRect(), drawing = text.closest("svg").getBoundingClientRect();
    return box.left < drawing.left - 1 || box.right > drawing.right + 1 || box.top < drawing.top - 1
      || box.bottom > drawing.bottom + 1;
  }).map(text => `${text.textContent.slice(0, 60)} in ${text.closest("svg").getAttribute("aria-label")}`);
}
function twice(page) {
  const ids = [...page.querySelectorAll("[id]")].map(e => e.id);
  return ids.filter((id, place) => ids.indexOf(id) !== place);
}
function look(frame, name, width) {
  const page = frame.contentDocument, view = frame.contentWindow;
  page.querySelectorAll("details").forEach(e => { e.open = true; });
  const asked = view.performance.getEntriesByType("resource").map(e => e.name).filter(e => !e.startsWith("data:"));
  const sides = page.documentElement.scrollWidth - view.innerWidth;
  findings.push({name, width, dark: view.matchMedia("(prefers-color-scheme: dark)").matches, texts:
    page.body.innerText.length, sideways: Math.max(0, sides), cut: cut(page), unnamed: unnamed(page),
    unreadable: unreadable(page, view), twice: twice(page), asked});
  frame.remove();
}
const left = Object.keys(pages).flatMap(name => widths.map(width => [name, width]));
function next() {
  const one = left.shift();
  if (!one) {
    const shown = document.createElement("pre");
    shown.id = "findings";
    shown.textContent = JSON.stringify(findings);
    document.body.append(shown);
    return;
  }
  const frame = document.createElement("iframe");
  frame.style.cssText = `border: 0; height: 900px; width: ${one[1]}px; color-scheme: light dark`;
  frame.onload = () => { look(frame, ...one); next(); };
  frame.srcdoc = pages[one[0]];
  document.body.append(frame);
}
next();
</script></body></html>"""
LOOKED_FOR = ("sideways", "cut", "unnamed", "unreadable", "twice", "asked")


def looked_at(
    pages: Mapping[str, str], folder: Path, scheme: str, widths: Sequence[int] = WIDTHS
) -> list[dict[str, Any]]:
    """What is wrong with pages by name at every width, everything unfolded; console: what the browser complained of."""
    texts = json.dumps(dict(pages)).replace("</", "<\\/").replace("<!--", "<\\!--")
    file = folder / f"{scheme}.html"
    file.write_text(HARNESS.replace("WIDTHS", json.dumps(list(widths)), 1).replace("PAGES", texts, 1), "utf-8")
    shown, complaints = opened(
        file, f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--window-size=1500,1000"
    )
    found = re.search(r'<pre id="findings">(.*?)</pre>', shown, re.DOTALL)
    assert found, f"the browser looked at nothing: {complaints}"
    findings: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    assert all(one["dark"] == (scheme == "dark") and one["texts"] > 500 for one in findings), "it was shown otherwise"
    return [one | {"console": complaints} for one in findings]


def opened(file: Path, *options: str) -> tuple[str, list[str]]:
    """What a browser makes of a file, and what it said on its console."""
    assert CHROMIUM is not None
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    profile = f"--user-data-dir={file.parent / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *quiet, "--virtual-time-budget=20000", profile, *options, file.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
