/** The actions of `penstock conformance`. */

import { setTimeout as sleep } from "node:timers/promises";

import { Fail, Worker } from "../src/index.js";

const worker = Worker.fromEnvironment()
  .action("conformance.echo", { names: ["value"] }, ({ value }) => value)
  .action("conformance.fail", { names: ["message", "final"] }, ({ message, final }) => {
    throw final ? new Fail(message) : new Error(message);
  })
  .action("conformance.sleep", { names: ["seconds"] }, async ({ seconds }, ctx) => {
    await sleep(seconds * 1000, undefined, { signal: ctx.signal });
  })
  .action("conformance.steps", { names: ["seconds"] }, async ({ seconds }, ctx) => {
    const results = [];
    for (const name of ["one", "two", "three"]) results.push(await ctx.step(name, () => sleep(seconds * 1000, name)));
    return results;
  })
  .action("conformance.tenant", (_, ctx) => ctx.tenant);

await worker.run();
process.exit(0);
