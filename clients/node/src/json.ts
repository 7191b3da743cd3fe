/** JSON values, as payloads and results are. */
export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

/** JSON text without the two characters of JSON that SQS refuses. Half of a surrogate pair is written as an escape. */
export function toText(value: unknown): string {
  return JSON.stringify(value ?? null).replace(/[\ufffe\uffff]/g, (char) => `\\u${char.charCodeAt(0).toString(16)}`);
}

export function byteLength(text: string): number {
  return Buffer.byteLength(text, "utf8");
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
