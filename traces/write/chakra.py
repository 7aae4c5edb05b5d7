"""Chakra execution traces (``.et``), one file a rank: what ASTRA-sim and other Chakra readers start from.

Source of the schema: mlcommons/chakra, ``schema/protobuf/et_def.proto`` (field numbers and enumerations; only the
fields that are written). Which attributes a node needs, of which type, and that sizes of collectives are bytes of one
rank's input: its feeder (``src/feeder/et_feeder_node.cpp``) and ASTRA-sim (``workload/Workload.cc``,
``system/collective/Ring.cc``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from inputs.tuples import maker_of
from traces.write.files import check_package, write_pieces
from traces.write.protobuf import delimited, varint

VERSION = "0.0.4"
Value = bool | int | float | str


class NodeType(IntEnum):
    """Kinds of nodes."""

    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


class Collective(IntEnum):
    """Values of the attribute ``comm_type``."""

    ALL_REDUCE = 0
    ALL_GATHER = 2
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeKind:
    """What nodes of one kernel share, encoded once; ``own`` names the attributes (numbers) that each has for itself."""

    name: str
    type: NodeType
    attributes: Mapping[str, Value] = field(default_factory=dict)
    own: tuple[str, ...] = ()


class Node(NamedTuple):
    """One kernel of one rank. Times are whole microseconds, as the format has it; ``after`` are ids of this rank."""

    id: int
    kind: NodeKind
    after: tuple[int, ...]
    start_us: int
    duration_us: int
    own: tuple[int | float, ...] = ()


node_of = maker_of(Node)

# The type that readers expect of an attribute; others are written by their Python type.
_TYPES = {
    "num_ops": "int64",
    "tensor_size": "uint64",
    "comm_type": "int64",
    "comm_size": "int64",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "comm_priority": "int32",
    "energy_j": "double",
}
_VALUE_FIELDS = {"double": 3, "int32": 7, "int64": 9, "uint64": 13, "bool": 27, "string": 29}


def write_chakra(nodes: Iterable[Node], path: Path, *, about: Mapping[str, Value] | None = None) -> Path:
    """Write the nodes of one rank to ``path``; ``about`` are attributes of the whole trace.

    Raises :class:`TraceError` where the package ``protobuf`` is missing or the file cannot be written.

    >>> import tempfile
    >>> one = Node(id=0, kind=NodeKind(name="gemm", type=NodeType.COMPUTE), after=(), start_us=0, duration_us=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_chakra([one], Path(folder) / "run.0.et").read_bytes().hex(" ")
    '07 0a 05 30 2e 30 2e 34 0a 12 04 67 65 6d 6d 18 04 38 05'
    """
    check_chakra(path)
    return write_pieces(path, _pieces(nodes, about or {}))


def check_chakra(path: Path) -> None:
    """Refuse, before anything is simulated, a Python that lacks the package of the format."""
    check_package("google.protobuf", "protobuf", path, kind="")


def _pieces(nodes: Iterable[Node], about: Mapping[str, Value]) -> Iterator[bytes]:
    head = _messages()["GlobalMetadata"](version=VERSION)
    _add(head, about)
    yield delimited(head)
    alike: dict[NodeKind, tuple[bytes, bytes, list[bytes]]] = {}
    ends: dict[tuple[NodeKind, int, tuple[int | float, ...]], tuple[bytes, bytes]] = {}  # layers repeat them
    previous = b""  # the number of the node before, which most wait for
    for number, kind, after, start_us, duration_us, own in nodes:
        known = ends.get((kind, duration_us, own))
        if known is None:
            if len(ends) == MOST_ENDS:
                ends.clear()
            if kind not in alike:
                alike[kind] = _encoded(kind)
            known = ends[kind, duration_us, own] = _ends(*alike[kind], duration_us, own)
        first, last = known
        mine = varint(number)
        parts = [_ID, mine, first] if number else [first]
        if len(after) == 1:
            before = previous if after[0] == number - 1 else varint(after[0])
            parts += (_AFTER, _BYTE[len(before)], before)
        elif after:
            ids = b"".join([varint(before) for before in after])
            parts += (_AFTER, varint(len(ids)), ids)
        if start_us:
            parts += (_START, varint(start_us))
        parts.append(last)
        data = b"".join(parts)
        yield varint(len(data)) + data
        previous = mine


def _ends(
    first: bytes, shared: bytes, names: list[bytes], duration_us: int, own: tuple[int | float, ...]
) -> tuple[bytes, bytes]:
    """What nodes that last as long and have the same own attributes begin with, and end with."""
    parts = [_DURATION, varint(duration_us)] if duration_us else []
    parts.append(shared)
    for name, value in zip(names, own, strict=True):
        if value.__class__ is float:
            parts += (name, _DOUBLE(value))
        else:
            coded = varint(value)  # type: ignore[arg-type]
            parts += (_ATTRIBUTE, varint(len(name) + len(coded)), name, coded)
    return first, b"".join(parts)


# Ends of nodes that are kept at most.
MOST_ENDS = 1 << 16
_BYTE = [bytes((number,)) for number in range(11)]
# Fields of a node by number and how they lie on the wire, as the messages below write them.
_ID, _AFTER, _START, _DURATION, _ATTRIBUTE = b"\x08", b"\x2a", b"\x30", b"\x38", b"\x52"
_DOUBLE = struct.Struct("<d").pack


def _encoded(kind: NodeKind) -> tuple[bytes, bytes, list[bytes]]:
    """The bytes of name and type, of the attributes, and what comes before each value of a node's own."""
    message = _messages()["Node"]
    attributes = message()
    _add(attributes, kind.attributes)
    first: bytes = message(name=kind.name, type=int(kind.type)).SerializeToString()
    return first, attributes.SerializeToString(), [_around(name) for name in kind.own]


def _around(name: str) -> bytes:
    """What comes before the value of a node's own attribute; of one whose length is known with that."""
    before: bytes = _messages()["AttributeProto"](name=name).SerializeToString()
    kind = _TYPES.get(name, "int64")
    before += varint(_VALUE_FIELDS[kind] << 3 | (kind == "double"))
    return _ATTRIBUTE + varint(len(before) + 8) + before if kind == "double" else before


def _add(message: Any, attributes: Mapping[str, Value]) -> None:
    for name, value in attributes.items():
        match value:
            case bool():
                kind = "bool"
            case int():
                kind = _TYPES.get(name, "int64")
            case float():
                kind = "double"
            case str():
                kind = "string"
        message.attr.add(name=name, **{f"{kind}_val": value})


@lru_cache(maxsize=1)
def _messages() -> dict[str, Any]:
    """The schema's messages, with the fields that are written."""
    from google.protobuf import descriptor_pb2, message_factory

    proto = descriptor_pb2.FileDescriptorProto(name="wattline/et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    attribute = proto.message_type.add(name="AttributeProto")
    attribute.field.add(name="name", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    attribute.oneof_decl.add(name="value")
    for kind, number in _VALUE_FIELDS.items():
        attribute.field.add(
            name=f"{kind}_val", number=number, type=f"TYPE_{kind.upper()}", label="LABEL_OPTIONAL", oneof_index=0
        )
    metadata = proto.message_type.add(name="GlobalMetadata")
    metadata.field.add(name="version", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    node = proto.message_type.add(name="Node")
    for number, (name, kind) in {
        1: ("id", "UINT64"),
        2: ("name", "STRING"),
        3: ("type", "INT32"),  # an enumeration: the same on the wire
        6: ("start_time_micros", "UINT64"),
        7: ("duration_micros", "UINT64"),
    }.items():
        node.field.add(name=name, number=number, type=f"TYPE_{kind}", label="LABEL_OPTIONAL")
    node.field.add(name="data_deps", number=5, type="TYPE_UINT64", label="LABEL_REPEATED")
    for message, number in ((metadata, 2), (node, 10)):
        message.field.add(
            name="attr",
            number=number,
            type="TYPE_MESSAGE",
            label="LABEL_REPEATED",
            type_name=".ChakraProtoMsg.AttributeProto",
        )
    found = message_factory.GetMessages([proto])
    return {name.removeprefix("ChakraProtoMsg."): message for name, message in found.items()}
