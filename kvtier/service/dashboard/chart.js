// Curves over time, in plain SVG at the size of the page, with a reading of every curve at one time and a table.

import { el, figure, say, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 180;
const EDGE = { left: 84, right: 12, top: 10, bottom: 24 };
const TABLE_ROWS = 12;
const STEPS = [10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800];

// A round number at or above `value`; `base`: 1024 for bytes, 10 for the rest.
function ceiling(value, base) {
  let unit = 1;
  while (value >= unit * base) unit *= base;
  const steps = base === 1024 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 5, 10];
  return unit * steps.find((step) => step * unit >= value);
}

function timeTicks(from, to, most) {
  const step = STEPS.find((seconds) => (to - from) / seconds <= most) ?? 43200;
  const offset = new Date(to * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) ticks.push(at);
  return ticks;
}

// Points of a curve as the pieces of a path; nulls are gaps.
function pieces(xs, values, y) {
  const runs = [];
  let run = null;
  values.forEach((value, at) => {
    if (value === null) {
      run = null;
      return;
    }
    if (run === null) runs.push((run = []));
    run.push([xs(at), y(value)]);
  });
  return runs;
}

export class Chart {
  /*
   * title: says what, and its unit; text: formats a value; top: the fixed upper end, or null; base: see `ceiling`;
   * empty: what is shown where there is nothing to draw.
   */
  constructor({ title, text, top = null, base = 10, empty }) {
    Object.assign(this, { title, text, top, base, empty });
    this.data = { times: [], series: [] };
    this.at = null;
    this.plot = svg("svg", { class: "plot", height: HEIGHT, width: "100%", tabindex: "0", role: "img" });
    this.legend = el("dl", { class: "legend" });
    this.when = el("span", { class: "quiet" });
    this.rows = el("table");
    const details = el("details", {}, el("summary", {}, "As a table"), el("div", { class: "scroller" }, this.rows));
    const head = el("figcaption", { class: "row" }, el("h3", {}, title), this.when);
    this.node = el("figure", { class: "card" }, head, this.legend, this.plot, details);
    details.addEventListener("toggle", () => this.tabulate());
    this.details = details;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  listen() {
    this.plot.addEventListener("pointermove", (event) => this.point(this.nearest(event.offsetX)));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => {
      const last = this.data.times.length - 1;
      const from = this.at ?? last;
      const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.point(Math.min(Math.max(to, 0), last));
    });
  }

  // times: seconds since 1970; series: {name, kind, dashed, values with null for none}, as long as times.
  show(times, series, from, to) {
    // The reading stays at its time while the curves move.
    const kept = this.at === null ? null : this.data.times[this.at];
    this.data = { times, series };
    this.from = from;
    this.to = to;
    const same = kept === null ? -1 : times.findIndex((time) => time >= kept);
    this.at = same < 0 ? null : same;
    this.draw();
    this.tabulate();
  }

  point(at) {
    this.at = this.data.times.length === 0 ? null : at;
    this.mark();
    this.read();
  }

  nearest(x) {
    let best = 0;
    this.data.times.forEach((_, at) => {
      if (Math.abs(this.x(at) - x) < Math.abs(this.x(best) - x)) best = at;
    });
    return best;
  }

  x(at) {
    const wide = this.width - EDGE.left - EDGE.right;
    return EDGE.left + ((this.data.times[at] - this.from) / (this.to - this.from)) * wide;
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (this.width === 0 || this.from === undefined) return;
    const { series } = this.data;
    const values = series.flatMap((one) => one.values).filter((value) => value !== null);
    const highest = Math.max(0, ...values);
    const top = this.top ?? (highest > 0 ? ceiling(highest, this.base) : 1);
    const y = (value) => HEIGHT - EDGE.bottom - (Math.min(value, top) / top) * (HEIGHT - EDGE.bottom - EDGE.top);
    this.y = y;
    const idle = this.top === null ? highest === 0 : values.length === 0;
    this.plot.replaceChildren(
      ...this.grid(top, y, idle),
      ...(idle ? [this.nothing()] : series.flatMap((one) => this.curve(one, y))),
    );
    this.mark();
    this.read();
  }

  grid(top, y, idle) {
    const right = this.width - EDGE.right;
    const levels = (idle ? [0] : [0, 0.5, 1]).flatMap((part) => [
      svg("line", { class: "grid", x1: EDGE.left, x2: right, y1: y(part * top), y2: y(part * top) }),
      svg("text", { x: EDGE.left - 8, y: y(part * top) + 4, "text-anchor": "end" }, this.text(part * top)),
    ]);
    const scale = (this.width - EDGE.left - EDGE.right) / (this.to - this.from);
    const times = timeTicks(this.from, this.to, Math.max(2, this.width / 110)).map((time) => {
      const x = EDGE.left + (time - this.from) * scale;
      return svg("text", { x, y: HEIGHT - 6, "text-anchor": x > right - 20 ? "end" : "middle" },
        clock(time, { short: this.to - this.from > 300 }));
    });
    return [...levels, ...times];
  }

  nothing() {
    const x = (EDGE.left + this.width - EDGE.right) / 2;
    return svg("text", { class: "nothing", x, y: HEIGHT / 2 - 4, "text-anchor": "middle" }, this.empty);
  }

  curve({ kind, dashed, values }, y) {
    const look = `curve ${kind}${dashed ? " dashed" : ""}`;
    return pieces((at) => this.x(at), values, y).map((run) =>
      run.length === 1
        ? svg("circle", { class: look, cx: run[0][0], cy: run[0][1], r: 2 })
        : svg("polyline", { class: look, points: run.map((spot) => spot.map((n) => n.toFixed(1)).join()).join(" ") }),
    );
  }

  // The vertical line at the time that is read, with a dot on each curve.
  mark() {
    this.plot.querySelectorAll(".mark").forEach((node) => node.remove());
    if (this.at === null || this.y === undefined) return;
    const x = this.x(this.at);
    const bottom = HEIGHT - EDGE.bottom;
    this.plot.append(svg("line", { class: "mark", x1: x, x2: x, y1: EDGE.top, y2: bottom }));
    for (const { kind, values } of this.data.series) {
      const value = values[this.at];
      if (value !== null) this.plot.append(svg("circle", { class: `mark ${kind}`, cx: x, cy: this.y(value), r: 3.5 }));
    }
  }

  // Every curve's value at the time that is pointed at, or the latest.
  read() {
    const { times, series } = this.data;
    const at = this.at ?? times.length - 1;
    say(this.when, this.at === null ? "now" : clock(times[at]));
    this.when.classList.toggle("now", this.at === null);
    this.legend.replaceChildren(
      ...series.map(({ name, kind, dashed, values }) =>
        el("div", {},
          el("dt", {}, svg("svg", { width: 18, height: 8, "aria-hidden": "true" },
            svg("line", { class: `curve ${kind}${dashed ? " dashed" : ""}`, x1: 0, x2: 18, y1: 4, y2: 4 })), name),
          el("dd", {}, figure(values[at] ?? null, this.text)))),
    );
    const told = series.map(({ name, values }) => `${name} ${values[at] == null ? "none" : this.text(values[at])}`);
    const when = times.length === 0 ? "no samples" : clock(times[at]);
    this.plot.setAttribute("aria-label", `${this.title}, ${when}: ${told.join(", ")}. Arrow keys move in time`);
  }

  tabulate() {
    if (!this.details.open) return;
    const { times, series } = this.data;
    const stride = Math.ceil(times.length / TABLE_ROWS);
    const chosen = times.map((_, at) => at).filter((at) => (times.length - 1 - at) % stride === 0).reverse();
    this.rows.replaceChildren(
      el("caption", { class: "unseen" }, this.title),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Time"),
        series.map(({ name }) => el("th", { scope: "col", class: "number" }, name)))),
      el("tbody", {}, chosen.map((at) => el("tr", {}, el("th", { scope: "row" }, clock(times[at])),
        series.map(({ values }) => el("td", { class: "number" }, figure(values[at], this.text)))))),
    );
  }
}
