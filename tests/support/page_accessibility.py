"""What a page owes all its readers, looked for in a real browser: contrast, names, room, order."""

from __future__ import annotations

from typing import Any

from chromium import Page

# WCAG 2.2, 1.4.3: https://www.w3.org/TR/WCAG22/#contrast-minimum. Text over a gradient or a picture
# is not judged; disabled controls are exempt.
_CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      layers.push(colour); if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => [...over(top, below), 1], [255, 255, 255, 1]);
  };
  const opacity = (e) => e ? Number(getComputedStyle(e).opacity) * opacity(e.parentElement) : 1;
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const e = node.parentElement, text = node.textContent.trim();
    if (!text || e.closest('script, style, noscript, svg, :disabled')) continue;
    if (!e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    if (e.closest('.sr') || opacity(e) < 1) continue;
    const style = getComputedStyle(e), below = ground(e);
    const front = over(rgba(style.color), below);
    const [a, b] = [light(front), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
  }
  return [...new Set(found)];
})()
"""

_UNNAMED = """
[...document.querySelectorAll('button, a[href], input, select, textarea, summary, [role=img]')]
  .filter((e) => e.checkVisibility())
  .filter((e) => ![e.getAttribute('aria-label'), e.textContent, e.labels?.[0]?.textContent, e.title]
    .some((name) => name && name.trim()))
  .map((e) => e.outerHTML.slice(0, 100))
"""

_DUPLICATE_IDS = """
(() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  return ids.filter((id, i) => ids.indexOf(id) !== i); })()
"""

_SKIPPED_HEADINGS = """
(() => { let last = 0; const found = [];
  for (const h of document.querySelectorAll('h1, h2, h3, h4, h5, h6')) {
    if (!h.checkVisibility()) continue;
    const level = Number(h.tagName[1]);
    if (level > last + 1) found.push(h.textContent.slice(0, 60));
    last = level;
  } return found; })()
"""

# WCAG 2.2, 2.5.8: 24 by 24 CSS pixels; links within text are exempt.
_SMALL_TARGETS = """
[...document.querySelectorAll('button, input, select, summary')]
  .filter((e) => e.checkVisibility())
  .map((e) => [e, e.getBoundingClientRect()])
  .filter(([e, r]) => r.width < 24 || r.height < 24)
  .map(([e, r]) => `${Math.round(r.width)}x${Math.round(r.height)} ${e.outerHTML.slice(0, 80)}`)
"""

_TOO_WIDE = """
(() => { const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.body.querySelectorAll('*')]
    .filter((e) => e.getBoundingClientRect().right > width + 1 && !e.closest('.scroll'))
    .slice(0, 8).map((e) => e.outerHTML.slice(0, 100)); })()
"""


def accessibility_problems(page: Page) -> dict[str, Any]:
    """Kind of problem -> where; empty where the page, as it is now, has none."""
    checks = {
        "contrast below WCAG AA": _CONTRAST,
        "controls without a name": _UNNAMED,
        "ids that are used twice": _DUPLICATE_IDS,
        "headings that skip a level": _SKIPPED_HEADINGS,
        "targets below 24 px": _SMALL_TARGETS,
        "wider than the window": _TOO_WIDE,
    }
    found = {name: page.evaluate(expression) for name, expression in checks.items()}
    problems = {name: places for name, places in found.items() if places}
    if not page.evaluate("document.documentElement.lang && document.title"):
        problems["no language or no title"] = [page.evaluate("document.title")]
    return problems


def focus_order(page: Page, most: int = 200) -> list[str]:
    """What Tab reaches from the start of the page: id, or the first words, of each."""
    page.evaluate(  # the body as the place from which Tab goes on
        "document.body.tabIndex = -1; document.body.focus(); "
        "document.body.removeAttribute('tabindex')"
    )
    reached: list[str] = []
    for _ in range(most):
        page.press("Tab")
        name = page.evaluate(
            "document.activeElement === document.body ? '' : document.activeElement.id || "
            "document.activeElement.textContent.trim().slice(0, 40)"
        )
        if not name or (reached and name == reached[0]):
            break
        reached.append(name)
    return reached
