// The service: requests under this tab's token, and the stream of events.

const KEY = "kvtier-token";
const PATIENCE_MS = 10_000;
// A comment comes every 15 seconds at least.
const SILENCE_MS = 40_000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (secret) => sessionStorage.setItem(KEY, secret),
  forget: () => sessionStorage.removeItem(KEY),
};

function headers(more = {}) {
  const secret = token.get();
  return secret === null ? more : { ...more, Authorization: `Bearer ${secret}` };
}

async function refusal(answer) {
  const told = await answer.json().catch(() => null);
  return new Refused(answer.status, told?.error?.message ?? `status ${answer.status}`);
}

// Throws Refused for what the service refuses, and whatever fetch throws where there is no service.
export async function ask(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

function parse(message) {
  const event = { kind: "message", id: null, data: "" };
  for (const line of message.split("\n")) {
    const at = line.indexOf(": ");
    const [field, value] = [line.slice(0, at), line.slice(at + 2)];
    if (field === "event") event.kind = value;
    if (field === "id") event.id = value;
    if (field === "data") event.data += value;
  }
  return event;
}

/*
 * Follows /v1/events after the event `last` until `signal`, the service or a silence ends it; `told` is given kind, id
 * and data of each. By fetch, as an EventSource cannot send a token.
 */
export async function follow(last, signal, told) {
  const silence = new AbortController();
  const from = last === null ? {} : { "Last-Event-ID": last };
  const answer = await fetch("/v1/events", {
    headers: headers(from), cache: "no-store", signal: AbortSignal.any([signal, silence.signal]),
  });
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const timer = setTimeout(() => silence.abort(), SILENCE_MS);
    const { done, value } = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    text += value;
    const messages = text.split("\n\n");
    text = messages.pop();
    for (const message of messages) {
      const { kind, id, data } = parse(message);
      if (data !== "") told(kind, id, JSON.parse(data));
    }
  }
}
