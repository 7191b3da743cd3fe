/** Payloads and results of steps that are encrypted, or stored as objects in a bucket (docs/payloads.md). */

import { createDecipheriv, createHash, createHmac } from "node:crypto";

import { type Json } from "./json.js";
import { Refusal } from "./errors.js";

const MARK = "penstock+";
const SEALED = /^penstock\+sealed:([0-9a-f]{16}):([A-Za-z0-9+/=]*)$/;
const OBJECT = /^penstock\+object:([A-Za-z0-9._~%/-]{1,900}):([0-9a-f]{16}|-):([0-9]{1,12}):([0-9a-f]{64})$/;
const PLAIN = "penstock+plain:";
const HEAD_BYTES = 32; // "PSK1" or "PSK2", and the salt
const TAG_BYTES = 16;
const GONE = "NoSuchKey"; // S3's name of the error for an object that is not there

export interface PayloadOptions {
  /** Keys in base64, as of `penstock payload-key`; any of them decrypts. */
  keys?: string[];
  /** The bucket and prefix, as `s3://bucket/prefix`. Needs the package @aws-sdk/client-s3. */
  bucket?: string;
  /** An S3 other than AWS. */
  endpoint?: string;
  region?: string;
}

/** What a value belongs to, with which it was encrypted. `older`: without the tenant. */
interface Owner {
  text: string;
  older: string;
}

export function payloadOwner(action: string, tenant: string | null): Owner {
  const older = `payload\0${action}`;
  return { text: tenant === null ? older : `payload\0${tenant}\0${action}`, older };
}

export function stepOwner(taskId: string, name: string, repetition: number): Owner {
  const text = `step\0${taskId}\0${name}\0${repetition}`;
  return { text, older: text };
}

function unavailable(why: string): Refusal {
  return new Refusal("PayloadUnavailable", `its payload cannot be had now: ${why}`, undefined, { not_begun: true });
}

function lost(why: string): Refusal {
  return new Refusal("PayloadLost", `its payload cannot be had: ${why}`);
}

export class Payloads {
  private readonly keys = new Map<string, Buffer>();
  private fetchObject: ((name: string) => Promise<Uint8Array>) | undefined;

  constructor(private readonly options: PayloadOptions) {
    for (const text of options.keys ?? []) {
      const key = Buffer.from(text, "base64");
      if (key.length !== 32) throw new Error("a payload key is 32 bytes in base64; `penstock payload-key` makes one");
      this.keys.set(createHash("sha256").update("penstock payload key\0").update(key).digest("hex").slice(0, 16), key);
    }
  }

  /** Bytes of a text once the pipeline has encrypted it, if it does. */
  sealedBytes(bytes: number): number {
    return this.keys.size === 0 ? bytes : 4 * Math.ceil((bytes + HEAD_BYTES + TAG_BYTES) / 3) + 40;
  }

  /** A value as its handler sees it. Throws a Refusal for one that cannot be opened. */
  async open(value: Json, owner: Owner): Promise<Json> {
    if (typeof value !== "string" || !value.startsWith(MARK)) return value;
    if (value.startsWith(PLAIN)) return value.slice(PLAIN.length);
    const sealed = SEALED.exec(value);
    if (sealed) return parse(this.decrypt(sealed[1]!, Buffer.from(sealed[2]!, "base64"), owner));
    const object = OBJECT.exec(value);
    if (!object) throw lost("it is sealed in a form that this worker does not know");
    const [, name, keyId, , digest] = object as unknown as [string, string, string, string, string];
    if (keyId !== "-" && !this.keys.has(keyId)) throw missingKey(keyId);
    const data = Buffer.from(await this.fetch(name));
    if (createHash("sha256").update(data).digest("hex") !== digest) throw lost(`its object ${name} was changed`);
    return parse(keyId === "-" ? data : this.decrypt(keyId, data, owner));
  }

  private decrypt(keyId: string, data: Buffer, owner: Owner): Buffer {
    const key = this.keys.get(keyId);
    if (!key) throw missingKey(keyId);
    const magic = data.subarray(0, 4).toString("latin1");
    const isTenants = magic === "PSK2";
    const derived = createHmac("sha256", key).update(data.subarray(isTenants ? 0 : 4, HEAD_BYTES)).digest();
    const sealed = data.subarray(HEAD_BYTES);
    const isKnown = isTenants || magic === "PSK1";
    const opened = isKnown && decryptWith(derived, Buffer.alloc(12), sealed, isTenants ? owner.text : owner.older);
    if (!opened) throw lost(`what is encrypted with key ${keyId} was changed, or belongs to something else`);
    return opened;
  }

  private async fetch(name: string): Promise<Uint8Array> {
    this.fetchObject ??= await this.openBucket();
    try {
      return await this.fetchObject(name);
    } catch (error) {
      if (error instanceof Error && error.name === GONE) throw lost(`there is no object ${name}`);
      throw unavailable(String(error));
    }
  }

  private async openBucket(): Promise<(name: string) => Promise<Uint8Array>> {
    const { bucket, endpoint, region } = this.options;
    if (!bucket) throw unavailable("it is stored as an object, and this worker has no bucket: set PENSTOCK_PAYLOAD_BUCKET");
    const { hostname, pathname } = new URL(bucket);
    const prefix = pathname.replace(/^\/|\/$/g, "");
    let s3: typeof import("@aws-sdk/client-s3");
    try {
      s3 = await import("@aws-sdk/client-s3");
    } catch {
      throw unavailable("the package @aws-sdk/client-s3 is not installed");
    }
    const client = new s3.S3Client({
      ...(endpoint ? { endpoint, forcePathStyle: true } : {}),
      ...(region ? { region } : {}),
    });
    return async (name) => {
      const [Bucket, Key] = [hostname, prefix ? `${prefix}/${name}` : name];
      try {
        const found = await client.send(new s3.GetObjectCommand({ Bucket, Key }));
        return await found.Body!.transformToByteArray();
      } catch (error) {
        // S3 calls a missing object forbidden to those who may list a folder and not the bucket.
        if (!(error instanceof s3.S3ServiceException && error.$metadata.httpStatusCode === 403)) throw error;
        const listed = await client.send(new s3.ListObjectsV2Command({ Bucket, Prefix: Key, MaxKeys: 1 }));
        if (!listed.Contents?.length) error.name = GONE;
        throw error;
      }
    };
  }
}

function missingKey(keyId: string): Refusal {
  return unavailable(`it is encrypted with key ${keyId}, which this worker does not have: add it to PENSTOCK_PAYLOAD_KEYS`);
}

function decryptWith(key: Buffer, nonce: Buffer, data: Buffer, owner: string): Buffer | undefined {
  if (data.length < TAG_BYTES) return undefined;
  const decipher = createDecipheriv("aes-256-gcm", key, nonce).setAAD(Buffer.from(owner));
  decipher.setAuthTag(data.subarray(-TAG_BYTES));
  try {
    return Buffer.concat([decipher.update(data.subarray(0, -TAG_BYTES)), decipher.final()]);
  } catch {
    return undefined;
  }
}

function parse(data: Buffer): Json {
  try {
    return JSON.parse(data.toString("utf8")) as Json;
  } catch {
    throw lost("it is no JSON");
  }
}
