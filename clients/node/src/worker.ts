/** A worker: receives tasks from the outbound queue, runs their handlers, answers in the results queue. */

import { AsyncLocalStorage } from "node:async_hooks";
import { randomBytes } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

import { GetQueueUrlCommand, ReceiveMessageCommand, SQSClient, type Message } from "@aws-sdk/client-sqs";

import {
  Fail, INVALID_PARAMS, LeaseLost, METHOD_NOT_FOUND, Refusal, TASK_TIMEOUT, TOO_LARGE, errorObject, resultText,
} from "./errors.js";
import { byteLength, isObject, toText, type Json } from "./json.js";
import { Payloads, payloadOwner, stepOwner, type PayloadOptions } from "./payloads.js";
import { Leases, MESSAGE_BYTES, ResultSender, type Lease, type Log } from "./queues.js";
import { Steps, Suspend, labelOf, type Entry } from "./steps.js";

const CLAIM_ID = /^([0-9]{1,19}):([0-9]{1,19})(?::[A-Za-z0-9]{1,64})?$/;
const TRACEPARENT = /^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})/;
const LAST_MS = 1500; // of the grace period, for releasing messages
const NOTE_CHARS = 1000; // of a progress note

export type Handler = (params: any, ctx: Context) => unknown;

export interface ActionOptions {
  /** Names of positional parameters: a payload that is an array reaches the handler as an object of these names. */
  names?: string[];
  /** Seconds for one attempt, unless the task has a limit of its own. */
  timeout?: number;
  /** Attempts, at most; lowers the task's own number. */
  maxAttempts?: number;
}

export interface WorkerOptions {
  /** Name or URL of the queue to receive from. */
  outboundQueue: string;
  /** Name or URL of the queue to answer in. */
  resultsQueue: string;
  /** Tasks that run at once; 100 by default. */
  concurrency?: number;
  visibilitySeconds?: number;
  heartbeatSeconds?: number;
  /** After SIGTERM, to finish and to hand back. */
  graceSeconds?: number;
  /** Seconds for one attempt, where neither task nor action has a limit. */
  timeoutSeconds?: number;
  /** Bytes of a result as JSON; as PENSTOCK_RESULT_LIMIT_BYTES of the pipeline. */
  resultLimitBytes?: number;
  /** Durable steps of a task; as PENSTOCK_STEPS_LIMIT of the pipeline. */
  stepsLimit?: number;
  /** Bytes of all results of a task's steps as JSON; as PENSTOCK_STEPS_LIMIT_BYTES of the pipeline. */
  stepsLimitBytes?: number;
  name?: string;
  payloads?: PayloadOptions;
  sqs?: SQSClient;
  log?: Log;
}

interface Action {
  handler: Handler;
  options: ActionOptions;
}

/** One attempt of a task, as its handler sees it. */
export class Context {
  /** Aborted when the attempt is over for the worker: its time limit, a lost lease, the end of the worker. */
  readonly signal: AbortSignal;
  readonly spawned: Record<string, unknown>[] = [];

  constructor(
    readonly action: string,
    readonly taskId: string,
    readonly claim: string,
    readonly tenant: string | null,
    /** The message was received before: an earlier attempt may have done part of the work. */
    readonly redelivered: boolean,
    /** The attempt's own span in W3C form; pass it on with requests. Null without a trace. */
    readonly traceparent: string | null,
    readonly tracestate: string | null,
    signal: AbortSignal,
    private readonly steps: Steps,
    private readonly report: (percent?: number, note?: string) => Promise<void>,
  ) {
    this.signal = signal;
  }

  /** Report progress, which is a heartbeat too. */
  progress(percent?: number, note?: string): Promise<void> {
    if (percent != null && !Number.isFinite(percent)) throw new RangeError(`percent is a number, not ${String(percent)}`);
    return this.report(percent, note && [...String(note)].slice(0, NOTE_CHARS).join(""));
  }

  /** Run a durable step: once its report is in the results queue, no later attempt runs it again. */
  step<R>(name: string, run: () => R | Promise<R>): Promise<R> {
    return handled(this.steps.run(name, run));
  }

  /** Suspend the task for so many seconds. It ends the attempt by throwing what must not be caught. */
  sleep(seconds: number): Promise<void> {
    return handled((async () => this.steps.sleep(seconds))());
  }

  /** Suspend the task until `task.complete` or `task.fail` is called with this token; returns the value given. */
  event(token: string, options: { timeout?: number } = {}): Promise<Json> {
    return handled((async () => this.steps.event(token, options.timeout))());
  }

  /** A task that is created with this one's result, and only then. */
  spawn(action: string, payload: unknown = {}, options: Record<string, unknown> = {}): void {
    // As JSON now: what cannot be written fails here, in the handler.
    this.spawned.push(JSON.parse(toText({ action, payload, ...options })) as Record<string, unknown>);
  }
}

/** A promise that a handler may leave: a rejection that nothing handles ends the process. */
function handled<R>(promise: Promise<R>): Promise<R> {
  promise.catch(() => undefined);
  return promise;
}

interface Attempt {
  id: string;
  taskId: string;
  claim: string;
  action: string;
  params: Json;
  journal: Entry[];
  lease: Lease;
  tenant: string | null;
  trace: { traceparent: string; tracestate: string | null } | null;
  limit: number | null;
  abort: AbortController;
  /** When it was last reported, by performance.now(). */
  seenAt: number;
  /** A heartbeat is on its way. */
  beating: boolean;
}

const current = new AsyncLocalStorage<Context>();

/** The context of the handler that runs now, also in functions that it calls. */
export function currentContext(): Context | undefined {
  return current.getStore();
}

export class Worker {
  private readonly actions = new Map<string, Action>();
  private readonly sqs: SQSClient;
  private readonly sender: ResultSender;
  private readonly leases: Leases;
  private readonly payloads: Payloads;
  private readonly log: Log;
  private readonly options: Required<Omit<WorkerOptions, "payloads" | "sqs" | "log" | "name">>;
  private readonly attempts = new Set<Attempt>();
  private readonly waiting: Array<() => void> = [];
  private readonly polls = new AbortController();
  private running = 0;
  private stopping = false;
  private ended = false;
  private idle: () => void = () => undefined;

  constructor(options: WorkerOptions) {
    this.options = {
      concurrency: 100, visibilitySeconds: 60, heartbeatSeconds: 20, graceSeconds: 25, timeoutSeconds: 900,
      resultLimitBytes: 256 * 1024, stepsLimit: 1000, stepsLimitBytes: 256 * 1024, ...options,
    };
    this.log = options.log ?? logToStderr;
    this.sqs = options.sqs ?? new SQSClient({});
    this.payloads = new Payloads(options.payloads ?? {});
    const name = options.name || `${hostname().replace(/[^!-~]/g, "").slice(0, 80) || "localhost"}:${process.pid}`;
    this.sender = new ResultSender(this.sqs, name, this.log);
    this.leases = new Leases(this.sqs, this.options.visibilitySeconds, this.log);
  }

  /** A worker by the PENSTOCK_* variables that Penstock's own workers read. */
  static fromEnvironment(options: Partial<WorkerOptions> = {}, env: NodeJS.ProcessEnv = process.env): Worker {
    const number = (name: string): number | undefined => {
      if (!env[name]) return undefined;
      const value = Number(env[name]);
      if (Number.isFinite(value) && (value > 0 || (value === 0 && name === "PENSTOCK_GRACE_SECONDS"))) return value;
      throw new Error(`${name} is ${JSON.stringify(env[name])}: set it to a number above 0`);
    };
    const endpoint = env["PENSTOCK_SQS_ENDPOINT_URL"];
    const region = env["PENSTOCK_AWS_REGION"];
    const [accessKeyId, secretAccessKey] = env["PENSTOCK_SQS_ACCESS_KEY"]?.split(":", 2) ?? [];
    const found = {
      outboundQueue: env["PENSTOCK_OUTBOUND_QUEUE"],
      resultsQueue: env["PENSTOCK_RESULTS_QUEUE"],
      concurrency: number("PENSTOCK_WORKER_CONCURRENCY"),
      visibilitySeconds: number("PENSTOCK_VISIBILITY_TIMEOUT_SECONDS"),
      heartbeatSeconds: number("PENSTOCK_HEARTBEAT_SECONDS"),
      graceSeconds: number("PENSTOCK_GRACE_SECONDS"),
      timeoutSeconds: number("PENSTOCK_TASK_TIMEOUT_SECONDS"),
      resultLimitBytes: number("PENSTOCK_RESULT_LIMIT_BYTES"),
      stepsLimit: number("PENSTOCK_STEPS_LIMIT"),
      stepsLimitBytes: number("PENSTOCK_STEPS_LIMIT_BYTES"),
      name: env["PENSTOCK_WORKER_NAME"],
      sqs: new SQSClient({
        ...(endpoint ? { endpoint } : {}),
        ...(region ? { region } : {}),
        ...(accessKeyId && secretAccessKey ? { credentials: { accessKeyId, secretAccessKey } } : {}),
      }),
      payloads: {
        keys: env["PENSTOCK_PAYLOAD_KEYS"]?.split(",").map((key) => key.trim()).filter(Boolean),
        bucket: env["PENSTOCK_PAYLOAD_BUCKET"],
        endpoint: env["PENSTOCK_PAYLOAD_S3_ENDPOINT_URL"],
        region,
      },
    };
    const given = { ...defined(found), ...options } as WorkerOptions;
    for (const [option, name] of [["outboundQueue", "OUTBOUND"], ["resultsQueue", "RESULTS"]] as const) {
      if (!given[option]) throw new Error(`PENSTOCK_${name}_QUEUE must be the name or URL of a queue`);
    }
    return new Worker({ ...given, payloads: defined(given.payloads ?? {}) });
  }

  /** Register the handler of an action. */
  action(name: string, handler: Handler): this;
  action(name: string, options: ActionOptions, handler: Handler): this;
  action(name: string, first: ActionOptions | Handler, second?: Handler): this {
    if (this.actions.has(name)) throw new Error(`the action ${name} has a handler already`);
    this.actions.set(name, typeof first === "function" ? { handler: first, options: {} } : { handler: second!, options: first });
    return this;
  }

  /** Work until SIGTERM or SIGINT, or until `stop` is called; resolves when everything is answered or handed back. */
  async run(): Promise<void> {
    const stop = (): void => void this.stop();
    process.on("SIGTERM", stop).on("SIGINT", stop);
    const beat = setInterval(() => this.heartbeat(), this.options.heartbeatSeconds * 250);
    this.log("info", "worker_started", { actions: [...this.actions.keys()].join(",") });
    try {
      this.leases.url = await this.urlOf(this.options.outboundQueue);
      this.sender.url = await this.urlOf(this.options.resultsQueue);
      await this.receiveAll();
      await this.drain();
    } finally {
      clearInterval(beat);
      process.off("SIGTERM", stop).off("SIGINT", stop);
      void this.leases.close(); // ends the timer; what is left was waited for
      this.log("info", "worker_stopped");
    }
  }

  /** Receive no more; `run` ends once what was received is answered or handed back. */
  stop(): void {
    this.stopping = true;
    this.polls.abort();
    this.waiting.splice(0).forEach((go) => go());
  }

  private async urlOf(queue: string): Promise<string> {
    if (queue.includes("://")) return queue;
    return (await this.sqs.send(new GetQueueUrlCommand({ QueueName: queue }))).QueueUrl!;
  }

  // Receiving

  private async receiveAll(): Promise<void> {
    let failures = 0;
    while (!this.stopping) {
      if (this.running >= this.options.concurrency) {
        await this.slot();
        continue;
      }
      const sentAt = performance.now();
      try {
        const answer = await this.sqs.send(
          new ReceiveMessageCommand({
            QueueUrl: this.leases.url,
            MaxNumberOfMessages: Math.min(10, this.options.concurrency - this.running),
            WaitTimeSeconds: 20,
            VisibilityTimeout: this.options.visibilitySeconds,
            MessageSystemAttributeNames: ["ApproximateReceiveCount"],
            MessageAttributeNames: ["All"],
          }),
          { abortSignal: this.polls.signal },
        );
        failures = 0;
        // The visibility timeout began between the request and its answer.
        const receivedAt = answer.Messages?.length ? Math.max(sentAt, performance.now() - 1000) : sentAt;
        for (const message of answer.Messages ?? []) this.take(message, receivedAt);
      } catch (error) {
        if (this.stopping) return;
        failures += 1;
        this.log("warning", "receive_failed", { reason: String(error) });
        await sleep(Math.min(200 * 2 ** failures, 10_000), undefined, { signal: this.polls.signal }).catch(() => undefined);
      }
    }
  }

  private take(message: Message, receivedAt: number): void {
    let attempts: Attempt[];
    try {
      attempts = this.attemptsOf(message, receivedAt);
    } catch (error) {
      // No task could be answered: SQS moves the message to the dead-letter queue after its last delivery.
      this.log("error", "message_unreadable", { id: message.MessageId, reason: String(error) });
      return;
    }
    for (const attempt of attempts) {
      this.attempts.add(attempt);
      void this.attempt(attempt);
    }
  }

  private attemptsOf(message: Message, receivedAt: number): Attempt[] {
    const body: unknown = JSON.parse(message.Body ?? "");
    const attributes = Object.fromEntries(
      Object.entries(message.MessageAttributes ?? {}).map(([name, one]) => [name, one.StringValue ?? ""]),
    );
    const calls = (Array.isArray(body) ? body : [body]).filter((call: unknown) => {
      const isCall = isObject(call) && typeof call["method"] === "string" && CLAIM_ID.test(String(call["id"]));
      if (!isCall) this.log("error", "entry_unreadable", { id: message.MessageId });
      return isCall;
    }) as { id: string; method: string; params?: Json; steps?: Entry[] }[];
    if (calls.length === 0) throw new Error("no entry is a request with a claim id");
    const tenantOf = tenants(attributes);
    const traceOf = traces(attributes);
    const limit = Number(attributes["timeout_seconds"]);
    const lease = this.leases.add(message, calls.length, receivedAt);
    return calls.map((call) => {
      const [, taskId, claim] = CLAIM_ID.exec(call.id) as unknown as [string, string, string];
      return {
        id: call.id, taskId, claim, action: call.method, params: call.params ?? {}, journal: call.steps ?? [], lease,
        tenant: tenantOf(taskId), trace: traceOf(taskId), limit: limit > 0 ? limit : null,
        abort: new AbortController(), seenAt: performance.now(), beating: false,
      };
    });
  }

  // Attempts

  /** Wait until a task has ended or the worker stops. */
  private slot(): Promise<void> {
    return new Promise((go) => this.waiting.push(go));
  }

  private async attempt(attempt: Attempt): Promise<void> {
    while (this.running >= this.options.concurrency && !(this.stopping && !attempt.lease.begun)) await this.slot();
    if (this.ended || (this.stopping && !attempt.lease.begun)) {
      this.attempts.delete(attempt); // its message is released
      return;
    }
    attempt.lease.begun = true;
    this.running += 1;
    try {
      // So that a task that ends the process is known to have run.
      if (attempt.lease.receiveCount > 1) await this.progress(attempt);
      const answer = await this.answerOf(attempt).catch((error: unknown) => this.failure(attempt, error));
      if (answer === null || this.ended) return;
      await this.sender.send(answer).catch((refusal: unknown) => this.sender.send(this.shortened(attempt, answer, refusal)));
      this.leases.answered(attempt.lease);
    } catch (error) {
      this.log("error", "attempt_not_answered", { task_id: attempt.taskId, reason: String(error) });
      this.leases.all.delete(attempt.lease); // SQS delivers its message again
    } finally {
      this.running -= 1;
      this.attempts.delete(attempt);
      this.waiting.shift()?.();
      this.idle();
    }
  }

  /** The report that ends an attempt; null if another worker has the task. */
  private async answerOf(attempt: Attempt): Promise<string | null> {
    const began = performance.now();
    const span = attempt.trace && ownSpan(attempt.trace.traceparent);
    const trace = span ? { traceparent: span, ...(attempt.trace!.tracestate ? { tracestate: attempt.trace!.tracestate } : {}) } : {};
    let steps: Steps | undefined;
    let entries: Entry[] = [];
    let report: Record<string, unknown>;
    try {
      const action = this.actions.get(attempt.action);
      if (!action) throw new Refusal("UnknownAction", `no handler registered for action ${attempt.action}`, METHOD_NOT_FOUND);
      const params = named(await this.payloads.open(attempt.params, payloadOwner(attempt.action, attempt.tenant)), action.options);
      const journal = await Promise.all(attempt.journal.map((entry) => this.opened(entry, attempt.taskId)));
      steps = new Steps(journal, {
        check: () => this.checkStep(attempt, steps!),
        measure: (entry) => this.measureStep(attempt, steps!, entry),
        report: (entry) => this.reportStep(attempt, entry),
      });
      const ctx = new Context(
        attempt.action, attempt.taskId, attempt.claim, attempt.tenant, attempt.lease.receiveCount > 1, span,
        attempt.trace?.tracestate ?? null, attempt.abort.signal, steps,
        (percent, note) => this.progress(attempt, percent, note),
      );
      const seconds = attempt.limit ?? action.options.timeout ?? this.options.timeoutSeconds;
      const result = await within(seconds, attempt.abort, () => current.run(ctx, () => action.handler(params, ctx)));
      steps.checkAllAsked();
      if (ctx.spawned.length) this.checkSize("TooManyChildren", "the spawned tasks are", toText(ctx.spawned));
      const text = resultText(result, "the handler");
      this.checkSize("BadResult", "the result is", text);
      report = { jsonrpc: "2.0", result: JSON.parse(text) as Json, id: attempt.id, ...(ctx.spawned.length ? { spawn: ctx.spawned } : {}) };
    } catch (thrown) {
      if (thrown instanceof LeaseLost) {
        this.leases.all.delete(attempt.lease);
        return null;
      }
      if (thrown instanceof Suspend) {
        report = { jsonrpc: "2.0", method: thrown.method, params: { id: attempt.id, ...thrown.params } };
        if (thrown.entry) entries = [thrown.entry];
      } else {
        report = { jsonrpc: "2.0", error: this.errorOf(attempt, thrown), id: attempt.id };
      }
    }
    entries = [...(steps?.reported ?? []), ...entries];
    if (this.actions.has(attempt.action)) this.sender.ran(attempt.action, (performance.now() - began) / 1000);
    return toText({ ...report, ...trace, ...(entries.length ? { steps: entries } : {}) });
  }

  /** Throws a Refusal for what is larger than a result may be: another attempt would return the same. */
  private checkSize(kind: string, what: string, text: string): void {
    const [size, limit] = [byteLength(text), Math.min(this.options.resultLimitBytes, MESSAGE_BYTES)];
    if (size <= limit) return;
    throw new Refusal(kind, `${what} ${size} bytes; the limit is ${limit} (PENSTOCK_RESULT_LIMIT_BYTES)`, TOO_LARGE, { final: true });
  }

  private failure(attempt: Attempt, thrown: unknown): string {
    return toText({ jsonrpc: "2.0", error: this.errorOf(attempt, thrown), id: attempt.id });
  }

  /** What to send instead of an answer that the results queue does not take. Its steps have been reported one by one. */
  private shortened(attempt: Attempt, answer: string, refusal: unknown): string {
    const { error } = JSON.parse(answer) as { error?: { data?: Record<string, unknown> } };
    if (error === undefined) return this.failure(attempt, refusal);
    return toText({ jsonrpc: "2.0", error: { ...error, data: { ...error.data, traceback: undefined } }, id: attempt.id });
  }

  private errorOf(attempt: Attempt, thrown: unknown): Record<string, unknown> {
    const error = errorObject(thrown);
    const cap = this.actions.get(attempt.action)?.options.maxAttempts;
    if (cap !== undefined) error["data"] = { max_attempts: cap, ...(error["data"] as object) };
    const level = thrown instanceof Fail ? "info" : "warning";
    this.log(level, "task_failed", { task_id: attempt.taskId, action: attempt.action, error: error["message"] });
    return error;
  }

  private checkStep(attempt: Attempt, steps: Steps): void {
    if (this.ended) throw new LeaseLost("the worker stops");
    attempt.abort.signal.throwIfAborted(); // its time limit is answered, and another attempt may have begun
    // Another worker may have had the message: what begins or goes on now could run twice at once.
    if (attempt.lease.isLost) {
      this.log("warning", "lease_lost", { task_id: attempt.taskId });
      throw new Suspend({ redelivered: true });
    }
    if (attempt.lease.receiveCount > 1 && steps.reported.length === 0) throw new Suspend({ redelivered: true });
    const limit = this.options.stepsLimit;
    if (steps.asked > limit) {
      const problem = `the task has more than ${limit} durable steps (PENSTOCK_STEPS_LIMIT)`;
      throw new Refusal("TooManySteps", problem, TOO_LARGE, { final: true });
    }
  }

  private measureStep(attempt: Attempt, steps: Steps, entry: Entry): void {
    this.checkSize("BadResult", `the result of step ${labelOf(entry)} is`, toText(entry.error ?? entry.result));
    const own = [...steps.reported, entry].reduce((sum, one) => sum + this.payloads.sealedBytes(byteLength(toText(one))), 0);
    const [size, limit] = [byteLength(toText(attempt.journal)) + own, this.options.stepsLimitBytes];
    if (size <= limit) return;
    const problem = `the results of the task's steps are ${size} bytes; the limit is ${limit} (PENSTOCK_STEPS_LIMIT_BYTES)`;
    throw new Refusal("JournalTooLarge", problem, TOO_LARGE, { final: true });
  }

  private async reportStep(attempt: Attempt, entry: Entry): Promise<void> {
    await this.sender.send(toText({ jsonrpc: "2.0", method: "step", params: { id: attempt.id, ...entry } }));
  }

  private async opened(entry: Entry, taskId: string): Promise<Entry> {
    const owner = stepOwner(taskId, entry.name, entry.repetition ?? 0);
    if (entry.error !== undefined) return { ...entry, error: await this.payloads.open(entry.error, owner) };
    return { ...entry, result: await this.payloads.open(entry.result ?? null, owner) };
  }

  private async progress(attempt: Attempt, percent?: number, note?: string): Promise<void> {
    attempt.seenAt = performance.now();
    const params = defined({ id: attempt.id, percent, note });
    // A report that the queue does not take is dropped.
    await this.sender.send(toText({ jsonrpc: "2.0", method: "progress", params })).catch(() => undefined);
  }

  private heartbeat(): void {
    const due = performance.now() - this.options.heartbeatSeconds * 1000 * 0.8;
    for (const attempt of this.attempts) {
      if (attempt.seenAt < due && attempt.lease.begun && !attempt.beating) {
        attempt.beating = true;
        void this.progress(attempt).finally(() => (attempt.beating = false));
      }
    }
  }

  // Stopping

  private async drain(): Promise<void> {
    const grace = this.options.graceSeconds * 1000;
    const deadline = performance.now() + grace;
    const bounded = (work: Promise<void>): Promise<void> =>
      Promise.race([work, sleep(Math.max(100, deadline - performance.now()), undefined, { ref: false })]);
    await bounded(this.leases.release([...this.leases.all].filter((lease) => !lease.begun)));
    const empty = new Promise<void>((resolve) => {
      this.idle = () => this.attempts.size === 0 && resolve();
      this.idle();
    });
    const rest = new AbortController();
    await Promise.race([empty, sleep(Math.max(grace - LAST_MS, grace / 2), undefined, { signal: rest.signal }).catch(() => undefined)]);
    rest.abort();
    this.ended = true; // an answer from now on would be one of a task that is given back
    for (const attempt of this.attempts) attempt.abort.abort(new LeaseLost("the worker stops"));
    const unfinished = [...this.leases.all].filter((lease) => lease.open > 0);
    if (unfinished.length > 0) this.log("warning", "messages_given_back", { messages: unfinished.length });
    await bounded(this.leases.release(unfinished));
    await bounded(this.leases.close());
  }
}

/** A payload by position as one by name. */
function named(params: Json, options: ActionOptions): Json {
  if (!Array.isArray(params) || !options.names) return params;
  if (params.length > options.names.length) {
    throw new Refusal("BadParams", `${params.length} parameters, of ${options.names.length}`, INVALID_PARAMS);
  }
  return Object.fromEntries(params.map((value, at) => [options.names![at]!, value]));
}

/** What the handler returns or throws, or an error after so many seconds; the handler's own work goes on then. */
async function within<R>(seconds: number, abort: AbortController, run: () => R): Promise<Awaited<R>> {
  abort.signal.throwIfAborted(); // while its payload was opened
  let timer: NodeJS.Timeout | undefined;
  const ended = new Promise<never>((_, reject) => {
    abort.signal.addEventListener("abort", () => reject(abort.signal.reason as Error), { once: true });
    timer = setTimeout(() => {
      abort.abort(new Refusal("TaskTimeout", `not finished after ${seconds} s`, TASK_TIMEOUT));
    }, Math.min(seconds * 1000, 2 ** 31 - 1));
  });
  ended.catch(() => undefined);
  try {
    return await Promise.race([(async () => await run())(), ended]);
  } finally {
    clearTimeout(timer);
  }
}

function tenants(attributes: Record<string, string>): (taskId: string) => string | null {
  if (attributes["tenant"] !== undefined) {
    const tenant: unknown = JSON.parse(attributes["tenant"]);
    if (typeof tenant !== "string") throw new Error("the attribute tenant is no text");
    return () => tenant;
  }
  if (attributes["tenants"] === undefined) return () => null;
  const ids = Object.entries(JSON.parse(attributes["tenants"]) as Record<string, unknown[]>);
  const byTask = new Map(ids.flatMap(([tenant, tasks]) => tasks.map((id) => [String(id), tenant] as const)));
  return (taskId) => byTask.get(taskId) ?? null;
}

function traces(attributes: Record<string, string>): (taskId: string) => Attempt["trace"] {
  const shared = attributes["traceparent"];
  if (shared !== undefined) {
    const trace = { traceparent: shared, tracestate: attributes["tracestate"] ?? null };
    return () => trace;
  }
  const byTask = new Map<string, NonNullable<Attempt["trace"]>>();
  try {
    for (const one of JSON.parse(attributes["traces"] ?? "[]") as { traceparent: string; tracestate?: string; tasks: unknown[] }[]) {
      for (const id of one.tasks) byTask.set(String(id), { traceparent: one.traceparent, tracestate: one.tracestate ?? null });
    }
  } catch {
    byTask.clear(); // a trace is not worth a task
  }
  return (taskId) => byTask.get(taskId) ?? null;
}

/** A new span of the trace. */
function ownSpan(traceparent: string): string | null {
  const match = TRACEPARENT.exec(traceparent);
  return match && `00-${match[1]}-${randomBytes(8).toString("hex")}-${match[2]}`;
}

function defined<T extends object>(members: T): T {
  return Object.fromEntries(Object.entries(members).filter(([, value]) => value !== undefined)) as T;
}

function logToStderr(level: string, event: string, fields: Record<string, unknown> = {}): void {
  process.stderr.write(`${JSON.stringify({ timestamp: new Date().toISOString(), level, event, ...fields })}\n`);
}
