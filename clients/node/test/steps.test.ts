import assert from "node:assert/strict";
import { test } from "node:test";

import { EventTimeout, Fail, Refusal, StepChanged, StepFailed } from "../src/errors.js";
import { Lease } from "../src/queues.js";
import { Steps, Suspend, type Entry } from "../src/steps.js";

function stepsOf(journal: Entry[] = []): { steps: Steps; reports: Entry[] } {
  const reports: Entry[] = [];
  const port = { check: () => undefined, measure: () => undefined, report: async (entry: Entry) => void reports.push(entry) };
  return { steps: new Steps(journal, port), reports };
}

test("a step is reported with its place, and its result is what JSON makes of it", async () => {
  const { steps, reports } = stepsOf();
  const result = await steps.run("fetch", () => ({ at: new Date(0) as unknown, none: undefined }));
  assert.deepEqual(result, { at: "1970-01-01T00:00:00.000Z" });
  await steps.run("fetch", () => 2);
  assert.deepEqual(reports.map(({ name, repetition, position }) => [name, repetition, position]), [["fetch", 0, 0], ["fetch", 1, 1]]);
});

test("what a handler does with a result changes none that is reported again", async () => {
  const { steps } = stepsOf();
  const order = await steps.run("order", () => ({ state: "new" }));
  order.state = "paid";
  assert.deepEqual(steps.reported[0]!.result, { state: "new" });
});

test("a step of the journal does not run, also where it has failed", async () => {
  const error = { code: -32000, message: "no", data: { type: "NoMoney", message: "no money" } };
  const { steps, reports } = stepsOf([{ name: "a", result: 1 }, { name: "b", position: 1, error }]);
  assert.equal(await steps.run("a", () => assert.fail("it ran")), 1);
  await assert.rejects(steps.run("b", () => assert.fail("it ran")), (thrown: StepFailed) => {
    assert.deepEqual([thrown.name, thrown.kind, thrown.message, thrown.step], ["StepFailed", "NoMoney", "no money", "b"]);
    return true;
  });
  steps.checkAllAsked();
  assert.deepEqual(reports, []);
});

test("Fail ends a step finally, another error ends the attempt without a report", async () => {
  const { steps, reports } = stepsOf();
  await assert.rejects(steps.run("a", () => Promise.reject(new Fail("never"))), StepFailed);
  assert.equal(reports.length, 1);
  await assert.rejects(steps.run("b", () => Promise.reject(new TypeError("once"))), TypeError);
  assert.equal(reports.length, 1);
});

test("a name that the pipeline refuses does not run, nor does a sleep without an end", async () => {
  const { steps, reports } = stepsOf();
  for (const name of ["", "x".repeat(201), "a\nb", "a\u200bb", "\ud800", undefined as unknown as string]) {
    await assert.rejects(steps.run(name, () => assert.fail("it ran")), RangeError);
  }
  for (const seconds of [NaN, -1, Infinity, "1" as unknown as number]) assert.throws(() => steps.sleep(seconds), RangeError);
  for (const name of ["😀".repeat(200), "charge the card – é"]) await steps.run(name, () => 1);
  assert.deepEqual(reports.map((entry) => entry.position), [0, 1]);
});

test("a step whose result is no JSON has failed finally", async () => {
  const { steps } = stepsOf();
  await assert.rejects(steps.run("a", () => 10n), (thrown: Refusal) => {
    assert.deepEqual([thrown.kind, thrown.data], ["BadResult", { final: true }]);
    return true;
  });
});

test("a step beside a sleep or an event that is awaited later is found again, whether or not that has begun", async () => {
  const { steps, reports } = stepsOf();
  const left = (later: Steps): void => {
    assert.throws(() => later.event("a"), Suspend);
  };
  left(steps);
  await steps.run("b", () => 1);
  const { steps: next } = stepsOf(reports);
  left(next);
  assert.equal(await next.run("b", () => assert.fail("it ran")), 1);
  next.checkAllAsked();
  assert.throws(() => next.sleep(1), (thrown: Suspend) => {
    const { steps: last } = stepsOf([...reports, thrown.entry!]);
    left(last);
    last.sleep(1);
    return thrown.entry!.parallel === true;
  });
});

test("a changed handler is found before anything runs, and at its end", async () => {
  const { steps } = stepsOf([{ name: "a", result: 1 }, { name: "b", position: 1, result: 2 }]);
  await assert.rejects(steps.run("c", () => assert.fail("it ran")), StepChanged);
  await steps.run("a", () => assert.fail("it ran"));
  assert.throws(() => steps.checkAllAsked(), StepChanged);
});

test("steps side by side are marked, and may come back in any order", async () => {
  const { steps, reports } = stepsOf();
  await Promise.all(["a", "b"].map((name) => steps.run(name, () => name)));
  assert.deepEqual(reports.map((entry) => entry.parallel), [true, true]);
  const again = stepsOf([{ name: "b", parallel: true, result: 2 }]);
  assert.deepEqual(await Promise.all(["a", "b"].map((name) => again.steps.run(name, () => name))), ["a", 2]);
});

test("a worker that had lost its message while a step ran goes no further, and the step is reported", async () => {
  const reports: Entry[] = [];
  let lost = false;
  const check = (): void => {
    if (lost) throw new Suspend({ redelivered: true });
  };
  const steps = new Steps([], { check, measure: () => undefined, report: async (entry) => void reports.push(entry) });
  await assert.rejects(steps.run("a", () => (lost = true)), Suspend);
  assert.deepEqual(steps.reported.map((entry) => entry.name), ["a"]);
  assert.deepEqual(reports, steps.reported);
});

test("a lease that has ended stays lost, whatever extends it later", () => {
  const message = { ReceiptHandle: "r", Attributes: { ApproximateReceiveCount: "1" } };
  const [held, ended] = [1000, -1].map((left) => new Lease(message, 1, performance.now() + left));
  for (const lease of [held!, ended!]) lease.extended(performance.now() + 5000);
  assert.deepEqual([held!.isLost, ended!.isLost], [false, true]);
});

test("a sleep suspends with an entry of its own, an event with its place, and both are over in the next attempt", () => {
  const { steps } = stepsOf();
  assert.throws(() => steps.sleep(60), (thrown: Suspend) => {
    assert.deepEqual(thrown.params, { seconds: 60 });
    assert.deepEqual(thrown.entry, { name: "ctx.sleep", repetition: 0, position: 0, result: null });
    return true;
  });
  const next = stepsOf([{ name: "ctx.sleep", result: null }]).steps;
  next.sleep(60);
  assert.throws(() => next.event("approve", 5), (thrown: Suspend) => {
    assert.equal(thrown.method, "wait");
    assert.deepEqual(thrown.params, { token: "approve", timeout: 5, step: { name: "ctx.event", repetition: 0, position: 1 } });
    return true;
  });
  const late = { code: -32000, message: "late", data: { type: "WaitTimeout", message: "no event came" } };
  const last = stepsOf([{ name: "ctx.event", error: late }]).steps;
  assert.throws(() => last.event("approve"), EventTimeout);
});

test("nothing suspends while a step runs", async () => {
  const { steps } = stepsOf();
  const running = steps.run("slow", () => new Promise((done) => setTimeout(done, 20)));
  assert.throws(() => steps.sleep(1), /await the step first/);
  await running;
});
