"use strict";
// Draws the charts by plotly.js, and makes the legends and the heads of the tables work. Without scripts the page shows
// pictures instead.
const colorOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = {solid: "solid", dashed: "dash", dotted: "dot"};
const escape = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/** Returns the traces of a line: its band if it has several seeds, the line, and a cross at its end. */
function tracesOf(line) {
  const shared = {name: `${line.number}`, legendgroup: `${line.number}`};
  const trace = {
    ...shared, x: line.x, y: line.mean, mode: line.mode, marker: {color: line.color},
    line: {color: line.color, dash: DASHES[line.stroke], width: line.width},
    text: line.texts?.map(escape), hovertemplate: line.texts ? "%{text}" : "%{y:.5~g}",
  };
  const traces = [trace];
  if (line.low) {
    const ys = [...line.low, ...line.high.toReversed()];
    traces.unshift({...shared, x: [...line.x, ...line.x.toReversed()], y: ys, mode: "none", fill: "toself",
      fillcolor: `${line.color}33`, hoverinfo: "skip"});
    trace.customdata = line.low.map((low, place) => [low, line.high[place], line.count[place]]);
    trace.hovertemplate += " (%{customdata[0]:.5~g} to %{customdata[1]:.5~g}, %{customdata[2]} seeds)";
  }
  if (line.has_cross)
    traces.push({...shared, x: line.x.slice(-1), y: line.mean.slice(-1), mode: "markers",
      marker: {color: line.color, symbol: "x", size: 8}, hovertemplate: "%{y:.5~g}, diverged"});
  return traces;
}

/** Joins the grey lines, because hundreds of traces take seconds. */
function joined(lines) {
  const all = of => lines.flatMap(line => [...of(line), null]);
  const numbers = all(line => line.x.map(() => line.number));
  return {x: all(line => line.x), y: all(line => line.mean), customdata: numbers, legendgroup: "", mode: lines[0].mode,
    marker: {color: lines[0].color}, line: {color: lines[0].color, width: 1},
    hovertemplate: lines[0].texts ? "group %{customdata}<extra></extra>" : "%{y:.5~g}<extra>%{customdata}</extra>"};
}

function axisOf(given) {
  return {automargin: true, exponentformat: "SI", gridcolor: colorOf("--line"), zeroline: false, type: given.scale ?? "linear",
    title: {text: given.label ?? ""}, rangemode: given.lim ? "tozero" : "normal",
    ...(given.ticks && {tickvals: given.ticks, ticktext: (given.ticklabels ?? []).map(escape)})};
}

function draw(figure) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const isGrey = line => line.color === figure.dataset.grey && line.number > 0 && !line.has_cross;
  const grey = chart.lines.filter(isGrey), strokes = Object.keys(DASHES);
  const named = chart.lines.filter(line => !isGrey(line));
  named.sort((one, other) => strokes.indexOf(one.stroke) - strokes.indexOf(other.stroke));  // gaps are on top
  const traces = [...(grey.length ? [joined(grey)] : []), ...named.flatMap(tracesOf)];
  const annotations = chart.notes.map(([x, y, text]) => ({x, y, text: escape(text), showarrow: false,
    bgcolor: colorOf("--card"), borderpad: 0}));
  const layout = {
    annotations, height: 300, margin: {l: 56, r: 24, t: 12, b: 44}, showlegend: false,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: {size: 11, color: colorOf("--soft")},
    hoverlabel: {namelength: -1, bgcolor: colorOf("--card"), font: {color: colorOf("--text")}}, hovermode: named.length > 12 || chart.notes.length ? "closest" : "x unified",
    xaxis: axisOf(chart.x), yaxis: axisOf(chart.y),
  };
  figure.querySelector("img")?.replaceWith(Object.assign(document.createElement("div"), {className: "plot"}));
  return Plotly.react(figure.querySelector(".plot"), traces, layout, {responsive: true, displayModeBar: false});
}

function button(place, act) {
  const made = document.createElement("button");
  made.append(...place.childNodes);
  place.append(made);
  made.addEventListener("click", act);
  return made;
}

/** Lets a click on an entry hide or show its lines in the charts of the section, and a double click hide all others. */
function legend(list) {
  const items = [...list.querySelectorAll("[data-number]")];
  const show = () => {
    const hidden = new Set(items.filter(item => item.classList.contains("off")).map(item => item.dataset.number));
    for (const plot of list.parentElement.querySelectorAll(".plot"))
      Plotly.restyle(plot, {visible: plot.data.map(trace => !hidden.has(trace.legendgroup))});
  };
  for (const item of items) {
    const made = button(item, () => { item.classList.toggle("off"); show(); });
    made.addEventListener("dblclick", () => {
      const isAlone = items.every(other => other === item || other.classList.contains("off"));
      items.forEach(other => other.classList.toggle("off", !isAlone && other !== item));
      show();
    });
  }
}

const UNITS = {ms: 1e-3, min: 60, h: 3600, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12};

/** Returns the number that a cell begins with, in the unit that it names, or its text. */
function valueOf(row, column) {
  const text = row.cells[column]?.textContent.trim() ?? "-";
  const [, number, unit] = text.match(/^(-?\d[\d.,]*(?:e[+-]?\d+)?)(?: ± \S+)?(?: (\S+))?/) ?? [];
  return number ? Number(number.replaceAll(",", "")) * (UNITS[unit] ?? 1) : text;
}

/** Orders numbers before texts, and cells without a value last. */
function compare(one, other, sign) {
  if (one === "-" || other === "-") return (one === "-") - (other === "-");
  if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
  return sign * (typeof one === "number" ? one - other : one.localeCompare(other));
}

function sort(head) {
  const column = head.cellIndex, body = head.closest("table").tBodies[0];
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  body.append(...[...body.rows].sort((one, other) => compare(valueOf(one, column), valueOf(other, column), sign)));
}

/** Unpacks plotly.js and runs it; the page's policy names its hash. */
async function library() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), byte => byte.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.body.append(Object.assign(document.createElement("script"), {textContent: await new Response(unpacked).text()}));
}

const root = document.documentElement, figures = [...document.querySelectorAll("figure.chart")];
const drawAll = () => Promise.all(figures.map(draw));
root.classList.add("scripted");
document.querySelectorAll("thead th").forEach(head => button(head, () => sort(head)));
library().then(drawAll).then(() => {
  document.querySelectorAll("ul.legend").forEach(legend);
  root.classList.add("drawn");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
});
