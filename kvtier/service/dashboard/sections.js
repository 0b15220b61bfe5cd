// The figures of this moment: tiles, tiers, and tables.

import { bar, byId, el, figure, svg, table } from "./dom.js";
import { byteRate, bytes, count, percent, seconds, share } from "./format.js";
import { recent, whole } from "./curves.js";

const MOST_ROWS = 12;
const FASTEST = 1e-5;
const SLOWEST = 30;

const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

// Adds up objects of numbers, and of such objects, field by field.
function together(rows) {
  const all = {};
  for (const row of rows) {
    for (const [name, value] of Object.entries(row)) {
      all[name] = typeof value === "number" ? (all[name] ?? 0) + value : together([all[name] ?? {}, value]);
    }
  }
  return all;
}

const reasons = (flows, kind) =>
  Object.entries(flows).flatMap(([tier, flow]) =>
    Object.entries(flow[kind]).map(([reason, blocks]) => ({ tier, kind, reason, blocks })));

function tile(title, value, text, note = null) {
  return el("div", { class: "tile" }, el("dt", {}, title),
    el("dd", {}, figure(value, text), note === null ? null : el("small", {}, note)));
}

// handed: bytes that callers were handed, all of them from host memory, in place.
function tier(name, stats, flow, handed) {
  const full = share(stats.bytes, stats.capacity_bytes - stats.bytes);
  const read = name === "host" ? ["Handed out", handed, bytes] : ["Read", flow.read_bytes, bytes];
  const rows = [["Blocks", stats.blocks, count], read, ["Written", flow.written_bytes, bytes],
    ["Evicted", sum(Object.values(flow.evicted), (n) => n), count],
    ["Dropped", sum(Object.values(flow.dropped), (n) => n), count], ["Corrupt", flow.corrupt, count]];
  const known = stats.capacity_bytes > 0;
  return el("article", { class: "card", "data-tier": name },
    el("div", { class: "row" }, el("h3", {}, el("span", { class: `tier ${name}` }, name)),
      el("p", { class: "big" }, known ? figure(full, percent) : "")),
    known ? bar(full, `${percent(full)} of ${name} is occupied`, name) : null,
    el("p", { class: "quiet" }, figure(stats.bytes, bytes),
      ...(known ? [" of ", figure(stats.capacity_bytes, bytes)] : [", capacity not known"])),
    el("dl", { class: "facts" }, rows.map(([title, value, text]) =>
      el("div", {}, el("dt", {}, title), el("dd", {}, figure(value, text))))));
}

const place = (time) =>
  `${((Math.log(Math.min(Math.max(time, FASTEST), SLOWEST) / FASTEST) / Math.log(SLOWEST / FASTEST)) * 96 + 2).toFixed(1)}%`;

// Half of the calls end before the first dot, 99 of 100 before the second; by powers of ten from 10 µs to 30 s.
function spread({ p50, p99 }) {
  const label = `half within ${seconds(p50)}, 99 % within ${seconds(p99)}`;
  return svg("svg", { class: "spread", role: "img", "aria-label": label, height: "12", width: "100%" },
    svg("line", { class: "grid", x1: "2%", x2: "98%", y1: 6, y2: 6 }),
    svg("line", { class: "span", x1: place(p50), x2: place(p99), y1: 6, y2: 6 }),
    svg("circle", { class: "half", cx: place(p50), cy: 6, r: 4 }),
    svg("circle", { class: "most", cx: place(p99), cy: 6, r: 4 }));
}

// How calls ended that did not end well: figures and words, as children of an element.
function otherwise(outcomes) {
  const rest = Object.entries(outcomes).filter(([outcome]) => outcome !== "ok");
  return rest.flatMap(([outcome, n], at) =>
    [at > 0 ? ", " : "", figure(n, count), ` ${outcome.replaceAll("_", " ")}`]);
}

export class Sections {
  constructor() {
    const bytesColumn = ["In host", "number"];
    this.spaces = table("Namespaces, most bytes in host first",
      [["Namespace", ""], ["Tenant", "whose"], bytesColumn, ["Share", "wide extra"], ["Blocks", "number extra"],
        ["Put", "number"], ["Read hits", "number"], ["Match hits", "number"]],
      "No namespace yet.");
    this.tenants = table("Tenants, most bytes in host first",
      [["Tenant", ""], bytesColumn, ["Of its quota", "number"], ["In", "number"], ["Out", "number"],
        ["Read hits", "number"], ["Leases", "number extra"], ["Pins", "number extra"], ["In flight", "number extra"]],
      "No tenant.");
    this.losses = table("Blocks evicted and dropped, by tier and reason",
      [["Reason", ""], ["Tier", ""], ["What", ""], ["Blocks", "number"], ["Share", "wide extra"]],
      "Nothing had to leave, and every block was taken.");
    this.verbs = table("Calls of all tenants by verb, how they ended and how long they took",
      [["Verb", ""], ["Ended well", "number"], ["Otherwise", ""], ["Half within", "number"], ["99 % within", "number"],
        ["10 µs to 30 s", "wide extra"]],
      "Shown to tokens with the scope admin.");
    for (const name of ["spaces", "tenants", "losses", "verbs"]) byId(name).replaceChildren(this[name].node);
  }

  // stats: of the service; tenants: those that are looked at; history: theirs.
  show(stats, tenants, history) {
    const tiers = together(tenants.map(({ tiers: own }) => own));
    const flows = together(tenants.map(({ flows: own }) => own));
    this.tiles(stats, tenants, tiers, history);
    const handed = sum(tenants, (one) => one.out_bytes);
    byId("tiers").replaceChildren(...Object.keys(flows).map((name) => tier(name, tiers[name], flows[name], handed)));
    this.showSpaces(tenants);
    this.showTenants(stats.tenants);
    this.showLosses(flows);
    this.showVerbs(stats.verbs);
  }

  tiles(stats, tenants, tiers, history) {
    byId("tiles").replaceChildren(
      tile("Read hits", whole(history, "hits", "misses"), percent, "in this range"),
      tile("Match hits", whole(history, "matched", "unmatched"), percent, "in this range"),
      tile("In", recent(history, history.in_bytes), byteRate),
      tile("Out", recent(history, history.out_bytes), byteRate),
      tile("Blocks in host", tiers.host.blocks, count),
      tile("Leases", sum(tenants, (one) => one.leases), count),
      tile("Pins", sum(tenants, (one) => one.pins), count),
      tile("Calls under way", stats.calls, count),
    );
  }

  showSpaces(tenants) {
    byId("spaces").classList.toggle("alone", tenants.length < 2);
    const rows = tenants.flatMap(({ name, namespaces }) => namespaces.map((space) => ({ ...space, tenant: name })));
    rows.sort((a, b) => b.host_bytes - a.host_bytes || b.stored_bytes - a.stored_bytes);
    const all = sum(rows, (row) => row.host_bytes);
    const cells = rows.slice(0, MOST_ROWS).map((row) => [
      row.name, row.tenant, figure(row.host_bytes, bytes),
      bar(all > 0 ? row.host_bytes / all : 0, `${percent(all > 0 ? row.host_bytes / all : 0)} of what is in host`),
      figure(row.host_blocks, count), figure(row.stored_bytes, bytes), figure(share(row.hits, row.misses), percent),
      figure(share(row.matched, row.unmatched), percent),
    ]);
    const rest = rows.slice(MOST_ROWS);
    if (rest.length > 0) {
      const stored = figure(sum(rest, (row) => row.stored_bytes), bytes);
      cells.push([`${rest.length} more`, "", figure(sum(rest, (row) => row.host_bytes), bytes), "",
        figure(sum(rest, (row) => row.host_blocks), count), stored, "", ""]);
    }
    this.spaces.show(cells);
  }

  showTenants(tenants) {
    byId("tenants-part").hidden = tenants.length < 2;
    const rows = [...tenants].sort((a, b) => b.tiers.host.bytes - a.tiers.host.bytes || a.name.localeCompare(b.name));
    this.tenants.show(rows.map((one) => [
      one.name, figure(one.tiers.host.bytes, bytes),
      figure(share(one.tiers.host.bytes, one.quotas.host - one.tiers.host.bytes), percent),
      figure(one.in_bytes, bytes), figure(one.out_bytes, bytes),
      figure(share(one.traffic.hits, one.traffic.misses), percent),
      figure(one.leases, count), figure(one.pins, count), figure(one.inflight_bytes, bytes),
    ]));
  }

  showLosses(flows) {
    const rows = [...reasons(flows, "evicted"), ...reasons(flows, "dropped")].sort((a, b) => b.blocks - a.blocks);
    const most = Math.max(1, ...rows.map(({ blocks }) => blocks));
    this.losses.show(rows.map(({ tier: name, kind, reason, blocks }) => [
      reason.replaceAll("_", " "), el("span", { class: `tier ${name}` }, name), kind, figure(blocks, count),
      bar(blocks / most, `${count(blocks)} blocks`, name),
    ]));
  }

  showVerbs(verbs) {
    const calls = ({ outcomes }) => sum(Object.values(outcomes), (n) => n);
    this.verbs.show([...verbs].sort((a, b) => calls(b) - calls(a)).map((verb) => [
      el("code", {}, verb.verb), figure(verb.outcomes.ok ?? 0, count),
      otherwise(verb.outcomes),
      figure(verb.p50, seconds), figure(verb.p99, seconds), spread(verb),
    ]));
  }
}
