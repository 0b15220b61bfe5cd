// Elements. Text goes in as text only: names come from whoever uses the cache.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

// A figure, with its exact value beside its text.
export function figure(value, text) {
  return value === null ? el("span", { class: "quiet" }, "–") : el("data", { value: String(value) }, text(value));
}

// Sets a text only where it changed, so that nobody is told the same twice.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function bar(share, label, kind = "") {
  const width = `${(Math.min(Math.max(share, 0), 1) * 100).toFixed(2)}%`;
  return svg(
    "svg",
    { class: `bar ${kind}`, role: "img", "aria-label": label, height: "8", width: "100%" },
    svg("rect", { class: "track", width: "100%", height: "8", rx: "4" }),
    share > 0 ? svg("rect", { class: "filled", width, height: "8", rx: "4" }) : null,
  );
}

/*
 * A table that scrolls by itself where it is wider than the page, made once and then filled again and again, so that
 * focus and scroll stay where they are.
 *
 * columns: [title, kinds] with kinds of: number; wide; unit: the title is the figure's unit where there is no head;
 * extra: left out on narrow screens, where rows become paragraphs and the head goes; whose: left out there in what has
 * the class `alone`. kind: "short": rows of one line.
 * Roles are told, as what is laid out otherwise loses its own.
 */
export function table(caption, columns, empty, kind = "") {
  const body = el("tbody", { role: "rowgroup" });
  const head = el("tr", { role: "row" },
    columns.map(([title, kinds]) => el("th", { scope: "col", role: "columnheader", class: kinds }, title)));
  const whole = el("table", { role: "table", class: `rows ${kind}` }, el("caption", { class: "unseen" }, caption),
    el("thead", { role: "rowgroup" }, head), body);
  const scroller = el("div", { class: "scroller", role: "region", "aria-label": caption, tabindex: "0" }, whole);
  const nothing = el("p", { class: "quiet" }, empty);
  const node = el("div", { class: "card" }, scroller, nothing);
  const show = (rows) => {
    body.replaceChildren(
      ...rows.map((cells) =>
        el("tr", { role: "row" }, cells.map((cell, at) => {
          const [title, kinds] = columns[at];
          return at === 0
            ? el("th", { scope: "row", role: "rowheader", class: kinds }, cell)
            : el("td", { role: "cell", class: kinds, "data-title": title }, cell);
        }))),
    );
    scroller.hidden = rows.length === 0;
    nothing.hidden = rows.length > 0;
  };
  show([]);
  return { node, show };
}
