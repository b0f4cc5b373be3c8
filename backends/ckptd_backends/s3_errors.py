"""The table from what S3 and its client say to the errors of ckptd."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import time
from collections.abc import Generator
from email.utils import formatdate
from typing import Any

import urllib3.exceptions
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from ckptd.errors import (
    AccessDenied,
    AlreadyExists,
    CkptdError,
    ClockSkewed,
    ConfigError,
    CredentialsExpired,
    NotFound,
    ShortRead,
    StorageError,
    StorageFull,
    TooLarge,
    Unavailable,
    UsageError,
)


class UploadGone(Unavailable):
    """The store no longer knows the upload: it was completed or aborted. Only a new upload can help."""


_BY_CODE: dict[str, type[StorageError]] = {
    **dict.fromkeys(("NoSuchKey", "NotFound", "404"), NotFound),
    "NoSuchUpload": UploadGone,
    "PreconditionFailed": AlreadyExists,
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), CredentialsExpired),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), ClockSkewed),
    **dict.fromkeys(("EntityTooLarge", "MaxMessageLengthExceeded"), TooLarge),
    **dict.fromkeys(("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"), StorageFull),
    "InvalidRange": ShortRead,
    **dict.fromkeys(("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled"), AccessDenied),
    **dict.fromkeys(("BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody"), Unavailable),
    **dict.fromkeys(("ConditionalRequestConflict", "OperationAborted", "RequestTimeout"), Unavailable),
    **dict.fromkeys(("SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException"), Unavailable),
    **dict.fromkeys(("RequestLimitExceeded", "TooManyRequests", "ServiceUnavailable", "InternalError"), Unavailable),
}
_BY_STATUS: dict[int, type[StorageError]] = {
    403: AccessDenied,
    404: NotFound,
    408: Unavailable,
    409: Unavailable,
    412: AlreadyExists,
    413: TooLarge,
    416: ShortRead,
    429: Unavailable,
    507: StorageFull,
}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
_REFUSES_CHECKSUMS = {"MissingContentLength", "InvalidArgument", "NotImplemented", "411", "400", "501"}

_TRANSIENT = (
    boto.HTTPClientError,  # connections that break or time out
    boto.ConnectionError,  # connections that cannot be made
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
    ResponseParserError,  # something that is not S3 has answered, or the answer was cut off
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
)
_NO_SERVER = (boto.EndpointConnectionError, boto.ConnectTimeoutError)
_TLS = (boto.SSLError, urllib3.exceptions.SSLError)
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "doesn't match")
"""What tells a certificate that is not trusted, or a server without TLS, from a handshake that broke off."""
_BAD_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"}
_ACTIONS = {
    **dict.fromkeys(("GetObject", "HeadObject"), "s3:GetObject"),
    **dict.fromkeys(("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"), "s3:PutObject"),
    **dict.fromkeys(("DeleteObject", "DeleteObjects"), "s3:DeleteObject"),
    **dict.fromkeys(("ListObjectsV2", "HeadBucket"), "s3:ListBucket"),
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}
"""Request → the permission that it needs, where the two have other names."""


@contextlib.contextmanager
def mapped(key: str, where: str) -> Generator[None]:
    """Turn what boto3 raises about ``key`` into an error of ckptd; secrets and request bodies stay behind. ``where``:
    the whole name with the bucket, for people."""
    try:
        yield
    except CkptdError:
        raise
    except boto.ClientError as error:
        raise client_error(error, key, where) from error
    except _NO_CREDENTIALS as error:
        raise AccessDenied(f"{where}: no usable credentials: {error}", key=key, hint=_own_credentials()) from error
    except _TLS as error:
        if not any(sign in str(error) for sign in _UNTRUSTED):
            raise Unavailable(f"{where}: TLS: {error}", key=key) from error  # a handshake that was broken off
        hint = "a private authority is named by ca_bundle, or by AWS_CA_BUNDLE in the environment of this process"
        raise AccessDenied(f"{where}: TLS: {error}", key=key, hint=hint) from error
    except boto.ParamValidationError as error:
        raise UsageError(f"{key}: the S3 client refuses the request: {error}") from error
    except _TRANSIENT as error:
        hint = "does a server listen there: is endpoint_url right?" if isinstance(error, _NO_SERVER) else ""
        raise Unavailable(f"{where}: {type(error).__name__}: {error}", key=key, hint=hint) from error
    except boto.BotoCoreError as error:
        raise StorageError(f"{where}: {type(error).__name__}: {error}", key=key) from error


def error_code(error: BaseException | None) -> str:
    """S3's code for a mapped error, such as ``NoSuchKey``; a bare status such as ``403`` for a HEAD; else empty."""
    cause = error.__cause__ if error is not None else None
    return str(cause.response.get("Error", {}).get("Code", "")) if isinstance(cause, boto.ClientError) else ""


def from_s3(error: BaseException | None) -> bool:
    """Whether the answer behind a mapped error bears the mark of an S3 store. A HEAD has nothing else to tell by."""
    cause = error.__cause__ if error is not None else None
    if not isinstance(cause, boto.ClientError):
        return True
    metadata: dict[str, Any] = dict(cause.response.get("ResponseMetadata", {}))
    return bool({"x-amz-request-id", "x-amz-id-2"} & set(metadata.get("HTTPHeaders", {})))


def client_error(error: boto.ClientError, key: str, where: str) -> CkptdError:
    """The error of ckptd for an answer that is not a success."""
    response: dict[str, Any] = dict(error.response)
    details: dict[str, Any] = response.get("Error", {})
    metadata: dict[str, Any] = response.get("ResponseMetadata", {})
    code = str(details.get("Code", ""))
    status = int(metadata.get("HTTPStatusCode", 0))
    operation = error.operation_name
    text = f"{operation} {where}: {code} ({status}): {details.get('Message') or 'no message'}"
    if code == "NoSuchBucket":
        return ConfigError(
            f"the bucket does not exist: {text}", hint="make it, or let it be made with create_bucket=True"
        )
    if code in _WRONG_REGION or status in (301, 307):
        return ConfigError(f"the bucket lies in another region: {text}", hint=f"set region{_region(details, metadata)}")
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or (Unavailable if status >= 500 else StorageError)
    if status == 501:
        kind = StorageError
    if kind is ClockSkewed:
        return ClockSkewed(f"{text}; {_both_times(details, metadata)}", key=key, hint="set the clock, by NTP")
    if kind is StorageError and code in _REFUSES_CHECKSUMS:
        return StorageError(text, key=key, hint="an old store may refuse checksums: try checksum='none'")
    if kind is NotFound and code not in _BY_CODE.keys() - {"404"} and not operation.startswith("Head"):
        return not_s3(f"{text}, without a code of S3's", key)
    return kind(text, key=key, hint=_hint(kind, code, operation))


def not_s3(message: str, key: str) -> Unavailable:
    """For an answer that no S3 store gives: it proves nothing, neither that something was stored nor that it is not
    there."""
    return Unavailable(message, key=key, hint="something between here and the store answers: is endpoint_url right?")


def _hint(kind: type[StorageError], code: str, operation: str) -> str:
    if kind is CredentialsExpired or code in _BAD_CREDENTIALS:
        return _own_credentials()
    if kind is AccessDenied:
        action = _ACTIONS.get(operation, f"s3:{operation}")
        return f"allow {action} there; deploy/s3-policy.json has all that ckptd needs"
    return "make room in the bucket, or raise its quota" if kind is StorageFull else ""


def _own_credentials() -> str:
    hint = (
        f"process {os.getpid()} takes its credentials from storage_options (access_key_id, secret_access_key, or "
        "profile), or else from its own environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE), "
        "files and role"
    )
    if _is_daemon():
        hint += (
            "; it is a daemon, which keeps the environment in which it was started: end it with `ckptd drain`, and it "
            "is started anew"
        )
    return hint


def _is_daemon() -> bool:
    """Whether this process was started as one."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return (spec is not None and spec.name.startswith("ckptd.daemon")) or sys.argv[1:2] == ["serve"]


def _region(details: dict[str, Any], metadata: dict[str, Any]) -> str:
    headers: dict[str, str] = metadata.get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or details.get("Region")
    return f"={region!r}" if region else ""


def _both_times(details: dict[str, Any], metadata: dict[str, Any]) -> str:
    headers: dict[str, str] = metadata.get("HTTPHeaders", {})
    here = details.get("RequestTime") or formatdate(time.time(), usegmt=True)
    there = details.get("ServerTime") or headers.get("date", "unknown")
    return f"this machine's clock says {here}, the store's says {there}"
