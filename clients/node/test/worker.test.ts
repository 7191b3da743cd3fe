/** What has an SQS to work with runs where PENSTOCK_SQS_ENDPOINT_URL names one: tests/acceptance/test_node_kit.py starts it. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { CreateQueueCommand, ReceiveMessageCommand, SQSClient, SendMessageBatchCommand, SendMessageCommand } from "@aws-sdk/client-sqs";

import { Worker, type WorkerOptions } from "../src/index.js";
import { ResultSender } from "../src/queues.js";
import { type Entry } from "../src/steps.js";

const QUEUES = { PENSTOCK_OUTBOUND_QUEUE: "http://127.0.0.1:1/q/out", PENSTOCK_RESULTS_QUEUE: "http://127.0.0.1:1/q/in" };
const endpoint = process.env["PENSTOCK_SQS_ENDPOINT_URL"];
const skip = endpoint ? false : "PENSTOCK_SQS_ENDPOINT_URL names no SQS";

interface Report {
  id?: string;
  method?: string;
  params?: any;
  result?: unknown;
  error?: { code: number; message: string; data: Record<string, unknown> };
  steps?: Entry[];
}

async function queuesOf(messageBytes: number): Promise<{ sqs: SQSClient; outboundQueue: string; resultsQueue: string }> {
  const [accessKeyId, secretAccessKey] = process.env["PENSTOCK_SQS_ACCESS_KEY"]!.split(":") as [string, string];
  const sqs = new SQSClient({ endpoint: endpoint!, region: "us-east-1", credentials: { accessKeyId, secretAccessKey } });
  const name = `node-${process.pid}-${Math.random().toString(36).slice(2)}`;
  const [outboundQueue, resultsQueue] = await Promise.all(["out", "in"].map(async (end) => {
    const attributes = end === "in" ? { MaximumMessageSize: String(messageBytes) } : {};
    return (await sqs.send(new CreateQueueCommand({ QueueName: `${name}-${end}`, Attributes: attributes }))).QueueUrl!;
  })) as [string, string];
  return { sqs, outboundQueue, resultsQueue };
}

/** Let a worker with queues of its own answer tasks, by id, of these actions; returns all its reports. */
async function reportsOf(
  tasks: Record<string, string>, register: (worker: Worker) => void, options: Partial<WorkerOptions> = {}, messageBytes = 1024 * 1024,
): Promise<{ reports: Report[]; answers: Record<string, Report> }> {
  const { sqs, outboundQueue, resultsQueue } = await queuesOf(messageBytes);
  for (const [id, method] of Object.entries(tasks)) {
    const body = JSON.stringify({ jsonrpc: "2.0", method, params: {}, id: `${id}:1` });
    await sqs.send(new SendMessageCommand({ QueueUrl: outboundQueue, MessageBody: body }));
  }
  const worker = new Worker({ outboundQueue, resultsQueue, sqs, log: () => undefined, graceSeconds: 2, ...options });
  register(worker);
  const running = worker.run();
  const reports: Report[] = [];
  const answers: Record<string, Report> = {};
  const until = Date.now() + 15_000;
  while (Object.keys(answers).length < Object.keys(tasks).length) {
    assert.ok(Date.now() < until, `only these are answered: ${JSON.stringify(answers).slice(0, 2000)}`);
    const found = await sqs.send(new ReceiveMessageCommand({ QueueUrl: resultsQueue, WaitTimeSeconds: 1, MaxNumberOfMessages: 10 }));
    for (const message of found.Messages ?? []) {
      const entries = JSON.parse(message.Body!) as Report | Report[];
      reports.push(...(Array.isArray(entries) ? entries : [entries]));
    }
    for (const report of reports) {
      const id: string | undefined = report.id ?? (report.method === "wait" ? report.params.id : undefined);
      if (id) answers[id.split(":")[0]!] = report;
    }
  }
  worker.stop();
  await running;
  return { reports, answers };
}

test("queues are named, and keys are keys", () => {
  assert.throws(() => Worker.fromEnvironment({}, {}), /PENSTOCK_OUTBOUND_QUEUE must be the name or URL of a queue/);
  assert.throws(() => Worker.fromEnvironment({}, { ...QUEUES, PENSTOCK_RESULTS_QUEUE: "" }), /PENSTOCK_RESULTS_QUEUE/);
  assert.throws(() => Worker.fromEnvironment({}, { ...QUEUES, PENSTOCK_PAYLOAD_KEYS: "c2hvcnQ=" }), /32 bytes in base64/);
  assert.throws(() => Worker.fromEnvironment({}, { ...QUEUES, PENSTOCK_TASK_TIMEOUT_SECONDS: "15m" }), /is "15m"/);
});

test("an answer that names no entry has sent none", async () => {
  let calls = 0;
  const sqs = { send: async () => (calls++ === 0 ? {} : { Successful: [{ Id: "0" }] }) } as unknown as SQSClient;
  await new ResultSender(sqs, "a worker", () => undefined).send("{}");
  assert.equal(calls, 2);
});

test("a worker whose messages cannot be deleted ends all the same, and has a name", async () => {
  const Body = JSON.stringify({ jsonrpc: "2.0", method: "a", params: {}, id: "1:1" });
  const messages = [{ MessageId: "1", ReceiptHandle: "r", Body }];
  let isAway = true;
  let name: string | undefined;
  const sqs = {
    send: async (command: object) => {
      if (command instanceof ReceiveMessageCommand) return sleep(20, { Messages: messages.splice(0) });
      if (command instanceof SendMessageBatchCommand) {
        name = command.input.Entries![0]!.MessageAttributes!["worker"]!.StringValue;
        return { Successful: [{ Id: "0" }] };
      }
      if (isAway) throw new Error("away");
      return {};
    },
  } as unknown as SQSClient;
  const queues = { outboundQueue: "http://q/out", resultsQueue: "http://q/in" };
  const worker = new Worker({ ...queues, sqs, name: "", log: () => undefined, graceSeconds: 1 }).action("a", () => 1);
  const running = worker.run().then(() => "ended");
  await sleep(200);
  worker.stop();
  assert.equal(await Promise.race([running, sleep(5000, "hangs", { ref: false })]), "ended");
  assert.ok(name);
  isAway = false; // lets the deletion end, and with it this file
});

test("what is given back does not begin any more", async () => {
  const Body = JSON.stringify(["1:1", "2:1", "3:1"].map((id) => ({ jsonrpc: "2.0", method: "a", params: {}, id })));
  const messages = [{ MessageId: "1", ReceiptHandle: "r", Body }];
  const sqs = {
    send: async (command: object) =>
      command instanceof ReceiveMessageCommand ? sleep(20, { Messages: messages.splice(0) }) : {},
  } as unknown as SQSClient;
  const queues = { outboundQueue: "http://q/out", resultsQueue: "http://q/in" };
  const worker = new Worker({ ...queues, sqs, log: () => undefined, concurrency: 1, graceSeconds: 0.4 });
  const begun: string[] = [];
  worker.action("a", async (_, ctx) => {
    begun.push(ctx.taskId);
    await sleep(60_000, undefined, { signal: ctx.signal });
  });
  const running = worker.run();
  await sleep(100);
  worker.stop();
  await running;
  await sleep(100);
  assert.deepEqual(begun, ["1"]);
});

test("steps are counted as the pipeline keeps them", async () => {
  const key = Buffer.alloc(32).toString("base64");
  const reports: any[] = [];
  const Body = JSON.stringify({ jsonrpc: "2.0", method: "a", params: {}, id: "1:1" });
  const messages = [{ MessageId: "1", ReceiptHandle: "r", Body }];
  const sqs = {
    send: async (command: object) => {
      if (command instanceof ReceiveMessageCommand) return sleep(20, { Messages: messages.splice(0) });
      if (!(command instanceof SendMessageBatchCommand)) return {};
      for (const one of command.input.Entries!) reports.push(...[JSON.parse(one.MessageBody!)].flat());
      return { Successful: command.input.Entries!.map(({ Id }) => ({ Id })) };
    },
  } as unknown as SQSClient;
  const queues = { outboundQueue: "http://q/out", resultsQueue: "http://q/in" };
  const options = { ...queues, sqs, log: () => undefined, graceSeconds: 1, stepsLimitBytes: 1000, payloads: { keys: [key] } };
  const worker = new Worker(options).action("a", (_, ctx) => ctx.step("s", () => "x".repeat(800)));
  const running = worker.run();
  while (!reports.some((one) => one.error)) await sleep(20);
  worker.stop();
  await running;
  assert.equal(reports.find((one) => one.error).error.data.type, "JournalTooLarge");
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

test("no task ends the worker, whatever its name is and whatever its handler does", { skip }, async () => {
  const tasks = {
    1: "toString", 2: "__proto__", 3: "valueOf", 4: "spawn", 5: "number", 6: "getter", 7: "result", 8: "event", 9: "nothing",
    10: "later", 11: "left", 12: "event later", 13: "last",
  };
  const { reports, answers } = await reportsOf(tasks, (worker) => worker
    .action("__proto__", () => "proto")
    .action("valueOf", () => "value")
    .action("spawn", (_, ctx) => ctx.spawn("x", { id: 10n }))
    .action("number", () => {
      throw Object.assign(new Error(), { message: { code: 1 }, name: 7, stack: null });
    })
    .action("getter", () => {
      throw Object.defineProperty(new Error(), "message", { get: () => assert.fail("unreadable") });
    })
    .action("result", () => 10n)
    .action("event", (_, ctx) => ctx.event(10n as unknown as string))
    .action("nothing", () => {
      throw Object.create(null);
    })
    .action("later", (_, ctx) => {
      void ctx.step("a", () => Promise.reject(new Error("nothing awaits it")));
      return sleep(50, "later");
    })
    .action("left", (_, ctx) => {
      void ctx.sleep(5);
      void ctx.event("a");
      return sleep(50, "left");
    })
    .action("event later", async (_, ctx) => {
      const approved = ctx.event("a");
      await ctx.step("b", () => sleep(50, "b"));
      return approved;
    })
    .action("last", () => sleep(300, "last")));
  assert.deepEqual([2, 3, 10, 11, 13].map((id) => answers[id]!.result), ["proto", "value", "later", "left", "last"]);
  assert.deepEqual([answers[12]!.method, answers[12]!.params.token, answers[12]!.steps], ["wait", "a", [{
    name: "b", position: 1, repetition: 0, parallel: true, result: "b",
  }]]);
  assert.equal(answers[1]!.error!.code, -32601);
  assert.match(answers[4]!.error!.message, /BigInt/);
  assert.deepEqual([answers[5]!.error!.message, answers[5]!.error!.data["type"]], ["[object Object]", "7"]);
  for (const id of [6, 9]) assert.equal(answers[id]!.error!.message, "the handler threw what cannot be read");
  assert.deepEqual([answers[7]!.error!.data["type"], answers[7]!.error!.data["final"]], ["BadResult", true]);
  assert.match(answers[8]!.error!.message, /BigInt/);
  const timed = reports.filter((one) => one.method === "run_times").flatMap((one) => Object.keys(one.params.actions));
  assert.deepEqual(["__proto__", "valueOf", "toString"].map((name) => timed.includes(name)), [true, true, false]);
});

test("what is too large is answered with an error, and harms no other task", { skip }, async () => {
  const kilobytes = (number: number): string => "x".repeat(number * 1000);
  const tasks = { 1: "steps", 2: "step", 3: "spawn", 4: "result", 5: "many", 6: "note", 7: "small" };
  const { reports, answers } = await reportsOf(tasks, (worker) => worker
    .action("steps", async (_, ctx) => {
      for (let at = 0; at < 6; at++) await ctx.step(`s${at}`, () => kilobytes(100));
    })
    .action("step", (_, ctx) => ctx.step("a", () => kilobytes(300)))
    .action("spawn", (_, ctx) => {
      for (let at = 0; at < 3; at++) ctx.spawn("x", { text: kilobytes(100) });
    })
    .action("result", () => kilobytes(300))
    .action("many", async (_, ctx) => {
      for (let at = 0; at < 11; at++) await ctx.step("a", () => at);
    })
    .action("note", (_, ctx) => ctx.progress(1, kilobytes(2000)))
    .action("small", () => 1), { stepsLimit: 10 });
  const types = { 1: "JournalTooLarge", 2: "BadResult", 3: "TooManyChildren", 4: "BadResult", 5: "TooManySteps" };
  for (const [id, type] of Object.entries(types)) {
    const { code, data } = answers[id]!.error!;
    assert.deepEqual([code, data["type"], data["final"]], [-32013, type, true]);
  }
  assert.deepEqual(answers[1]!.steps!.map((one) => one.name), ["s0", "s1"]);
  assert.equal(answers[5]!.steps!.length, 10);
  assert.deepEqual([answers[6]!.result, answers[7]!.result], [null, 1]);
  assert.equal(reports.find((one) => one.method === "progress")!.params.note.length, 1000);
});

test("an answer that is too large for a message is replaced by an error", { skip }, async () => {
  const limits = { resultLimitBytes: 900_000, stepsLimitBytes: 900_000 };
  const { reports, answers } = await reportsOf({ 1: "both", 2: "small" }, (worker) => worker
    .action("both", async (_, ctx) => ctx.step("a", () => "x".repeat(600_000)))
    .action("small", () => 1), limits);
  assert.deepEqual([answers[1]!.error!.code, answers[1]!.error!.data["final"]], [-32013, true]);
  assert.equal(answers[2]!.result, 1);
  assert.ok(reports.some((one) => one.method === "step"));
});

test("a results queue that takes less is sent smaller messages, and errors instead of what is too large", { skip }, async () => {
  const small = Object.fromEntries(Array.from({ length: 30 }, (_, at) => [at + 10, "small"]));
  const { answers } = await reportsOf({ 1: "large", 2: "step", 3: "error", ...small }, (worker) => worker
    .action("large", () => "x".repeat(5000))
    .action("step", (_, ctx) => ctx.step("a", () => "x".repeat(5000)))
    .action("error", async (_, ctx) => {
      for (const name of ["a", "b"]) await ctx.step(name, () => name.repeat(3000));
      throw new Error("try again");
    })
    .action("small", () => "x".repeat(300)), {}, 4096);
  for (const id of [1, 2]) {
    assert.deepEqual([answers[id]!.error!.code, answers[id]!.error!.data["final"]], [-32013, true]);
    assert.match(answers[id]!.error!.message, /shorter than 4096/);
  }
  const { error, steps } = answers[3]!;
  assert.deepEqual([error!.message, error!.data["final"], steps], ["try again", undefined, undefined]);
  for (const id of Object.keys(small)) assert.equal(answers[id]!.result, "x".repeat(300));
});

test("a results queue that takes less is sent messages no smaller than needed, also after an entry that it refuses", { skip }, async () => {
  const { sqs, resultsQueue } = await queuesOf(4096);
  const sender = new ResultSender(sqs, "a worker", () => undefined);
  sender.url = resultsQueue;
  const sendAll = (sizes: number[]): Promise<PromiseSettledResult<void>[]> =>
    Promise.allSettled(sizes.map((size) => sender.send(JSON.stringify("x".repeat(size)))));
  const received = async (): Promise<number> =>
    (await sqs.send(new ReceiveMessageCommand({ QueueUrl: resultsQueue, MaxNumberOfMessages: 10 }))).Messages?.length ?? 0;
  const found = await sendAll([...Array<number>(15).fill(100), 5000]);
  assert.deepEqual(found.map((one) => one.status), [...Array<string>(15).fill("fulfilled"), "rejected"]);
  while ((await received()) > 0);
  await sendAll(Array<number>(10).fill(300));
  assert.equal(await received(), 1);
  await sendAll(Array<number>(60).fill(300));
  while ((await received()) > 0);
  await sendAll(Array<number>(6).fill(300));
  assert.equal(await received(), 1);
});

test("no step begins once the time limit is answered", { skip }, async () => {
  const begun: string[] = [];
  const { answers } = await reportsOf({ 1: "slow", 2: "later" }, (worker) => worker
    .action("later", () => sleep(600))
    .action("slow", { timeout: 0.1 }, async (_, ctx) => {
      for (const name of ["one", "two"]) {
        const step = ctx.step(name, () => {
          begun.push(name);
          return sleep(300);
        });
        await step.catch(() => undefined);
      }
      begun.push("its end");
    }));
  assert.equal(answers[1]!.error!.code, -32001);
  assert.deepEqual(begun, ["one", "its end"]);
});
