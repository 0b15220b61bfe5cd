// The page: asks the service again and again, and shows what it says, or since when it says nothing.

import { byId, el, say } from "./dom.js";
import { Curves } from "./curves.js";
import { Events } from "./events.js";
import { clock, duration } from "./format.js";
import { Sections } from "./sections.js";
import { Refused, ask, token } from "./service.js";

const ALL = "";
const POLL_MS = 2000;
const KEY = "3f1ae6c08d6c5f4b9d0c5f0e7b1a2c3d";

const sections = new Sections();
const curves = new Curves();
const events = new Events();
const state = { tenant: ALL, seconds: 600, since: null, following: false, timer: null, asked: 0 };

function status(kind, text) {
  document.documentElement.dataset.state = kind;
  say(byId("status"), text);
}

function firstLines() {
  const secret = token.get() === null ? "" : ' -H "Authorization: Bearer $TOKEN"';
  const api = `${location.origin}/v1`;
  const blocks = `${api}/namespaces/demo/blocks`;
  return [
    `curl${secret} ${api}/namespaces --json '{"name": "demo"}'`,
    "head -c 262144 /dev/urandom > block",
    `curl${secret} -T block ${blocks}/${KEY}`,
    `curl${secret} ${api}/match --json '{"namespace": "demo", "keys": ["${KEY}"]}'`,
    `curl${secret} -o got ${blocks}/${KEY}`,
  ].join("\n");
}

function showTenants(names) {
  if (!names.includes(state.tenant)) state.tenant = ALL;
  const choice = byId("tenant");
  const wanted = [ALL, ...names];
  if ([...choice.options].map(({ value }) => value).join(",") !== wanted.join(",")) {
    choice.replaceChildren(...wanted.map((name) => el("option", { value: name }, name === ALL ? "all" : name)));
    choice.value = state.tenant;
  }
  byId("tenant-choice").hidden = names.length < 2;
}

function show(stats, history) {
  state.since = null;
  status(stats.draining ? "draining" : "ready", stats.draining ? "Draining: new calls are refused" : "Ready");
  say(byId("uptime"), `up ${duration(stats.uptime)}`);
  const tenants = stats.tenants.filter(({ name }) => state.tenant === ALL || name === state.tenant);
  byId("entry").hidden = true;
  byId("figures").hidden = false;
  byId("forget").hidden = token.get() === null;
  byId("first").hidden = stats.tenants.some(({ namespaces }) => namespaces.length > 0);
  say(byId("first-lines"), firstLines());
  sections.show(stats, tenants, history);
  curves.show(history, state.seconds);
  if (!state.following) {
    state.following = true;
    events.start();
  }
}

// The figures that were shown stay, as of then.
function lost(error, since) {
  state.since ??= since;
  const [what, why] = error instanceof Refused ? ["No figures", ` (${error.message})`] : ["Unreachable", ""];
  status("lost", `${what} since ${clock(state.since)}${why}, trying again`);
  say(byId("uptime"), "");
}

function enter(error) {
  const first = byId("entry").hidden;
  status("closed", "Token needed");
  say(byId("uptime"), "");
  const unknown = token.get() === null ? "" : "This token opens nothing here: it is unknown, revoked or expired.";
  say(byId("entry-error"), error.status === 401 ? unknown : error.message);
  leave();
  byId("figures").hidden = byId("first").hidden = true;
  byId("entry").hidden = false;
  if (first) byId("token").focus();
}

function leave() {
  token.forget();
  state.following = false;
  events.end();
  byId("forget").hidden = true;
}

async function poll() {
  clearTimeout(state.timer);
  const mine = (state.asked += 1);
  const began = Date.now() / 1000;
  let then = () => {};
  try {
    const stats = await ask("/v1/stats");
    showTenants(stats.tenants.map(({ name }) => name));
    const query = new URLSearchParams({ seconds: state.seconds });
    if (state.tenant !== ALL) query.set("tenant", state.tenant);
    const history = await ask(`/v1/stats/history?${query}`);
    then = () => show(stats, history);
  } catch (error) {
    const closed = error instanceof Refused && (error.status === 401 || error.status === 403);
    then = () => (closed ? enter(error) : lost(error, began));
  }
  // Another one was asked for meanwhile: its answer is what counts.
  if (mine !== state.asked) return;
  try {
    then();
  } finally {
    if (byId("entry").hidden && !document.hidden) state.timer = setTimeout(poll, POLL_MS);
  }
}

byId("entry-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(byId("token").value.trim());
  byId("token").value = "";
  poll();
});
byId("forget").addEventListener("click", () => {
  leave();
  poll();
});
byId("tenant").addEventListener("change", ({ target }) => {
  state.tenant = target.value;
  poll();
});
byId("range").addEventListener("change", ({ target }) => {
  state.seconds = Number(target.value);
  poll();
});
// There is none where the page came over plain HTTP from another machine.
byId("first-copy").hidden = navigator.clipboard === undefined;
byId("first-copy").addEventListener("click", async ({ target }) => {
  await navigator.clipboard.writeText(firstLines());
  target.textContent = "Copied";
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("entry").hidden) poll();
});
poll();
