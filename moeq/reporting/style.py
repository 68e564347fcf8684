"""The page's style sheet: light and dark, narrow screens, paper."""

from moeq.reporting.svg import ON_PAPER

_SHEET = """
:root { color-scheme: light dark;
  --paper: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --muted: #5b6570; --faint: #dfe3e8; --mark: #e8f1fb;
  --warn: #fff4dc; --warn-edge: #c98a00;
  --series-1: #0067a8; --series-2: #c4500a; --series-3: #00805c; --series-4: #a84c86; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --card: #1d2126; --ink: #e6e9ed; --muted: #9aa5b1; --faint: #353c45; --mark: #1a2f45;
  --warn: #352a10; --warn-edge: #d9a42b;
  --series-1: #5ab4f0; --series-2: #f0935a; --series-3: #3ecfa0; --series-4: #e08fc0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", Roboto, Helvetica,
  Arial, sans-serif; overflow-wrap: anywhere; }
main { max-width: 1200px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.25rem; margin: 0 0 6px; }
h3 { font-size: 1rem; margin: 26px 0 4px; }
p { margin: 6px 0 12px; max-width: 76ch; }
a { color: var(--series-1); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.87em; }
nav { margin: 14px 0 0; font-size: 0.9rem; line-height: 1.9; }
nav a { display: inline-block; margin-right: 14px; max-width: 100%; }
section { margin-top: 32px; padding-top: 18px; border-top: 1px solid var(--faint); }
.lead { color: var(--muted); margin-bottom: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 12px; margin: 18px 0 20px; }
.tile { background: var(--card); border: 1px solid var(--faint); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 1.3rem; line-height: 1.3; font-weight: 650; overflow-wrap: normal; }
.tile span { display: block; color: var(--muted); font-size: 0.85rem; }
.figures { display: flex; flex-wrap: wrap; gap: 8px 32px; align-items: flex-start; }
figure { margin: 14px 0; min-width: 0; max-width: 100%; }
.figures figure { flex: 0 1 auto; }
figcaption { color: var(--muted); font-size: 0.87rem; max-width: 76ch; margin-top: 4px; }
.scroll { overflow-x: auto; max-width: 100%; }
.scroll:focus-visible { outline: 2px solid var(--series-1); outline-offset: 2px; }
svg { display: block; height: auto; font-family: inherit; }
svg text { font-family: inherit; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: 0.9rem; margin: 6px 0 14px; font-variant-numeric: tabular-nums; }
.reading { color: var(--muted); font-size: 0.9rem; margin: 14px 0 4px; }
th, td { text-align: left; padding: 5px 14px 5px 8px; border-bottom: 1px solid var(--faint); vertical-align: top;
  overflow-wrap: normal; }
thead th { font-weight: 600; border-bottom: 1.5px solid var(--muted); vertical-align: bottom; }
tbody th { font-weight: 400; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; padding-right: 10px; }
thead .number { white-space: normal; min-width: 5.5em; }
tr.exported { background: var(--mark); }
tr.exported th, tr.exported td { font-weight: 600; }
tr.group th, tr.group td { background: var(--card); font-weight: 600; }
.tag { font-size: 0.72rem; font-weight: 600; color: var(--series-1); border: 1px solid currentColor; border-radius: 4px;
  padding: 0 5px; margin-left: 6px; white-space: nowrap; }
.over { color: var(--muted); font-weight: 400; }
.below { display: block; font-size: 0.92em; }
.warning { background: var(--warn); border-left: 4px solid var(--warn-edge); padding: 8px 12px;
  border-radius: 0 6px 6px 0; }
.digest { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.85em; overflow-wrap: anywhere; }
details { margin: 10px 0; }
summary { cursor: pointer; color: var(--series-1); }
details pre { background: var(--card); border: 1px solid var(--faint); border-radius: 8px; padding: 12px;
  overflow-x: auto; }
.terms { font-size: 0.9rem; margin: 0 0 12px; }
dl { margin: 6px 0 0; max-width: 76ch; }
dt { font-weight: 600; margin-top: 8px; }
dd { margin: 0 0 0 14px; color: var(--muted); }
li { margin: 3px 0; }
@media (max-width: 640px) { tbody th { white-space: normal; min-width: 8.5em; } td:not(.number) { min-width: 8em; } }
@media (max-width: 480px) { main { padding: 16px 12px 48px; } h1 { font-size: 1.4rem; } .tiles { gap: 8px; } }
@media print {
  :root { PRINTED --card: #f6f7f9; --mark: #e8f1fb; --warn: #fff4dc; --warn-edge: #c98a00; }
  body { font-size: 10pt; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; } nav { display: none; } .scroll { overflow: visible; }
  svg { min-width: 0 !important; } table { font-size: 8pt; } th, td { padding: 3px 8px 3px 4px; }
  figure, tr, .tile, .warning { break-inside: avoid; } h2, h3, .reading, .lead { break-after: avoid; }
}
"""

CSS = _SHEET.replace("PRINTED", " ".join(f"--{name}: {colour};" for name, colour in ON_PAPER.items()))
