"""Protobuf messages in a row, as files of several formats hold them."""

from __future__ import annotations

from typing import Any


def delimited(message: Any) -> bytes:
    """``message`` after its length, which is written in groups of seven bits."""
    data: bytes = message.SerializeToString()
    size, length = len(data), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes(length) + data
