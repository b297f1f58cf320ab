"""Style of the comparison's page, beside that of the dataset report."""

STYLE = """\
body { max-width: 1440px; }
table.runs td, table.runs th, table.settings td, table.settings th { vertical-align: baseline; white-space: nowrap; }
.runs tbody th:first-child, .settings tbody th:first-child, .runs thead th:first-child,
.settings thead th:first-child { position: sticky; left: 0; z-index: 1; padding-right: 12px; background: var(--card); }
.runs td.label { min-width: 15em; max-width: 24em; white-space: normal; overflow-wrap: anywhere; }
.settings td { max-width: 18em; overflow-wrap: anywhere; white-space: normal; }
.settings code { display: block; color: var(--soft); font-size: 10.5px; font-weight: 400; }
.key { display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 3px;
  background: var(--color); }
.best { font-weight: 600; }
.mark { display: inline-block; margin-left: 6px; padding: 0 6px; border: 1px solid currentColor; border-radius: 8px;
  color: var(--warn); font-size: 12px; white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0 0 12px; padding: 0; list-style: none;
  font-size: 13px; }
.legend li { overflow-wrap: anywhere; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 14px 20px; }
.curves figure, figure.alone { margin: 0; min-width: 0; }
figcaption { font-size: 13px; color: var(--soft); }
.curves img, figure.alone img { display: block; max-width: 100%; height: auto; }
.narrow { display: none; }
.targets { width: 100%; }
.targets tbody th { white-space: nowrap; }
.targets td.bar { min-width: 9em; white-space: nowrap; text-indent: 6px;
  background: linear-gradient(var(--bar), var(--bar)) no-repeat; background-origin: content-box;
  background-size: var(--width, 0) 1.5em; }
ul.notes { margin: 14px 0 0; padding-left: 20px; }
h1 + .soft { overflow-wrap: anywhere; }
section.dataset { margin-top: 34px; padding: 0; border: 0; background: none; }
@media (max-width: 600px) { .only-wide { display: none; } .narrow { display: block; } }
"""
