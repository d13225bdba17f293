"""
Files of other people, read without trusting them: regular ones only, and no more of them than a limit.

A FIFO in place of a manifest would block its reader forever, and a device or a file of many gigabytes would fill the
memory. Every file of a distribution, of evidence and of settings is read here.
"""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Without O_NONBLOCK, opening a FIFO waits for a writer. It changes nothing for a regular file.
_FLAGS: Final = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))


def read_bytes(path: str | Path, largest: int) -> bytes:
    """
    Read a regular file.

    Args:
        path: The file.
        largest: The most bytes that it may have.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger.
        ValueError: The path has a null character.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        found = os.fstat(descriptor)  # of the open file: nothing can be put in its place between this and the reading
        if S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if found.st_size > largest:
            raise too_large(path, largest)
        return read_capped(lambda size: os.read(descriptor, size), path, largest, found.st_size)
    finally:
        os.close(descriptor)


def read_head(path: str | Path, size: int) -> bytes:
    """
    Read the beginning of a regular file, which may be larger.

    Args:
        path: The file.
        size: The most bytes that are read; a shorter file is read whole.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: The path has a null character.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        parts: list[bytes] = []
        while size > 0 and (part := os.read(descriptor, min(size, 2**20))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_text(path: str | Path, largest: int) -> str:
    """
    Read a regular file of UTF-8, its line ends as in Python. Arguments and errors as for `read_bytes`.

    Raises:
        UnicodeDecodeError: It is not UTF-8.
    """
    return decoded(read_bytes(path, largest))


def decoded(content: bytes) -> str:
    """Return UTF-8 as text, its line ends as in Python."""
    text = content.decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_capped(read: Callable[[int], bytes], path: object, largest: int, expected: int = 0) -> bytes:
    """
    Read to the end, whatever the file system says of the size.

    Args:
        read: Returns up to that many bytes, and none at the end.
        path: The file, for messages.
        largest: The most bytes that it may have.
        expected: The bytes that it should have.

    Raises:
        OSError: There are more.
    """
    parts: list[bytes] = []
    left = largest + 1  # a byte more shows that there is more
    while left and (part := read(min(left, expected + 1 if expected else 2**16))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise too_large(path, largest)
    return b"".join(parts)


def too_large(path: object, largest: int) -> OSError:
    """Return the error for a file that is larger than it may be."""
    size = f"{largest // 2**20} MiB" if largest >= 2**20 else f"{largest // 2**10} KiB"
    return OSError(errno.EFBIG, f"it is larger than {size}", str(path))
