// From counts over time to curves: rates between samples, shares, occupancy.

import { byId } from "./dom.js";
import { Chart } from "./chart.js";
import { byteRate, percent, rate, share } from "./format.js";

const RECENT_SECONDS = 10;
const SHORTEST_SECONDS = 60;

// The sample of this moment comes in between two others: without the one before, its interval is not a moment's only.
function points(times) {
  const chosen = times.map((_, at) => at);
  const last = times.length - 1;
  const [now, before] = [times[last] - times[last - 1], times[last - 1] - times[last - 2]];
  if (last >= 2 && now < before / 2) chosen.splice(last - 1, 1);
  return chosen;
}

const between = (values, chosen) => chosen.slice(1).map((at, n) => Math.max(values[at] - values[chosen[n]], 0));

// How much per second lately.
export function recent(history, values) {
  const last = history.times.length - 1;
  const begin = history.times[last] - RECENT_SECONDS;
  const from = Math.max(history.times.findLastIndex((time) => time <= begin), 0);
  const seconds = history.times[last] - history.times[from];
  return seconds > 0 ? Math.max(values[last] - values[from], 0) / seconds : 0;
}

// The share over all of the history.
export function whole(history, found, missing) {
  const last = history.times.length - 1;
  return share(history[found][last] - history[found][0], history[missing][last] - history[missing][0]);
}

export class Curves {
  constructor() {
    this.hits = new Chart({ title: "Hit ratio of blocks", text: percent, top: 1,
      empty: "Nothing was read or matched in this time" });
    this.callers = new Chart({ title: "Bytes from and to callers", text: byteRate, base: 1024,
      empty: "No bytes in this time" });
    this.full = new Chart({ title: "Occupancy of tiers", text: percent, top: 1, empty: "No samples yet" });
    this.flows = new Chart({ title: "Flows of tiers", text: byteRate, base: 1024, empty: "No bytes in this time" });
    this.lost = new Chart({ title: "Blocks evicted and dropped", text: (value) => rate(value, "blocks"), empty: "None in this time" });
    byId("curves").replaceChildren(...[this.hits, this.callers, this.full, this.flows].map(({ node }) => node));
    byId("lost").replaceChildren(this.lost.node);
  }

  show(history, seconds) {
    const { times, tiers } = history;
    const chosen = points(times);
    const to = times[times.length - 1];
    const ends = chosen.slice(1).map((at) => times[at]);
    const lengths = between(times, chosen);
    const perSecond = (values) => between(values, chosen).map((n, at) => (lengths[at] > 0 ? n / lengths[at] : 0));
    const ratio = (found, missing) => {
      const rest = between(history[missing], chosen);
      return between(history[found], chosen).map((n, at) => share(n, rest[at]));
    };
    // A young service fills the width with what there is.
    const from = Math.max(to - seconds, Math.min(times[0], to - SHORTEST_SECONDS));
    const draw = (chart, series, at = ends) => chart.show(at, series, from, to);
    draw(this.hits, [
      { name: "reads", kind: "first", values: ratio("hits", "misses") },
      { name: "matches", kind: "second", dashed: true, values: ratio("matched", "unmatched") },
    ]);
    draw(this.callers, [
      { name: "in", kind: "first", values: perSecond(history.in_bytes) },
      { name: "out", kind: "second", dashed: true, values: perSecond(history.out_bytes) },
    ]);
    const named = Object.entries(tiers);
    draw(this.full, named.filter(([, tier]) => tier.capacity_bytes.some((n) => n > 0)).map(([name, tier]) => ({
      name, kind: name, values: chosen.map((at) => share(tier.bytes[at], tier.capacity_bytes[at] - tier.bytes[at])),
    })), chosen.map((at) => times[at]));
    // What callers are handed lies in host: that it is read there is the curve beside this one.
    draw(this.flows, named.flatMap(([name, tier]) => [
      ...(name === "host" ? [] : [{ name: `${name} read`, kind: name, values: perSecond(tier.read_bytes) }]),
      { name: `${name} written`, kind: name, dashed: true, values: perSecond(tier.written_bytes) },
    ]));
    draw(this.lost, named.flatMap(([name, tier]) => [
      { name: `${name} evicted`, kind: name, values: perSecond(tier.evicted) },
      { name: `${name} dropped`, kind: name, dashed: true, values: perSecond(tier.dropped) },
    ]));
  }
}
