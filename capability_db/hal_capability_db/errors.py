"""The one error of the capability database: what is wrong, in which file, line and key."""

from __future__ import annotations

from hal.errors import HalError


class DatabaseError(HalError):
    """A database file is refused, or something was looked up that the database does not hold.

    For a file, `who` is `FILE:LINE, KEY`.
    """
