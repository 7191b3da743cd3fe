import assert from "node:assert/strict";
import { test } from "node:test";

import { Worker } from "../src/index.js";

const QUEUES = { PENSTOCK_OUTBOUND_QUEUE: "http://127.0.0.1:1/q/out", PENSTOCK_RESULTS_QUEUE: "http://127.0.0.1:1/q/in" };

test("queues are named, and keys are keys", () => {
  assert.throws(() => Worker.fromEnvironment({}, {}), /PENSTOCK_OUTBOUND_QUEUE must be the name or URL of a queue/);
  assert.throws(() => Worker.fromEnvironment({}, { ...QUEUES, PENSTOCK_RESULTS_QUEUE: "" }), /PENSTOCK_RESULTS_QUEUE/);
  assert.throws(() => Worker.fromEnvironment({}, { ...QUEUES, PENSTOCK_PAYLOAD_KEYS: "c2hvcnQ=" }), /32 bytes in base64/);
});

test("an action has one handler, and a worker without SQS ends when it is told to", async () => {
  const events: string[] = [];
  const worker = Worker.fromEnvironment(
    { log: (_, event) => events.push(event), graceSeconds: 1 },
    { ...QUEUES, PENSTOCK_AWS_REGION: "us-east-1", PENSTOCK_SQS_ENDPOINT_URL: "http://127.0.0.1:1" },
  ).action("a", () => 1);
  assert.throws(() => worker.action("a", () => 2), /has a handler already/);
  const running = worker.run();
  setTimeout(() => worker.stop(), 200);
  await running;
  assert.deepEqual([events[0], events.at(-1)], ["worker_started", "worker_stopped"]);
});
