/** Answers to the results queue, and leases of messages of the outbound queue; every call shared and tried again. */

import { setTimeout as sleep } from "node:timers/promises";

import {
  ChangeMessageVisibilityBatchCommand,
  DeleteMessageBatchCommand,
  SendMessageBatchCommand,
  type Message,
  type SQSClient,
} from "@aws-sdk/client-sqs";

import { byteLength } from "./json.js";

export type Log = (level: "info" | "warning" | "error", event: string, fields?: Record<string, unknown>) => void;

export const MESSAGE_BYTES = 1_000_000; // of a message, and of all messages of a call; SQS takes 1 MiB
const PACK_BYTES = 200_000; // SQS bills each started 64 KiB, so larger messages save nothing
const CALL_MESSAGES = 10;
const LINGER_MS = 5; // for which an answer waits for others to share its call
const RUN_TIMES_MS = 250;
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 10_000;

function* inBatches<T>(items: T[], size: number): Generator<T[]> {
  for (let at = 0; at < items.length; at += size) yield items.slice(at, at + size);
}

interface Pending {
  text: string;
  sent: () => void;
}

/** Sends entries to the results queue, several to a message, until the queue has accepted them. */
export class ResultSender {
  url = "";
  private pending: Pending[] = [];
  private running: Promise<void> | undefined;
  private runTimes: Record<string, [number, number]> = {};
  private runTimesAt = 0;
  private failures = 0;

  constructor(
    private readonly sqs: SQSClient,
    private readonly worker: string,
    private readonly log: Log,
  ) {}

  /** Resolves once the queue has the entry. */
  send(text: string): Promise<void> {
    return new Promise((sent) => {
      this.pending.push({ text, sent });
      this.running ??= this.flush();
    });
  }

  /** Count an attempt that has ended; reported beside answers, at most every quarter of a second. */
  ran(action: string, seconds: number): void {
    const [count, total] = this.runTimes[action] ?? [0, 0];
    this.runTimes[action] = [count + 1, total + seconds];
  }

  private async flush(): Promise<void> {
    await sleep(LINGER_MS);
    while (this.pending.length > 0) {
      const taken = this.pending.splice(0);
      if (Date.now() - this.runTimesAt > RUN_TIMES_MS && Object.keys(this.runTimes).length > 0) {
        const text = JSON.stringify({ jsonrpc: "2.0", method: "run_times", params: { actions: this.runTimes } });
        taken.push({ text, sent: () => undefined });
        this.runTimes = {};
        this.runTimesAt = Date.now();
      }
      const left: Pending[] = [];
      for (const call of calls(pack(taken))) left.push(...(await this.call(call)));
      this.pending.unshift(...left);
      this.failures = left.length > 0 ? this.failures + 1 : 0;
      if (left.length > 0) await sleep(Math.min(FIRST_PAUSE_MS * 2 ** (this.failures - 1), LONGEST_PAUSE_MS));
    }
    this.running = undefined;
  }

  /** Send messages; returns the entries of those that were not accepted. */
  private async call(messages: Pending[][]): Promise<Pending[]> {
    const worker = { DataType: "String", StringValue: this.worker };
    const entries = messages.map((entries, at) => ({
      Id: String(at),
      MessageBody: entries.length === 1 ? entries[0]!.text : `[${entries.map((one) => one.text).join(",")}]`,
      MessageAttributes: { worker },
    }));
    const failed = new Set<number>();
    try {
      const answer = await this.sqs.send(new SendMessageBatchCommand({ QueueUrl: this.url, Entries: entries }));
      for (const one of answer.Failed ?? []) failed.add(Number(one.Id));
      if (failed.size > 0) this.log("warning", "results_not_sent", { reason: answer.Failed![0]!.Message });
    } catch (error) {
      this.log("warning", "results_not_sent", { reason: String(error) });
      return messages.flat();
    }
    messages.forEach((entries, at) => failed.has(at) || entries.forEach((one) => one.sent()));
    return messages.filter((_, at) => failed.has(at)).flat();
  }
}

/** Entries by message. */
function pack(entries: Pending[]): Pending[][] {
  const messages: Pending[][] = [];
  let bytes = Infinity;
  for (const entry of entries) {
    const size = byteLength(entry.text) + 1;
    if (bytes + size > PACK_BYTES) {
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
