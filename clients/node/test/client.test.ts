/** Against an api whose queues a worker of this package serves: tests/acceptance/test_node_kit.py starts both. */

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { type AddressInfo } from "node:net";
import { test } from "node:test";

import {
  Client, DuplicateTask, InvalidParams, ResultGone, RpcError, StateConflict, TaskCancelled, TaskFailed, TaskNotFound, Unavailable,
  Unfinished, WaitTimeout,
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

test("a task that settles within the timeout is awaited, however short that is", { skip }, async () => {
  const { id } = await client.enqueue("conformance.sleep", { seconds: 0.3 });
  assert.equal(await client.wait(id, { timeout: 10.0001 }), null);
  assert.equal(await client.wait(id, { timeout: 0 }), null);
});

interface Call {
  id: number;
  method: string;
  params: { payload?: { at: number }; timeout?: number };
}

/** A client of a server that gives these answers, as an api does under load; `asked` has the bytes of each body. */
async function withAnswers(
  answer: (calls: Call[]) => [number, unknown], use: (client: Client, asked: number[]) => Promise<void>,
): Promise<void> {
  const asked: number[] = [];
  const server = createServer(async (request, response) => {
    const body = (await request.toArray()).join("");
    asked.push(body.length);
    const [status, found] = answer(body ? [JSON.parse(body)].flat() : []);
    response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(found));
  });
  await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
  try {
    await use(new Client(`http://127.0.0.1:${(server.address() as AddressInfo).port}`, { timeout: 5 }), asked);
  } finally {
    server.close();
    server.closeAllConnections();
  }
}

const errorOf = (code: number, data: unknown = null): object =>
  ({ jsonrpc: "2.0", id: null, error: { code, message: `error ${code}`, data } });
const accepted = (calls: Call[]): object[] =>
  calls.map(({ id, params }) => ({ jsonrpc: "2.0", id, result: { id: params.payload!.at, state: "SCHEDULED", duplicate: false } }));
const tasksOf = (number: number, bytes: number): { action: string; payload: { at: number; text: string } }[] =>
  Array.from({ length: number }, (_, at) => ({ action: "a", payload: { at, text: "x".repeat(bytes) } }));
const idsOf = (found: unknown[]): number[] => found.map((one) => (one as { id: number }).id);
const upTo = (number: number): number[] => Array.from({ length: number }, (_, at) => at);

test("waiting goes on while the api has too many requests, up to the timeout", async () => {
  const refusals: [number, unknown][] = [[429, errorOf(-32029, { retry_after: 0.05 })], [200, errorOf(-32025, { retry_after: 0.05 })]];
  const settled = { jsonrpc: "2.0", id: 0, result: { id: 1, state: "SUCCESS", result: 7, error: null } };
  await withAnswers(() => refusals.shift() ?? [200, settled], async (client, asked) => {
    assert.equal(await client.wait(1, { timeout: 5 }), 7);
    assert.equal(asked.length, 3);
  });
  await withAnswers(() => [429, errorOf(-32029, { retry_after: 60 })], async (client) => {
    await assert.rejects(client.wait(1, { timeout: 5 }), (thrown: RpcError) => thrown.code === -32029);
  });
});

test("a result that is gone, or too large for an answer, is not taken for null", async () => {
  const outcome = { id: 1, state: "SUCCESS", result: null, error: null };
  const answer = (more: object): object => ({ jsonrpc: "2.0", id: 0, result: { ...outcome, ...more } });
  await withAnswers(() => [200, answer({ result_gone: true })], async (client) => {
    await assert.rejects(client.wait(1), (thrown: ResultGone) => thrown instanceof ResultGone && thrown.taskId === 1);
  });
  const answers: [number, unknown][] = [[200, answer({ result_unread: "it is large" })], [200, { large: true }]];
  await withAnswers(() => answers.shift()!, async (client) => assert.deepEqual(await client.wait(1), { large: true }));
  const lost: [number, unknown][] = [[200, answer({ result_unread: "it is large" })], [404, errorOf(-32004)]];
  await withAnswers(() => lost.shift()!, async (client) => assert.rejects(client.wait(1), TaskNotFound));
});

test("many large tasks are sent in requests of bounded size, and in halves where the api takes less", async () => {
  await withAnswers((calls) => [200, accepted(calls)], async (client, asked) => {
    assert.deepEqual(idsOf(await client.enqueueMany(tasksOf(1500, 6000))), upTo(1500));
    assert.equal(asked.length, 3);
    assert.ok(Math.max(...asked) <= 4 * 1024 * 1024);
  });
  const least = (calls: Call[]): [number, unknown] =>
    calls.length > 3 || calls.some((call) => call.params.payload!.at === 4) ? [413, errorOf(-32013)] : [200, accepted(calls)];
  await withAnswers(least, async (client) => {
    const found = await client.enqueueMany(tasksOf(10, 10));
    assert.ok(found[4] instanceof RpcError && found[4].code === -32013);
    assert.deepEqual(idsOf(found.toSpliced(4, 1)), upTo(10).toSpliced(4, 1));
  });
});

test("what was accepted before the api was lost is known", async () => {
  const ends: [number, unknown][] = [[503, errorOf(-32000)], [429, errorOf(-32029)], [200, { error: "of a proxy" }]];
  for (const end of ends) {
    let requests = 0;
    await withAnswers((calls) => (++requests === 1 ? [200, accepted(calls)] : end), async (client) => {
      const tasks = tasksOf(1200, 10);
      await assert.rejects(client.enqueueMany(tasks), (thrown: Unfinished) => {
        assert.ok(thrown instanceof Unfinished && thrown instanceof Unavailable);
        assert.deepEqual(idsOf(thrown.results), upTo(1000));
        assert.deepEqual(thrown.unsent, tasks.slice(1000));
        return true;
      });
    });
  }
});

test("an answer that is not the api's is none: nothing is accepted, and waiting asks again after a pause", async () => {
  const answers = [
    { message: "Internal Server Error" }, { error: "x" }, { error: { code: "x" } }, { error: "x", result: {} }, {}, [], null, "x",
  ];
  for (const answer of answers) {
    await withAnswers(() => [500, answer], (client) => assert.rejects(client.enqueue("a", {}), Unavailable));
  }
  for (const answer of answers.slice(0, 2)) {
    await withAnswers(() => [500, answer], async (client, asked) => {
      await assert.rejects(client.wait(1, { timeout: 0.1 }), WaitTimeout);
      assert.equal(asked.length, 1);
    });
  }
  await withAnswers(() => [200, { jsonrpc: "2.0", id: 0, result: null }], async (client) => assert.equal(await client.call("a"), null));
});

test("an api that is not there is unavailable", async () => {
  await assert.rejects(new Client("http://127.0.0.1:1", { timeout: 5 }).status(1), Unavailable);
  const names = (thrown: unknown) => thrown instanceof RangeError && /user or a password/.test(thrown.message) && !/pa55/.test(thrown.stack!);
  for (const url of ["http://ann:pa55@127.0.0.1:1", "http://ann:pa55/x@127.0.0.1:1"]) assert.throws(() => new Client(url), names);
});

test("an option that is no time and no number is refused, and not sent as none", async () => {
  const nowhere = new Client("http://127.0.0.1:1");
  await assert.rejects(nowhere.enqueue("a", {}, { runAt: new Date("x") }), RangeError);
  await assert.rejects(nowhere.enqueue("a", {}, { delay: NaN }), RangeError);
});

test("tasks that an api without its database did not take are unsent", async () => {
  const error = { code: -32603, message: "Temporarily unavailable, try again", data: { ref: "r" } };
  const server = createServer((_, answer) => {
    answer.setHeader("Content-Type", "application/json");
    answer.end(JSON.stringify([
      { jsonrpc: "2.0", id: 0, result: { id: 1, state: "SCHEDULED", duplicate: false } }, { jsonrpc: "2.0", id: 1, error },
    ]));
  });
  await new Promise<void>((listening) => void server.listen(0, "127.0.0.1", listening));
  const near = new Client(`http://127.0.0.1:${(server.address() as AddressInfo).port}`);
  const tasks = ["a", "b"].map((action) => ({ action, payload: {} }));
  await assert.rejects(near.enqueueMany(tasks), (thrown: unknown) => {
    assert.ok(thrown instanceof Unfinished);
    assert.match(thrown.message, /1 of 2 tasks were not accepted: Temporarily/);
    assert.deepEqual(thrown.unsent, [tasks[1]]);
    return true;
  });
  server.close();
});

test("tasks that the api cannot read are refused alone", async () => {
  const answer = (calls: Call[]): object[] => calls.map(({ id }) => (id === 1 ? accepted([calls[1]!])[0]! : errorOf(-32700)));
  await withAnswers((calls) => [200, answer(calls)], async (client) => {
    const found = await client.enqueueMany(tasksOf(3, 10));
    assert.deepEqual(found.map((one) => (one instanceof RpcError ? one.code : one.id)), [-32700, 1, -32700]);
  });
});
