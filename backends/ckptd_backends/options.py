"""Storage options, checked against a typed struct; and a string that does not show itself."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ckptd.errors import ConfigError
from ckptd.storage import StorageOptions

T = TypeVar("T", bound=msgspec.Struct)


class Secret:
    """A string that neither ``str`` nor ``repr`` shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The string itself."""
        return self._text

    def __repr__(self) -> str:
        return "***"


def checked_options(kind: type[T], options: StorageOptions, *, url: str) -> T:
    """``options`` as a ``kind``. Raises :class:`ConfigError` that names the option which is unknown or malformed, and
    never shows a value."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"{url}: unknown storage option {', '.join(unknown)}",
            hint=f"known are: {', '.join(known)}" if known else "this backend takes none",
        )
    try:
        return msgspec.convert(dict(options), kind, dec_hook=_secret)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{url}: storage option: {error}") from None


def at_most(inflight_max: int, threads_max: int | None) -> int:
    """How many calls may run at once: what the options say, or fewer where the process has a budget."""
    return inflight_max if threads_max is None else min(inflight_max, threads_max)


def _secret(kind: type, value: Any) -> Any:
    if kind is not Secret or not isinstance(value, str | Secret):
        raise TypeError("expected a string")
    return value if isinstance(value, Secret) else Secret(value)
