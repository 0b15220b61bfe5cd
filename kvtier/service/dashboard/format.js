// Figures as text, each with its unit.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function digits(value) {
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(value >= 1 ? 3 : 2);
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1023.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(value) : Number(digits(value))} ${UNITS[unit]}`;
}

export const byteRate = (value) => `${bytes(value)}/s`;

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function rate(value, what = "") {
  return `${value >= 10 ? count(value) : Number(value.toPrecision(2))}${what === "" ? "" : ` ${what}`}/s`;
}

export function percent(share) {
  const value = share * 100;
  // What is not all, or not nothing, does not read so.
  const text = value > 99.9 && value < 100 ? "99.9" : value > 0 && value < 0.1 ? "< 0.1" : Number(value.toFixed(1));
  return `${text} %`;
}

export function seconds(value) {
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return `${Number(value.toPrecision(3))} s`;
}

export function duration(value) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => value >= size);
  if (first < 0) return "0 s";
  const [size, unit] = parts[first];
  const whole = `${Math.floor(value / size)} ${unit}`;
  const next = parts[first + 1];
  const rest = next === undefined ? 0 : Math.floor((value % size) / next[0]);
  return rest === 0 ? whole : `${whole} ${rest} ${next[1]}`;
}

export function clock(time, { short = false } = {}) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(short ? {} : { second: "2-digit" }) };
  return new Date(time * 1000).toLocaleTimeString("en-GB", options);
}

export const share = (part, rest) => (part + rest > 0 ? part / (part + rest) : null);
