import { isObject, toText } from "./json.js";

/** Codes of errors in answers of a worker. */
export const HANDLER_ERROR = -32000;
export const TASK_TIMEOUT = -32001;
export const METHOD_NOT_FOUND = -32601;
export const INVALID_PARAMS = -32602;
export const TOO_LARGE = -32013;

/** Thrown by a handler: the task has failed permanently, no attempt will help. In a step: the step has. */
export class Fail extends Error {
  override name = "Fail";
}

/** Thrown by a handler: try again, after `delay` seconds if given, else after the usual backoff. */
export class Retry extends Error {
  override name = "Retry";

  constructor(
    readonly delay?: number,
    message = "the handler asks for another attempt",
  ) {
    super(message);
  }
}

/** A durable step has failed finally, in this attempt or an earlier one. `kind` is the type of its error. */
export class StepFailed extends Error {
  override name = "StepFailed";

  constructor(
    readonly step: string,
    readonly kind: string,
    message: string,
  ) {
    super(message);
  }
}

/** No event came in time. */
export class EventTimeout extends StepFailed {
  override name = "EventTimeout";
}

/** The handler does not ask for the steps that its task has finished: it was changed while the task was under way. */
export class StepChanged extends Error {
  override name = "StepChanged";
}

/** The worker stops before the task has ended: the task runs elsewhere. */
export class LeaseLost extends Error {
  override name = "LeaseLost";
}

/** What the worker itself answers instead of a result. `data` has hints, such as `final` and `not_begun`. */
export class Refusal extends Error {
  constructor(
    readonly kind: string,
    message: string,
    readonly code: number = HANDLER_ERROR,
    readonly data: Record<string, unknown> = {},
  ) {
    super(message);
  }
}

const KIND_CHARS = 200;
const MESSAGE_CHARS = 2000;
const TRACEBACK_CHARS = 8000;

/** The JSON-RPC error of what a handler has thrown, whatever that is. */
export function errorObject(thrown: unknown): Record<string, unknown> {
  try {
    return described(thrown);
  } catch {
    const message = "the handler threw what cannot be read"; // such as an error whose message is a getter that throws
    return { code: HANDLER_ERROR, message, data: { type: "Error", message } };
  }
}

function described(thrown: unknown): Record<string, unknown> {
  if (thrown instanceof Refusal) {
    const message = thrown.message.slice(0, MESSAGE_CHARS);
    return { code: thrown.code, message, data: { type: thrown.kind, message, ...thrown.data } };
  }
  const error = thrown instanceof Error ? thrown : new Error(String(thrown));
  const kind = String(error.name).slice(0, KIND_CHARS);
  const message = String(error.message).slice(0, MESSAGE_CHARS);
  const data: Record<string, unknown> = { type: kind, message, traceback: String(error.stack ?? "").slice(0, TRACEBACK_CHARS) };
  if (thrown instanceof Fail || thrown instanceof StepFailed) data["final"] = true;
  if (thrown instanceof Retry && thrown.delay !== undefined) data["retry_after"] = Number(thrown.delay);
  return { code: HANDLER_ERROR, message: message || kind, data };
}

/** What a handler or a step has returned, as JSON text. Throws a Refusal: its work is done, and it would return the same again. */
export function resultText(result: unknown, of: string): string {
  try {
    return toText(result);
  } catch (error) {
    throw new Refusal("BadResult", `${of} returned what is not JSON-serialisable: ${String(error)}`, HANDLER_ERROR, { final: true });
  }
}

/** Type and message of an error object. */
export function readError(error: unknown): { kind: string; message: string } {
  if (!isObject(error)) return { kind: "Error", message: String(error) };
  const data = isObject(error["data"]) ? error["data"] : {};
  return { kind: String(data["type"] ?? "Error"), message: String(data["message"] ?? error["message"] ?? "") };
}
