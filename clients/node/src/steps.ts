/** Durable steps: the journal of a task, and the steps that an attempt asks for (docs/protocol.md, Durable steps). */

import { EventTimeout, Fail, StepChanged, StepFailed, errorObject, readError, resultText } from "./errors.js";
import { type Json } from "./json.js";

export const SLEEP = "ctx.sleep";
export const EVENT = "ctx.event";
const NAME = /^(?: |[^\p{C}\p{Z}]){1,200}$/u;
const LONGEST_SLEEP_SECONDS = 10 * 366 * 86_400;

/** A finished step, as requests carry it and as it is reported. */
export interface Entry {
  name: string;
  repetition?: number;
  position?: number;
  parallel?: boolean;
  result?: Json;
  error?: Json;
}

export interface Place {
  name: string;
  repetition: number;
  position: number;
  parallel?: boolean;
}

/** Ends a handler whose task goes on later; handlers must not catch it. */
export class Suspend {
  constructor(readonly params: Record<string, unknown>, readonly entry?: Entry, readonly method: "suspend" | "wait" = "suspend") {}
}

/** What an attempt does for its steps. `check`: whether one may begin; `measure`: whether the task has room for it;
 * `report`: resolves once the queue has it. */
export interface StepPort {
  check(): void;
  measure(entry: Entry): void;
  report(entry: Entry): Promise<void>;
}

const keyOf = (name: string, repetition: number): string => `${repetition}:${name}`;
export const labelOf = (step: { name: string; repetition?: number }): string =>
  step.repetition ? `${step.name}#${step.repetition + 1}` : step.name;

export class Steps {
  readonly reported: Entry[] = [];
  private readonly notAsked: Map<string, Entry>;
  private readonly repetitions = new Map<string, number>();
  /** Steps so far, those of the journal included. */
  asked = 0;
  private underWay = 0;
  private suspended = false;

  constructor(
    journal: Entry[],
    private readonly port: StepPort,
  ) {
    this.notAsked = new Map(journal.map((entry) => [keyOf(entry.name, entry.repetition ?? 0), entry]));
  }

  async run<R>(name: string, run: () => R | Promise<R>): Promise<R> {
    if (typeof name !== "string" || !NAME.test(name)) {
      throw new RangeError(`a step's name is 1 to 200 printable characters, not ${JSON.stringify(String(name).slice(0, 100))}`);
    }
    const { place, entry } = this.ask(name);
    if (entry) return replayed(entry) as R;
    this.port.check();
    const overlaps = this.underWay > 0;
    const began = this.asked;
    this.underWay += 1;
    try {
      const outcome = await this.attempt(run);
      const parallel = overlaps || this.asked !== began ? { parallel: true } : {};
      const finished: Entry = { ...place, ...parallel, ...outcome };
      this.port.measure(finished);
      this.reported.push(structuredClone(finished)); // they go with the outcome once more, and the handler may change its result
      await this.port.report(finished);
      this.port.check();
      return replayed(finished) as R;
    } finally {
      this.underWay -= 1;
    }
  }

  sleep(seconds: number): void {
    if (typeof seconds !== "number" || !(seconds >= 0 && seconds <= LONGEST_SLEEP_SECONDS)) {
      throw new RangeError(`a task sleeps 0 to ${LONGEST_SLEEP_SECONDS} seconds, not ${String(seconds)}`);
    }
    const { place, entry } = this.ask(SLEEP);
    if (entry) return;
    this.checkAlone("ctx.sleep");
    throw new Suspend({ seconds }, { ...place, result: null });
  }

  event(token: string, timeout?: number): Json {
    const { place, entry } = this.ask(EVENT);
    if (entry) return replayed(entry);
    this.checkAlone("ctx.event");
    throw new Suspend({ token, ...(timeout === undefined ? {} : { timeout }), step: place }, undefined, "wait");
  }

  /** Throws StepChanged when the handler has ended without a step of the journal. */
  checkAllAsked(): void {
    for (const entry of this.notAsked.values()) throw changed(`the handler ended without its step ${labelOf(entry)}`);
  }

  private async attempt(run: () => unknown): Promise<{ result: Json } | { error: Json }> {
    try {
      // A result is what JSON makes of it, in the first attempt too.
      return { result: JSON.parse(resultText(await run(), "the step")) as Json };
    } catch (error) {
      if (!(error instanceof Fail)) throw error; // the attempt fails, and the next one runs the step again
      return { error: errorObject(error) as Json };
    }
  }

  private ask(name: string): { place: Place; entry: Entry | undefined } {
    const repetition = this.repetitions.get(name) ?? 0;
    // After a sleep or an event that the handler has not awaited yet, which the journal gets later or never.
    const parallel = this.suspended ? { parallel: true } : {};
    const place = { name, repetition, position: this.asked, ...parallel };
    const key = keyOf(name, repetition);
    const entry = this.notAsked.get(key);
    if (!entry && this.underWay === 0) {
      for (const next of this.notAsked.values()) {
        if (!next.parallel) throw changed(`the handler asks for its step ${labelOf(place)}, but ${labelOf(next)} is next`);
      }
    }
    this.notAsked.delete(key);
    this.repetitions.set(name, repetition + 1);
    this.asked += 1;
    return { place, entry };
  }

  private checkAlone(what: string): void {
    if (this.underWay > 0) throw new Error(`${what} suspends the task, and a step still runs: await the step first`);
    this.port.check();
    this.suspended = true;
  }
}

function changed(what: string): StepChanged {
  return new StepChanged(`${what} in the journal of the task: the handler was changed while the task was under way`);
}

function replayed(entry: Entry): Json {
  if (entry.error === undefined) return entry.result ?? null;
  const { kind, message } = readError(entry.error);
  throw new (kind === "WaitTimeout" ? EventTimeout : StepFailed)(labelOf(entry), kind, message);
}
