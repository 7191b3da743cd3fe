// What the peers' scripts for Node share: as barrier.py. Packages are resolved from PEER_NODE_MODULES.

import fs from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

export const DATABASE_URL = process.env.PEER_DATABASE_URL;
const FOLDER = process.env.PEER_FOLDER;
const FILL_BATCH = 500;
const STOP_MS = 3000;

export const load = createRequire(`${process.env.PEER_NODE_MODULES}/peers.js`);

let begun = false;

// Called by every handler; only a process's first call does something.
export function noteStart() {
  if (begun) return;
  begun = true;
  const now = BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000)) * 1000n;
  fs.writeFileSync(`${FOLDER}/first.${process.pid}`, String(now));
}

// Everything is imported: say so, and wait for the others.
export async function waitForGo() {
  fs.writeFileSync(`${FOLDER}/ready.${process.pid}`, "");
  while (!fs.existsSync(`${FOLDER}/go`)) await sleep(2);
}

// Work until SIGTERM, then stop within some seconds.
export async function untilStopped(stop) {
  await new Promise((resolve) => process.once("SIGTERM", resolve));
  await Promise.race([stop().catch(() => {}), sleep(STOP_MS)]);
  process.exit(0);
}

// Enqueue so many tasks by batches, given as arrays of payloads.
export async function fill(tasks, insert) {
  for (let first = 0; first < tasks; first += FILL_BATCH) {
    const size = Math.min(FILL_BATCH, tasks - first);
    await insert(Array.from({ length: size }, (_, place) => ({ n: first + place })));
  }
}
