"use strict";
// Reads /metrics, and computes rates and quantiles from two readings of it.
const SAMPLE = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/;

// Text in Prometheus' format -> a list of { name, labels, value }.
function parsed(text) {
  return text.split("\n").map((line) => SAMPLE.exec(line)).filter(Boolean).map(([, name, inside, value]) => ({
    name,
    labels: Object.fromEntries([...(inside || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) => [key, text])),
    value: Number(value),
  }));
}

// The sum of a metric over all series with these labels.
function sum(samples, name, labels = {}) {
  return samples
    .filter((one) => one.name === name && Object.entries(labels).every(([key, value]) => one.labels[key] === value))
    .reduce((total, { value }) => total + value, 0);
}

// By how much a counter grew; a server that started anew counts from 0.
function grown(older, newer, name, labels) {
  const now = sum(newer, name, labels), then = sum(older, name, labels);
  return now >= then ? now - then : now;
}

// A quantile of what a histogram counted between two readings, in seconds; linear within a bucket; null without any.
function quantile(share, older, newer, name) {
  const bounds = [...new Set(newer.filter((one) => one.name === `${name}_bucket`).map(({ labels }) => labels.le))];
  const steps = bounds.map((le) => [le === "+Inf" ? Infinity : Number(le), grown(older, newer, `${name}_bucket`, { le })]);
  steps.sort(([one], [other]) => one - other);
  const all = steps.length ? steps[steps.length - 1][1] : 0;
  if (!all) return null;
  let below = 0, low = 0;
  for (const [high, count] of steps) {
    if (count >= share * all) return high === Infinity ? low : low + ((high - low) * (share * all - below)) / Math.max(count - below, 1e-9);
    [below, low] = [count, high];
  }
  return low;
}

// The mean of what a histogram counted between two readings, in seconds; 0 without any.
function mean(older, newer, name, labels) {
  const count = grown(older, newer, `${name}_count`, labels);
  return count ? grown(older, newer, `${name}_sum`, labels) / count : 0;
}
