"""The table from what fsspec's file systems raise to the errors of ckptd."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator

from ckptd.errors import (
    AccessDenied,
    AlreadyExists,
    CkptdError,
    NotFound,
    StorageError,
    StorageFull,
    Unavailable,
    UsageError,
)


@contextlib.contextmanager
def mapped(key: str) -> Generator[None]:
    """Turn what is raised about ``key`` into an error of ckptd. Many file systems raise errors of their own making, and
    those are not retried: nobody knows what they mean."""
    try:
        yield
    except CkptdError:
        raise
    except FileNotFoundError as error:
        raise NotFound("no such object", key=key) from error
    except FileExistsError as error:
        raise AlreadyExists("an object is there", key=key) from error
    except PermissionError as error:
        raise AccessDenied(f"refused: {error}", key=key) from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise UsageError(f"{key}: one of two keys may not be the other's prefix: {error}") from error
    except OSError as error:
        kind = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
        raise kind(f"{type(error).__name__}: {error}", key=key) from error
    except Exception as error:
        raise StorageError(f"{type(error).__name__}: {error}", key=key) from error
