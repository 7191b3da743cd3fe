"""Objects in an S3 bucket, by aiobotocore, which is loaded with the first call.

A name that is not a folder, a day and 128 random bits is refused, so nothing outside the bucket and prefix of the
settings is ever read, written or deleted. Clients upload to one folder, tasks have the folder of the queue which their
workers receive from, so that these can be kept from other queues' objects.
"""

import re
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, date, datetime
from typing import Any
from urllib.parse import quote

from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.sealed import OBJECT_NAME
from penstock.runtime.aws import AwsClient
from penstock.settings.payload_texts import parse_bucket_url

OFFERED = "offered/"
"""The folder of what clients upload."""

_QUEUES = "queues/"
_PASSING = {
    "ConditionalRequestConflict", "SlowDown", "RequestTimeout", "ExpiredToken", "RequestTimeTooSkewed",
    "ThrottlingException",
}  # fmt: skip
_NAME = re.compile(OBJECT_NAME)


def folder_of(queue: str) -> str:
    """The folder for the objects of tasks that workers receive from this queue, given by name or URL."""
    name = queue.rsplit("/", 1)[-1] if "://" in queue else queue
    return f"{_QUEUES}{quote(name, safe='')[:800]}/"  # of a name of S3's 1024 characters


def new_name(folder: str) -> str:
    return f"{folder}{datetime.now(UTC):%Y%m%d}/{secrets.token_hex(16)}"


class Bucket:
    """The bucket and prefix of the settings. Methods raise PayloadUnavailable when S3 is unavailable or refuses."""

    def __init__(self, url: str, *, endpoint_url: str | None = None, region: str | None = None) -> None:
        self.url = url
        self._bucket, self._prefix = parse_bucket_url(url)
        self._endpoint_url = endpoint_url
        self._region = region
        self._client = AwsClient(self._make)

    async def put(self, name: str, body: bytes) -> None:
        """Store an object under a new name; one that is there is never overwritten, for it is of an earlier try."""
        kind = "application/octet-stream"
        await self._call("put_object", Key=self._key(name), Body=body, ContentType=kind, IfNoneMatch="*")

    async def get(self, name: str, limit: int) -> bytes:
        """Raises PayloadLost for a missing object, or one over the limit in bytes."""

        async def read(answer: Any) -> bytes:
            async with answer["Body"] as body:
                size = int(answer.get("ContentLength", 0))
                if size > limit:
                    raise PayloadLost(f"its object is {size} bytes, more than the {limit} that it was stored with")
                data: bytes = await body.read()
            return data

        data: bytes = await self._call("get_object", read, Key=self._key(name))
        return data

    async def delete(self, names: Sequence[str]) -> set[str]:
        """Delete up to 1000 objects; returns the names deleted, missing ones included."""
        objects = [{"Key": self._key(name)} for name in names]
        answer = await self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
        return set(names) - {error["Key"].removeprefix(self._prefix) for error in answer.get("Errors", [])}

    async def folders(self) -> list[str]:
        """List every folder, the one of names without a folder, which is empty, included."""
        folders = ["", OFFERED]
        more: dict[str, str] = {}
        while True:
            params = {"Prefix": f"{self._prefix}{_QUEUES}", "Delimiter": "/", **more}
            answer = await self._call("list_objects_v2", **params)
            folders += [one["Prefix"].removeprefix(self._prefix) for one in answer.get("CommonPrefixes", [])]
            if not answer.get("IsTruncated"):
                return folders
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    async def list(self, folder: str, day: date, after: str) -> list[str]:
        """List up to a thousand names of a folder and day, sorted after ``after``."""
        prefix = f"{self._prefix}{folder}{day:%Y%m%d}/"
        more = {"StartAfter": self._key(after)} if after else {}
        while True:
            answer = await self._call("list_objects_v2", Prefix=prefix, **more)
            listed = [one["Key"].removeprefix(self._prefix) for one in answer.get("Contents", [])]
            names = [name for name in listed if _NAME.fullmatch(name)]
            if names or not answer.get("IsTruncated"):  # else a page of other programs' objects
                return names
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    async def close(self) -> None:
        await self._client.close()

    async def _is_unlisted(self, key: str) -> bool:
        """Whether an object is missing, which S3 calls forbidden to those who may list a folder and not the bucket."""
        try:
            return not (await self._call("list_objects_v2", Prefix=key, MaxKeys=1)).get("Contents")
        except PayloadUnavailable:
            return False

    def _key(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise PayloadLost(f"{name[:60]!r} is not an object name of Penstock")
        return f"{self._prefix}{name}"

    async def _call(self, operation: str, then: Any = None, **params: Any) -> Any:
        from aiohttp import ClientError as HttpError
        from botocore.exceptions import BotoCoreError, ClientError

        client: Any = None
        try:
            client = await self._client()
            answer = await getattr(client, operation)(Bucket=self._bucket, **params)
            return answer if then is None else await then(answer)
        except ClientError as exc:
            code = str(exc.response.get("Error", {}).get("Code", "unknown"))
            status = int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if operation == "put_object" and code == "PreconditionFailed":
                return None
            if operation == "get_object" and (
                code in ("NoSuchKey", "404", "NotFound") or (status == 403 and await self._is_unlisted(params["Key"]))
            ):
                raise PayloadLost(f"its object {params['Key']} is not in {self.url}: it was deleted there") from None
            is_renewed = await self._client.renew(client, code)
            is_refusal = 400 <= status < 500 and status != 429 and code not in _PASSING and not is_renewed
            raise PayloadUnavailable(f"S3 rejected {operation} in {self.url}: {code}", is_refusal=is_refusal) from exc
        except (BotoCoreError, HttpError, OSError, TimeoutError) as exc:
            await self._client.renew(client, type(exc).__name__)
            raise PayloadUnavailable(f"S3 is unavailable ({operation} in {self.url}): {type(exc).__name__}") from exc

    async def _make(self, stack: AsyncExitStack) -> Any:
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session

        config = AioConfig(
            connect_timeout=5,
            read_timeout=30,
            max_pool_connections=50,
            retries={"mode": "standard", "total_max_attempts": 2},
            s3={"addressing_style": "path"} if self._endpoint_url else None,
        )
        options = {"endpoint_url": self._endpoint_url, "region_name": self._region, "config": config}
        return await stack.enter_async_context(get_session().create_client("s3", **options))
