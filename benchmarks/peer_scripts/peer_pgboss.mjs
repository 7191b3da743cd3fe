// pg-boss: batches of 2,000, each one call of the handler and completed as a whole (its best).
//
// fill TASKS               makes the tables, enqueues a backlog
// work SIZE                drains it by batches of that size

import { DATABASE_URL, fill, load, noteStart, untilStopped, waitForGo } from "./barrier.mjs";

const { PgBoss } = load("pg-boss");
const QUEUE = "noop";
const [command, argument] = process.argv.slice(2);

const boss = new PgBoss({ connectionString: DATABASE_URL, schedule: false, supervise: command === "work" });
boss.on("error", (error) => console.error(error));

if (command === "fill") {
  await boss.start();
  await boss.createQueue(QUEUE);
  await fill(Number(argument), (payloads) => boss.insert(QUEUE, payloads.map((data) => ({ data }))));
  await boss.stop({ graceful: false });
  process.exit(0);
}
await boss.start();
await waitForGo();
const options = { batchSize: Number(argument), pollingIntervalSeconds: 0.5, burstWhenBatchFull: true };
await boss.work(QUEUE, options, async (jobs) => {
  for (const _ of jobs) noteStart();
});
await untilStopped(() => boss.stop({ graceful: false }));
