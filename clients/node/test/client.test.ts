/** Against an api whose queues a worker of this package serves: tests/acceptance/test_node_kit.py starts both. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  Client, DuplicateTask, InvalidParams, RpcError, StateConflict, TaskCancelled, TaskFailed, TaskNotFound, Unavailable, WaitTimeout,
} from "../src/index.js";

type Suite = {
  "conformance.echo": { payload: { value: unknown }; result: unknown };
  "conformance.fail": { payload: { message: string; final: boolean }; result: never };
  "conformance.sleep": { payload: { seconds: number }; result: null };
  "conformance.steps": { payload: { seconds: number }; result: string[] };
};

const skip = process.env["PENSTOCK_API_URL"] ? false : "PENSTOCK_API_URL names no api";
const client = new Client<Suite>();

test("a task is enqueued, run by the worker, and its result awaited", { skip }, async () => {
  const { id, duplicate } = await client.enqueue("conformance.echo", { value: { é: [1, null] } }, { priority: 5, uniqueKey: "echo-1" });
  assert.equal(duplicate, false);
  assert.deepEqual(await client.wait(id, { timeout: 60, action: "conformance.echo" }), { é: [1, null] });
  const status = await client.status(id);
  assert.deepEqual([status.state, status.attempts, status.priority], ["SUCCESS", 1, 5]);
  assert.equal((await client.enqueue("conformance.echo", { value: 1 }, { uniqueKey: "echo-1" })).duplicate, true);
  await assert.rejects(client.enqueue("conformance.echo", { value: 1 }, { uniqueKey: "echo-1", onDuplicate: "error" }), DuplicateTask);
});

test("many tasks are added by one request, and refused ones stand in their place", { skip }, async () => {
  const tasks = Array.from({ length: 50 }, (_, value) => ({ action: "conformance.echo" as const, payload: { value } }));
  const found = await client.enqueueMany([...tasks, { ...tasks[0]!, options: { priority: 1e9 } }]);
  assert.ok(found.pop() instanceof InvalidParams);
  const ids = found.map((one) => (one instanceof RpcError ? assert.fail(one.message) : one.id));
  const results = await Promise.all(ids.map((id) => client.wait(id, { timeout: 60 })));
  assert.deepEqual(results, tasks.map((task) => task.payload.value));
  assert.deepEqual((await client.status([ids[0]!, 10 ** 12])).map((one) => one?.state), ["SUCCESS", undefined]);
});

test("durable steps go through a whole pipeline", { skip }, async () => {
  const { id } = await client.enqueue("conformance.steps", { seconds: 0 });
  assert.deepEqual(await client.wait(id, { timeout: 60 }), ["one", "two", "three"]);
});

test("failures, cancellations and timeouts are errors of their own", { skip }, async () => {
  const failed = await client.enqueue("conformance.fail", { message: "no such mailbox", final: true });
  await assert.rejects(client.wait(failed.id, { timeout: 60 }), (thrown: TaskFailed) => {
    assert.ok(thrown instanceof TaskFailed);
    assert.equal(thrown.error?.message, "no such mailbox");
    return true;
  });
  const later = await client.enqueue("conformance.sleep", { seconds: 0 }, { runAt: new Date(Date.now() + 3_600_000) });
  await assert.rejects(client.wait(later.id, { timeout: 0.2 }), WaitTimeout);
  await client.cancel(later.id, "not needed");
  await assert.rejects(client.wait(later.id), (thrown: TaskCancelled) => thrown instanceof TaskCancelled && thrown.reason === "not needed");
  await assert.rejects(client.cancel(failed.id), StateConflict);
  await assert.rejects(client.status(10 ** 12), TaskNotFound);
});

test("an api that is not there is unavailable", async () => {
  await assert.rejects(new Client("http://127.0.0.1:1", { timeout: 5 }).status(1), Unavailable);
});
