/** Answers to the results queue, and leases of messages of the outbound queue; every call shared and tried again. */

import { setTimeout as sleep } from "node:timers/promises";

import {
  ChangeMessageVisibilityBatchCommand,
  DeleteMessageBatchCommand,
  SendMessageBatchCommand,
  type Message,
  type SQSClient,
} from "@aws-sdk/client-sqs";

import { Refusal, TOO_LARGE } from "./errors.js";
import { byteLength, toText } from "./json.js";

export type Log = (level: "info" | "warning" | "error", event: string, fields?: Record<string, unknown>) => void;

export const MESSAGE_BYTES = 1_000_000; // of a message, and of all messages of a call; SQS takes 1 MiB
const PACK_BYTES = 200_000; // SQS bills each started 64 KiB, so larger messages save nothing
const CALL_MESSAGES = 10;
const LINGER_MS = 5; // for which an answer waits for others to share its call
const RUN_TIMES_MS = 250;
const RUN_TIMES_ACTIONS = 1000; // in one notification
const SMALLEST_MESSAGE_BYTES = 1024; // that a queue can be set to
const REFUSALS = /BatchRequestTooLong|InvalidMessageContents/; // a message's size or characters
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 10_000;

function* inBatches<T>(items: T[], size: number): Generator<T[]> {
  for (let at = 0; at < items.length; at += size) yield items.slice(at, at + size);
}

interface Pending {
  text: string;
  sent: () => void;
  refused: (why: Refusal) => void;
}

interface Failure {
  Code?: string | undefined;
  Message?: string | undefined;
}

/** Sends entries to the results queue, several to a message, until the queue has accepted them. */
export class ResultSender {
  url = "";
  private pending: Pending[] = [];
  private running: Promise<void> | undefined;
  private readonly runTimes = new Map<string, [number, number]>();
  private runTimesAt = 0;
  private failures = 0;
  private packBytes = PACK_BYTES;

  constructor(
    private readonly sqs: SQSClient,
    private readonly worker: string,
    private readonly log: Log,
  ) {}

  /** Resolves once the queue has the entry; rejects with a Refusal if it is too large for any message of the queue. */
  send(text: string): Promise<void> {
    return new Promise((sent, refused) => {
      const bytes = byteLength(text);
      if (bytes > MESSAGE_BYTES) return refused(refusal(bytes, `the limit is ${MESSAGE_BYTES}`));
      this.pending.push({ text, sent, refused });
      this.running ??= this.flush();
    });
  }

  /** Count an attempt that has ended; reported beside answers, at most every quarter of a second. */
  ran(action: string, seconds: number): void {
    const [count, total] = this.runTimes.get(action) ?? [0, 0];
    this.runTimes.set(action, [count + 1, total + seconds]);
  }

  private async flush(): Promise<void> {
    await sleep(LINGER_MS);
    while (this.pending.length > 0) {
      const taken = this.pending.splice(0);
      if (Date.now() - this.runTimesAt > RUN_TIMES_MS && this.runTimes.size > 0) {
        const times = [...this.runTimes].slice(0, RUN_TIMES_ACTIONS);
        const text = toText({ jsonrpc: "2.0", method: "run_times", params: { actions: Object.fromEntries(times) } });
        taken.push({ text, sent: () => undefined, refused: () => undefined });
        for (const [action] of times) this.runTimes.delete(action);
        this.runTimesAt = Date.now();
      }
      const left = await this.calls([...calls(pack(taken, this.packBytes))]);
      this.pending.unshift(...left);
      this.failures = left.length > 0 ? this.failures + 1 : 0;
      if (left.length > 0) await sleep(Math.min(FIRST_PAUSE_MS * 2 ** (this.failures - 1), LONGEST_PAUSE_MS));
    }
    this.running = undefined;
  }

  /** Send messages; returns the entries of those that were not accepted now, but may be later. */
  private async call(messages: Pending[][]): Promise<Pending[]> {
    const worker = { DataType: "String", StringValue: this.worker };
    const entries = messages.map((entries, at) => ({
      Id: String(at),
      MessageBody: entries.length === 1 ? entries[0]!.text : `[${entries.map((one) => one.text).join(",")}]`,
      MessageAttributes: { worker },
    }));
    const failed = new Map<number, Failure>();
    try {
      const answer = await this.sqs.send(new SendMessageBatchCommand({ QueueUrl: this.url, Entries: entries }));
      // An entry in neither list may not be there: a proxy may answer 200 instead of SQS.
      const sent = new Set((answer.Successful ?? []).map((one) => Number(one.Id)));
      messages.forEach((_, at) => sent.has(at) || failed.set(at, { Message: "the answer does not name it" }));
      for (const one of answer.Failed ?? []) failed.set(Number(one.Id), one);
    } catch (error) {
      const whole = { Code: error instanceof Error ? error.name : "", Message: String(error) };
      if (messages.length > 1 && isFinal(whole)) return this.calls(messages.map((one) => [one]));
      messages.forEach((_, at) => failed.set(at, whole));
    }
    if (failed.size > 0) this.log("warning", "results_not_sent", { reason: [...failed.values()][0]!.Message });
    const left: Pending[] = [];
    for (const [at, entries] of messages.entries()) {
      const failure = failed.get(at);
      const bytes = entries.reduce((sum, one) => sum + byteLength(one.text) + 1, 0);
      if (!failure) entries.forEach((one) => one.sent());
      else if (!isFinal(failure)) left.push(...entries);
      else if (entries.length > 1) {
        // The queue takes less than SQS could: send smaller messages from now on, unless it refuses one entry alone.
        const largest = Math.max(SMALLEST_MESSAGE_BYTES, ...entries.map((one) => byteLength(one.text)));
        this.packBytes = Math.min(this.packBytes, Math.max(largest, Math.floor(bytes / 2)));
        const middle = Math.floor(entries.length / 2);
        left.push(...(await this.calls([[entries.slice(0, middle)], [entries.slice(middle)]])));
      } else if (bytes > SMALLEST_MESSAGE_BYTES) entries[0]!.refused(refusal(bytes, failure.Message));
      else left.push(...entries);
    }
    return left;
  }

  private async calls(calls: Pending[][][]): Promise<Pending[]> {
    const left: Pending[] = [];
    for (const call of calls) left.push(...(await this.call(call)));
    return left;
  }
}

function refusal(bytes: number, reason: string | undefined): Refusal {
  const problem = `the report is ${bytes} bytes, and the results queue does not take it: ${reason}`;
  return new Refusal("BadResult", problem, TOO_LARGE, { final: true });
}

/** Whether SQS will never take the message; an invalid parameter may be its size, or something else. */
function isFinal({ Code = "", Message = "" }: Failure): boolean {
  return REFUSALS.test(Code) || (Code.includes("InvalidParameterValue") && Message.includes("shorter than"));
}

/** Entries by message. */
function pack(entries: Pending[], most: number): Pending[][] {
  const messages: Pending[][] = [];
  let bytes = Infinity;
  for (const entry of entries) {
    const size = byteLength(entry.text) + 1;
    if (bytes + size > most) {
      messages.push([]);
      bytes = 2;
    }
    messages.at(-1)!.push(entry);
    bytes += size;
  }
  return messages;
}

/** Messages by call. */
function* calls(messages: Pending[][]): Generator<Pending[][]> {
  let call: Pending[][] = [];
  let bytes = 0;
  for (const message of messages) {
    const size = message.reduce((sum, one) => sum + byteLength(one.text) + 1, 200);
    if (call.length === CALL_MESSAGES || (call.length > 0 && bytes + size > MESSAGE_BYTES)) {
      yield call;
      [call, bytes] = [[], 0];
    }
    call.push(message);
    bytes += size;
  }
  if (call.length > 0) yield call;
}

/** A received message, and how many of its tasks are not answered. `until`: end of its visibility timeout, by performance.now(). */
export class Lease {
  readonly receipt: string;
  readonly receiveCount: number;
  begun = false;
  private lost = false;

  constructor(
    readonly message: Message,
    public open: number,
    private until: number,
  ) {
    this.receipt = message.ReceiptHandle!;
    this.receiveCount = Number(message.Attributes?.ApproximateReceiveCount ?? 1);
  }

  /** Whether it has ended once, whatever has extended it later: another worker may have had the message in between. */
  get isLost(): boolean {
    this.lost ||= performance.now() >= this.until;
    return this.lost;
  }

  /** The queue has extended it to that time of `performance.now()`. */
  extended(until: number): void {
    if (!this.isLost) this.until = until;
  }
}

/** Extends the visibility timeout of messages in work, and deletes them when all of their tasks are answered. */
export class Leases {
  url = "";
  readonly all = new Set<Lease>();
  private readonly timer: NodeJS.Timeout;
  private done: Lease[] = [];
  private deleting: Promise<void> | undefined;

  constructor(
    private readonly sqs: SQSClient,
    private readonly seconds: number,
    private readonly log: Log,
  ) {
    this.timer = setInterval(() => void this.extend([...this.all], this.seconds), (seconds * 1000) / 3);
  }

  add(message: Message, tasks: number, receivedAt: number): Lease {
    const lease = new Lease(message, tasks, receivedAt + this.seconds * 1000);
    this.all.add(lease);
    return lease;
  }

  /** One more task of a message is answered. */
  answered(lease: Lease): void {
    lease.open -= 1;
    if (lease.open > 0 || !this.all.has(lease)) return;
    this.done.push(lease);
    this.deleting ??= this.deleteDone();
  }

  /** Let others receive these messages now. */
  async release(leases: Lease[]): Promise<void> {
    for (const lease of leases) this.all.delete(lease);
    await this.extend(leases, 0);
  }

  /** Stop extending, once deletions under way have ended. */
  async close(): Promise<void> {
    clearInterval(this.timer);
    await this.deleting;
  }

  private async extend(leases: Lease[], seconds: number): Promise<void> {
    const calls = [...inBatches(leases, CALL_MESSAGES)].map(async (batch) => {
      const until = performance.now() + seconds * 1000;
      const entries = batch.map((lease, at) => ({ Id: String(at), ReceiptHandle: lease.receipt, VisibilityTimeout: seconds }));
      try {
        const answer = await this.sqs.send(new ChangeMessageVisibilityBatchCommand({ QueueUrl: this.url, Entries: entries }));
        for (const one of answer.Successful ?? []) batch[Number(one.Id)]!.extended(until);
        if (answer.Failed?.length) this.log("warning", "leases_not_extended", { reason: answer.Failed[0]!.Message });
      } catch (error) {
        this.log("warning", "leases_not_extended", { reason: String(error) });
      }
    });
    await Promise.all(calls);
  }

  private async deleteDone(): Promise<void> {
    await sleep(LINGER_MS);
    let tries = 0;
    while (this.done.length > 0) {
      const taken = this.done.splice(0);
      for (const batch of inBatches(taken, CALL_MESSAGES)) {
        const entries = batch.map((lease, at) => ({ Id: String(at), ReceiptHandle: lease.receipt }));
        try {
          const answer = await this.sqs.send(new DeleteMessageBatchCommand({ QueueUrl: this.url, Entries: entries }));
          const failed = new Set((answer.Failed ?? []).filter((one) => !one.SenderFault).map((one) => Number(one.Id)));
          batch.forEach((lease, at) => (failed.has(at) ? this.done.push(lease) : this.all.delete(lease)));
        } catch (error) {
          this.log("warning", "messages_not_deleted", { reason: String(error) });
          this.done.push(...batch);
        }
      }
      tries = this.done.length > 0 ? tries + 1 : 0;
      if (tries > 0) await sleep(Math.min(FIRST_PAUSE_MS * 2 ** (tries - 1), LONGEST_PAUSE_MS));
    }
    this.deleting = undefined;
  }
}
