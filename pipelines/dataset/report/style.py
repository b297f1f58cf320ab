"""Style of the dataset report, in light and dark."""

STYLE = """\
:root { --page: #f6f7f9; --card: #fff; --text: #1d232c; --soft: #5b6472; --line: #dfe3e9; --bar: #c9dcf6;
  --heat: 40 102 190; --on-heat: #fff; --warn: #a8320a; }
@media (prefers-color-scheme: dark) { :root { --page: #12151a; --card: #1b2027; --text: #e6e9ee; --soft: #a3acba;
  --line: #333b46; --bar: #274469; --heat: 110 163 234; --on-heat: #0d1522; --warn: #f0a070; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1160px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 4px; font-size: 27px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 18px; }
h3 { margin: 18px 0 6px; font-size: 14px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 76ch; }
.soft { color: var(--soft); }
.warn { color: var(--warn); }
code { font-size: .92em; overflow-wrap: anywhere; }
section { margin-top: 18px; padding: 18px 20px 20px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
dl { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 14px 0 0; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
tbody th { font-weight: 400; }
.n { text-align: right; white-space: nowrap; }
.classes { width: 100%; }
.classes .name { min-width: 15em; max-width: 26em; width: 26em; overflow-wrap: anywhere; }
.classes td { min-width: 10em; white-space: nowrap; text-indent: 6px;
  background: linear-gradient(var(--bar), var(--bar)) no-repeat;
  background-origin: content-box; background-size: var(--width, 0) 1.5em; }
.classes .gap th { color: var(--soft); text-align: center; }
.matrix { font-size: 11px; }
.matrix th, .matrix td { padding: 0; border: 0; vertical-align: middle; }
.matrix thead th { height: 15em; vertical-align: bottom; color: var(--text); font-size: 11px; }
.matrix thead span { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; }
.matrix tbody th { position: sticky; left: 0; padding-right: 8px; background: var(--card); white-space: nowrap;
  text-align: right; }
.matrix td { min-width: 2.7em; height: 2.3em; text-align: center; border: 1px solid var(--card);
  background: rgb(var(--heat) / var(--share, 0)); }
.matrix.dense { font-size: 9.5px; }
.matrix.dense td { min-width: 1.5em; height: 1.5em; }
.matrix td.hot { color: var(--on-heat); }
.matrix td.same { background: var(--line); }
.list { min-width: 18em; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(232px, 1fr)); gap: 10px 16px; }
.plots figure { margin: 0; font-size: 13px; }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 18px 16px; }
.sheet figure { margin: 0; min-width: 0; font-size: 12px; line-height: 1.35; overflow-wrap: anywhere; }
.sheet img { display: block; width: 100%; height: auto; margin-bottom: 5px; border-radius: 4px;
  image-rendering: pixelated; }
.sheet code { display: block; margin-top: 3px; color: var(--soft); font-size: 10.5px; }
.rejected td { min-width: 7em; max-width: 28em; overflow-wrap: anywhere; font-size: 13px; unicode-bidi: isolate; }
@media (max-width: 600px) { body { padding: 18px 8px 40px; } section { padding: 14px 12px 16px; }
  .classes .name { min-width: 11em; } .classes td { min-width: 7em; }
  .matrix tbody th { max-width: 11em; overflow: hidden; text-overflow: ellipsis; }
  .sheet { grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); gap: 14px 12px; } }
"""
