import assert from "node:assert/strict";
import { createServer } from "node:http";
import { type AddressInfo } from "node:net";
import { test } from "node:test";

import { Refusal } from "../src/errors.js";
import { Payloads, payloadOwner } from "../src/payloads.js";

const OBJECT = `penstock+object:queues/q/20300101/${"0".repeat(32)}:-:2:${"0".repeat(64)}`;
const FORBIDDEN = "<Error><Code>AccessDenied</Code></Error>";
const EMPTY = "<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>";

test("an object that S3 calls forbidden is lost only if a listing has it not", async () => {
  process.env["AWS_ACCESS_KEY_ID"] = process.env["AWS_SECRET_ACCESS_KEY"] = "x";
  let mayList = true;
  const server = createServer((request, response) => {
    const isListed = mayList && request.url!.includes("list-type=2");
    response.writeHead(isListed ? 200 : 403, { "Content-Type": "application/xml" });
    response.end(isListed ? EMPTY : FORBIDDEN);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as AddressInfo;
  const payloads = new Payloads({ bucket: "s3://b", endpoint: `http://127.0.0.1:${port}`, region: "us-east-1" });
  const opened = (): Promise<unknown> => payloads.open(OBJECT, payloadOwner("a", null));
  await assert.rejects(opened, (error) => error instanceof Refusal && error.kind === "PayloadLost");
  mayList = false;
  await assert.rejects(opened, (error) => error instanceof Refusal && error.kind === "PayloadUnavailable");
  server.closeAllConnections();
  server.close();
});
