// Live events: the latest changes of the tiers, as they come.

import { byId, el, figure, say, table } from "./dom.js";
import { clock, count, rate } from "./format.js";
import { follow } from "./service.js";

const KEPT = 60;
const DRAW_MS = 250;
const RATE_MS = 5000;
const RETRY_MS = 2000;

const COLUMNS = [["Time", ""], ["Event", ""], ["Tier", ""], ["Namespace", ""], ["Blocks", "number unit"],
  ["First key", "extra"], ["Reason", ""]];

function cells({ kind, data }) {
  if (kind === "gap") return [clock(Date.now() / 1000), "gap", "", "", "", "", "some events came too late to be kept"];
  const tier = el("span", { class: `tier ${data.tier}` }, data.tier);
  const key = data.keys.length > 0 ? el("code", {}, data.keys[0].slice(0, 12)) : "";
  const namespace = data.namespace ?? "all";
  return [clock(data.time), kind, tier, namespace, figure(data.keys.length, count), key, data.reason];
}

export class Events {
  constructor() {
    this.rows = [];
    this.arrived = [];
    this.last = null;
    this.paused = false;
    this.stop = new AbortController();
    this.table = table("Latest events, newest first", COLUMNS, "No event since this page was opened.", "short");
    byId("events").replaceChildren(this.table.node);
    byId("events-pause").addEventListener("click", () => this.pause());
    setInterval(() => this.draw(), DRAW_MS);
  }

  pause() {
    this.paused = !this.paused;
    const button = byId("events-pause");
    button.setAttribute("aria-pressed", String(this.paused));
    button.textContent = this.paused ? "Go on" : "Pause";
    this.changed = true;
  }

  // Follows until `end`, through restarts of the service.
  async start() {
    const { signal } = (this.stop = new AbortController());
    while (!signal.aborted) {
      try {
        await follow(this.last, signal, (kind, id, data) => this.take(kind, id, data));
      } catch {
        // The status line tells of it: its own requests fail, too.
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  end() {
    this.stop.abort();
    this.rows = [];
    this.last = null;
    this.changed = true;
  }

  take(kind, id, data) {
    this.last = id;
    this.arrived.push({ at: Date.now(), blocks: data.keys?.length ?? 0 });
    this.rows.unshift({ kind, data });
    this.rows.length = Math.min(this.rows.length, KEPT);
    this.changed = true;
  }

  draw() {
    const since = Date.now() - RATE_MS;
    this.arrived = this.arrived.filter(({ at }) => at >= since);
    const blocks = this.arrived.reduce((sum, one) => sum + one.blocks, 0);
    say(byId("events-rate"), `${rate((blocks * 1000) / RATE_MS, "blocks")}`);
    if (!this.changed || this.paused) return;
    this.changed = false;
    this.table.show(this.rows.map(cells));
  }
}
