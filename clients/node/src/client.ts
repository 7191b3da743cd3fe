/** A client of the api: JSON-RPC over HTTP by fetch. */

import { setTimeout as sleep } from "node:timers/promises";

import { byteLength, isObject } from "./json.js";
import { currentContext } from "./worker.js";

/** Payload and result of each action, for `new Client<MyActions>()`; without it any action takes any payload. */
export type Actions = Record<string, { payload: unknown; result: unknown }>;

export type TaskState = "WAITING" | "SCHEDULED" | "ACQUIRED" | "ERROR" | "SUCCESS" | "CRITICAL_ERROR" | "CANCELLED";

/** Options of `enqueue`; times in seconds, instants as Date, RFC 3339 text or epoch milliseconds. */
export interface EnqueueOptions {
  runAt?: Date | string | number;
  delay?: number;
  priority?: number;
  uniqueKey?: string;
  unique?: "retained" | "live" | number;
  onDuplicate?: "return" | "replace" | "error";
  orderingKey?: string;
  limitKey?: string;
  maxAttempts?: number;
  timeout?: number;
  labels?: Record<string, string>;
  expiresAt?: Date | string | number;
  expiresIn?: number;
  tenant?: string;
}

export interface Enqueued {
  id: number;
  state: TaskState;
  duplicate: boolean;
  replaced?: boolean;
}

export interface Status<R = unknown> {
  id: number;
  action: string;
  state: TaskState;
  attempts: number;
  max_attempts: number;
  priority: number;
  run_at: string;
  created_at: string;
  updated_at: string;
  progress: { percent: number | null; note: string | null } | null;
  result: R | null;
  error: { code: number; message: string; data?: unknown } | null;
  reason?: string;
}

export interface ClientOptions {
  /** Default: PENSTOCK_API_KEY. */
  apiKey?: string | undefined;
  /** Seconds for one call, beyond those that a long poll waits; 30 by default. */
  timeout?: number | undefined;
}

/** The api answered with an error. */
export class RpcError extends Error {
  override name = "RpcError";

  constructor(
    readonly code: number,
    message: string,
    readonly data: unknown,
  ) {
    super(message);
  }
}

export class InvalidParams extends RpcError {
  override name = "InvalidParams";
}
export class TaskNotFound extends RpcError {
  override name = "TaskNotFound";
}
export class StateConflict extends RpcError {
  override name = "StateConflict";
}
export class DuplicateTask extends RpcError {
  override name = "DuplicateTask";
}

/** The api cannot be reached, or cannot answer now. A call that changes something may have been carried out. */
export class Unavailable extends Error {
  override name = "Unavailable";
}

/** Some tasks of `enqueueMany` were not accepted, or it is unknown: a connection broke before the answer. */
export class Unfinished<T = unknown> extends Unavailable {
  override name = "Unfinished";

  /** `results`: answers so far, in the order of the tasks. `unsent`: the tasks to send again; give them a `uniqueKey`
   * if none may be added twice. */
  constructor(
    message: string,
    readonly results: (Enqueued | RpcError)[],
    readonly unsent: T[],
    cause: unknown,
  ) {
    super(message, { cause });
  }
}

/** The awaited task has failed permanently. */
export class TaskFailed extends Error {
  override name = "TaskFailed";

  constructor(
    readonly taskId: number,
    readonly error: Status["error"],
  ) {
    super(`task ${taskId} failed: ${error?.message ?? "without a message"}`);
  }
}

/** The awaited task was cancelled. */
export class TaskCancelled extends Error {
  override name = "TaskCancelled";

  constructor(
    readonly taskId: number,
    readonly reason: string | null,
  ) {
    super(`task ${taskId} was cancelled${reason === null ? "" : `: ${reason}`}`);
  }
}

/** The awaited task has succeeded, and retention has deleted its result. */
export class ResultGone extends Error {
  override name = "ResultGone";

  constructor(readonly taskId: number) {
    super(`task ${taskId} succeeded, and its result is no longer kept`);
  }
}

/** The task has not settled within the timeout; it goes on. */
export class WaitTimeout extends Error {
  override name = "WaitTimeout";
}

const KINDS = new Map([
  [-32602, InvalidParams],
  [-32004, TaskNotFound],
  [-32009, StateConflict],
  [-32012, DuplicateTask],
]);
const POLL_SECONDS = 20;
const BATCH_TASKS = 1000;
const BATCH_BYTES = 4 * 1024 * 1024; // a quarter of what the api takes by default
const TOO_MUCH = [-32013, -32600]; // at once: the request is too large, or its batch too long
const TOO_OFTEN = -32029;
const AWAY = [-32603, -32026]; // of one entry: it was not done, or that is unknown
const BUSY = [TOO_OFTEN, -32025]; // too many requests, too many that wait for results
const RETRIES = 5; // of polls that fail

interface Outcome {
  id: number;
  state: TaskState;
  result: unknown;
  error: Status["error"];
  again?: string;
  reason?: string;
  result_gone?: boolean;
  result_unread?: string | null;
}

interface Answer {
  id: number | null;
  result?: unknown;
  error?: { code: number; message: string; data?: unknown };
}

export class Client<A extends Actions = Actions> {
  private readonly base: string;
  private readonly headers: Record<string, string>;
  private readonly timeout: number;

  /** `url`: of the api; default PENSTOCK_API_URL, else http://127.0.0.1:8080. */
  constructor(url?: string, options: ClientOptions = {}) {
    this.base = (url || process.env["PENSTOCK_API_URL"] || "http://127.0.0.1:8080").replace(/\/(rpc)?$/, "");
    // fetch refuses it, and errors would show it.
    if (this.base.includes("@")) throw new RangeError("the URL of the api holds a user or a password, which fetch does not take");
    const key = options.apiKey ?? process.env["PENSTOCK_API_KEY"];
    this.headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    this.timeout = options.timeout ?? 30;
  }

  /** Any method of docs/methods.md. */
  async call<R = unknown>(method: string, params: object = {}, waitSeconds = 0): Promise<R> {
    const answer = await this.post(JSON.stringify({ jsonrpc: "2.0", method, params, id: 0 }), waitSeconds);
    if (!isObject(answer) || answer["error"] || !("result" in answer)) throw this.problemOf(answer);
    return answer["result"] as R;
  }

  /** Add a task; it is committed when this returns. */
  async enqueue<N extends keyof A & string>(action: N, payload: A[N]["payload"], options: EnqueueOptions = {}): Promise<Enqueued> {
    return this.call("enqueue", { action, payload, ...params(options) });
  }

  /** Add many tasks with few requests; gives each one's answer or its error, in their order. Throws Unfinished. */
  async enqueueMany<N extends keyof A & string>(
    tasks: { action: N; payload: A[N]["payload"]; options?: EnqueueOptions }[],
  ): Promise<(Enqueued | RpcError)[]> {
    const texts = tasks.map(({ action, payload, options }, id) =>
      JSON.stringify({ jsonrpc: "2.0", method: "enqueue", params: { action, payload, ...params(options ?? {}) }, id }),
    );
    const results: (Enqueued | RpcError)[] = [];
    const todo = batches(texts).reverse();
    while (todo.length > 0) {
      const [start, end] = todo.pop()!;
      try {
        const answers = await this.batch(texts.slice(start, end), start);
        results.push(...answers);
        // To a batch, an api without its database says so in the answer of each entry.
        const isLost = (one: Enqueued | RpcError): one is RpcError => one instanceof RpcError && AWAY.includes(one.code);
        const lost = answers.find(isLost);
        if (lost) {
          const unsent = [...tasks.slice(start, end).filter((_, at) => isLost(answers[at]!)), ...tasks.slice(end)];
          const problem = `${unsent.length} of ${tasks.length} tasks were not accepted: ${lost.message}`;
          throw new Unfinished(problem, results, unsent, lost);
        }
      } catch (error) {
        if (error instanceof Unfinished) throw error;
        if (error instanceof Unavailable || (error instanceof RpcError && error.code === TOO_OFTEN)) {
          const problem = `${tasks.length - start} of ${tasks.length} tasks were not accepted: ${error.message}`;
          throw new Unfinished(problem, results, tasks.slice(start), error);
        }
        if (!(error instanceof RpcError && TOO_MUCH.includes(error.code))) throw error;
        // The api's limits are its operator's; it takes less at once than was tried here.
        const middle = Math.floor((start + end) / 2);
        if (middle > start) todo.push([middle, end], [start, middle]);
        else results.push(error);
      }
    }
    return results;
  }

  /** One task as it is now. Throws TaskNotFound. */
  status(id: number): Promise<Status>;
  /** Up to 1000 tasks; null for an unknown one. */
  status(ids: number[]): Promise<(Status | null)[]>;
  status(id: number | number[]): Promise<unknown> {
    return this.call("status", Array.isArray(id) ? { ids: id } : { id });
  }

  /** Wait until a task has settled, and return its result.
   * Throws TaskFailed, TaskCancelled, ResultGone, WaitTimeout, TaskNotFound. */
  async wait<N extends keyof A & string>(id: number, options: { timeout?: number; action?: N } = {}): Promise<A[N]["result"]> {
    const deadline = performance.now() + (options.timeout ?? Infinity) * 1000;
    let failures = 0;
    while (true) {
      const seconds = Math.round(Math.max(0, Math.min(POLL_SECONDS * 1000, deadline - performance.now()))) / 1000;
      let outcome: Outcome | undefined;
      try {
        outcome = await this.call<Outcome>("result", { id, timeout: seconds }, seconds);
        failures = 0;
      } catch (error) {
        if (error instanceof RpcError && BUSY.includes(error.code)) {
          const pause = retryAfter(error) * 1000;
          if (performance.now() + pause > deadline) throw error;
          await sleep(pause);
          continue;
        }
        failures += 1;
        if (!(error instanceof Unavailable) || failures > RETRIES) throw error;
        await sleep(Math.min(200 * 2 ** failures, 2000));
      }
      if (outcome !== undefined && outcome.again === undefined) return outcome.result_unread ? this.download(id) : settled(outcome);
      if (performance.now() >= deadline) throw new WaitTimeout(`task ${id} has not settled after ${options.timeout} s; it goes on`);
    }
  }

  /** Cancel a task. Throws StateConflict for a settled one. */
  cancel(id: number, reason?: string): Promise<{ id: number; state: TaskState }> {
    return this.call("cancel", { id, ...(reason === undefined ? {} : { reason }) });
  }

  /** Start a task again that has failed permanently or was cancelled. */
  retry(id: number): Promise<{ id: number; state: TaskState }> {
    return this.call("retry", { id });
  }

  /** A result that is too large for the answer of a call. */
  private async download(id: number): Promise<unknown> {
    const { status, answer } = await this.request("GET", `/tasks/${id}/result`);
    if (status !== 200) throw this.problemOf(answer);
    return answer;
  }

  private async batch(texts: string[], first: number): Promise<(Enqueued | RpcError)[]> {
    const answers = await this.post(`[${texts.join(",")}]`);
    if (!Array.isArray(answers)) throw this.problemOf(answers);
    const byId = new Map((answers as Answer[]).map((answer) => [answer.id, answer]));
    const nameless = (answers as Answer[]).filter((answer) => answer.id === null); // of entries that are nested too deeply
    return texts.map((_, at) => {
      const answer = byId.get(first + at) ?? nameless.shift();
      if (!answer) throw this.problemOf(answer);
      return answer.error ? errorOf(answer.error) : (answer.result as Enqueued);
    });
  }

  /** The error of an answer; that of a proxy may have none. */
  private problemOf(answer: unknown): RpcError | Unavailable {
    const error = isObject(answer) && isObject(answer["error"]) ? answer["error"] : {};
    if (typeof error["code"] === "number") return errorOf(error as unknown as NonNullable<Answer["error"]>);
    return new Unavailable(`${this.base} answers, and not as a Penstock api: check the URL`);
  }

  private async post(body: string, waitSeconds = 0): Promise<unknown> {
    return (await this.request("POST", "/rpc", body, waitSeconds)).answer;
  }

  private async request(
    method: string, path: string, body?: string, waitSeconds = 0,
  ): Promise<{ status: number; answer: unknown }> {
    const ctx = currentContext(); // a task that a handler enqueues continues its trace
    const trace = ctx?.traceparent ? { traceparent: ctx.traceparent, ...(ctx.tracestate ? { tracestate: ctx.tracestate } : {}) } : {};
    let response: Response;
    let text: string;
    try {
      response = await fetch(this.base + path, {
        method,
        headers: { ...this.headers, ...trace },
        ...(body === undefined ? {} : { body }),
        signal: AbortSignal.timeout(Math.ceil((this.timeout + waitSeconds) * 1000)), // it refuses a fraction
      });
      text = await response.text();
    } catch (error) {
      throw new Unavailable(`the api at ${this.base} cannot be reached or did not answer in time`, { cause: error });
    }
    if (response.status === 503) throw new Unavailable(`the api at ${this.base} cannot answer now: ${text.slice(0, 200)}`);
    try {
      return { status: response.status, answer: JSON.parse(text) as unknown };
    } catch {
      throw new Unavailable(`${this.base}${path} answers HTTP ${response.status}, and not as a Penstock api: check the URL`);
    }
  }
}

function settled(outcome: Outcome): unknown {
  if (outcome.state === "SUCCESS" && outcome.result_gone) throw new ResultGone(outcome.id);
  if (outcome.state === "SUCCESS") return outcome.result;
  if (outcome.state === "CANCELLED") throw new TaskCancelled(outcome.id, outcome.reason ?? null);
  throw new TaskFailed(outcome.id, outcome.error);
}

function errorOf(error: { code: number; message: string; data?: unknown }): RpcError {
  const kind = KINDS.get(error.code) ?? RpcError;
  return new kind(error.code, error.message, error.data);
}

/** Seconds until the api takes the request again. */
function retryAfter(error: RpcError): number {
  const seconds = isObject(error.data) ? Number(error.data["retry_after"]) : NaN;
  return Number.isFinite(seconds) ? seconds : 1;
}

/** Start and end of the requests that go in one body each. */
function batches(texts: string[]): [number, number][] {
  const found: [number, number][] = [];
  let bytes = Infinity;
  for (const [at, text] of texts.entries()) {
    const size = byteLength(text) + 1;
    if (bytes + size > BATCH_BYTES || at - found.at(-1)![0] >= BATCH_TASKS) {
      found.push([at, at]);
      bytes = 1;
    }
    found.at(-1)![1] = at + 1;
    bytes += size;
  }
  return found;
}

/** Options under the names of the wire. Throws a RangeError for what JSON would make null of, which means that it is not given. */
function params(options: EnqueueOptions): Record<string, unknown> {
  const named = Object.entries(options).filter(([, value]) => value !== undefined);
  for (const [name, value] of named) {
    const isNumeric = value instanceof Date || typeof value === "number";
    if (isNumeric && !Number.isFinite(Number(value))) throw new RangeError(`${name} is ${String(value)}`);
  }
  return Object.fromEntries(named.map(([name, value]) => [name.replace(/[A-Z]/g, (char) => `_${char.toLowerCase()}`), value]));
}
