export { Client, type Actions, type ClientOptions, type EnqueueOptions, type Enqueued, type Status, type TaskState } from "./client.js";
export {
  DuplicateTask, InvalidParams, ResultGone, RpcError, StateConflict, TaskCancelled, TaskFailed, TaskNotFound, Unavailable, Unfinished,
  WaitTimeout,
} from "./client.js";
export { EventTimeout, Fail, LeaseLost, Retry, StepChanged, StepFailed } from "./errors.js";
export type { Json } from "./json.js";
export type { PayloadOptions } from "./payloads.js";
export type { Log } from "./queues.js";
export { Context, Worker, currentContext, type ActionOptions, type Handler, type WorkerOptions } from "./worker.js";
