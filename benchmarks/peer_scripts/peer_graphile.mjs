// graphile-worker: a local queue of 500 jobs, completions in batches, 24 jobs at a time (its best).
//
// fill TASKS               makes the tables, enqueues a backlog
// work SLOTS               drains it

import { DATABASE_URL, fill, load, noteStart, untilStopped, waitForGo } from "./barrier.mjs";

const { Logger, makeWorkerUtils, run } = load("graphile-worker");
const [command, argument] = process.argv.slice(2);

const logger = new Logger(() => (level, message) => {
  if (level === "error") console.error(message);
});

if (command === "fill") {
  const utils = await makeWorkerUtils({ connectionString: DATABASE_URL, logger });
  await utils.migrate();
  await fill(Number(argument), (payloads) =>
    utils.addJobs(payloads.map((payload) => ({ identifier: "noop", payload }))),
  );
  await utils.release();
  process.exit(0);
}
await waitForGo();
const worker = {
  connectionString: DATABASE_URL,
  concurrentJobs: Number(argument),
  logger,
  localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
};
const runner = await run({
  preset: { worker },
  taskList: {
    noop: async () => noteStart(),
  },
  noHandleSignals: true,
});
await untilStopped(() => runner.stop());
