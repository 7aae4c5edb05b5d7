"""Requests of a file: CSV or JSON lines in the formats of published traces."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from inputs.files import read_lines
from inputs.texts import parse_json, shown, truncated
from sim.errors import ScenarioError
from sim.serving.requests import (
    HASHES_LIMIT,
    MOONCAKE_BLOCK_TOKENS,
    PRIORITY_LIMIT,
    REQUESTS_LIMIT,
    TIME_LIMIT_S,
    TOKENS_LIMIT,
    Request,
    Traffic,
)

DATE = re.compile(
    r"(?P<whole>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(?P<part>\d+))?(?P<zone>Z|[+-]\d\d:?\d\d)?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Columns of one kind of file: arrivals (``per_s`` of them a second; None: dates), tokens in, tokens out.

    ``mark``: a column that tells it from another format of the same columns; a hash is of ``block_tokens``.
    """

    name: str
    arrival: str
    inputs: str
    outputs: str
    per_s: int | None = 1
    mark: str = ""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has its columns."""
        return {self.arrival, self.inputs, self.outputs, *filter(None, [self.mark])} <= row.keys()

    @property
    def columns(self) -> str:
        """The columns, for messages."""
        return f"{self.arrival}, {self.inputs}, {self.outputs}"

    @property
    def tick_s(self) -> float:
        """Seconds of one unit of a time that was read."""
        return 1e-9 if self.per_s is None else 1.0


FORMATS = (
    Format(name="wattline", arrival="arrival_s", inputs="input_tokens", outputs="output_tokens"),
    # Azure LLM inference traces 2023 and 2024 (CC-BY 4.0)
    Format(name="Azure", arrival="TIMESTAMP", inputs="ContextTokens", outputs="GeneratedTokens", per_s=None),
    # BurstGPT (arXiv 2401.17644): a failed request has no response tokens
    Format(name="BurstGPT", arrival="Timestamp", inputs="Request tokens", outputs="Response tokens"),
    # Vidur (arXiv 2405.05465), data/processed_traces
    Format(name="Vidur", arrival="arrived_at", inputs="num_prefill_tokens", outputs="num_decode_tokens"),
    # Splitwise (arXiv 2311.18677), splitwise-sim
    Format(name="Splitwise", arrival="arrival_timestamp", inputs="prompt_size", outputs="token_size"),
    # Qwen Bailian usage traces (alibaba-edu): as Mooncake's, but seconds, and blocks of 16 tokens
    Format(
        name="Bailian",
        arrival="timestamp",
        inputs="input_length",
        outputs="output_length",
        mark="chat_id",
        block_tokens=16,
    ),
    # Mooncake (arXiv 2407.00079)
    Format(name="Mooncake", arrival="timestamp", inputs="input_length", outputs="output_length", per_s=1000),
)


def read_traffic(path: Path, *, limit: int | None = None, block_tokens: int | None = None) -> Traffic:
    """Requests of a file in order of arrival, the first at 0 s: CSV or JSON lines, gzip or not, by content.

    The columns are those of one of ``FORMATS``; ``priority``, ``adapter`` (a name; empty: none), ``images``, and
    ``image_width`` and ``image_height`` (pixels of each) may stand beside them, and in JSON lines ``hash_ids``, each
    for ``block_tokens`` of the prompt (None: the format's). A request that got no output token is left out and counted,
    whatever the format: it failed, and how much work it was is not recorded. Raises :class:`ScenarioError` with line
    and column.
    """
    times: list[float] = []
    inputs, outputs, priorities, asked = array("q"), array("q"), array("q"), array("q")
    adapters: dict[str, int] = {}
    pictures: list[tuple[int, tuple[int, int] | None]] = []
    prefixes: dict[int, array[int]] = {}
    named = False
    unanswered = hashes = 0
    for where, row, kind in _rows(path):
        at = _time(row, kind, where)
        tokens, wanted = (
            _whole(row, name, where, least=least) for name, least in ((kind.inputs, 1), (kind.outputs, 0))
        )
        priority = (
            _whole(row, "priority", where, least=-PRIORITY_LIMIT, most=PRIORITY_LIMIT) if "priority" in row else 0
        )
        prefix = _prefix(row, where, most=-(-tokens // (block_tokens or kind.block_tokens)))
        if wanted == 0:
            unanswered += 1
            continue
        if prefix:
            prefixes[len(inputs)] = prefix
            hashes += len(prefix)
        times.append(at)
        inputs.append(tokens)
        outputs.append(wanted)
        priorities.append(priority)
        name = _adapter(row, where)
        named = named or "adapter" in row
        pictures.append(_images(row, where))
        asked.append(adapters.setdefault(name, len(adapters)) if name else -1)
        if len(inputs) > REQUESTS_LIMIT or hashes > HASHES_LIMIT:
            raise ScenarioError(
                f"{path}: more than {REQUESTS_LIMIT:,} requests or {HASHES_LIMIT:,} hashes: give a part of the file"
            )
    if not inputs:
        raise ScenarioError(f"{path}: holds no request" + (" with an output token" if unanswered else ""))
    order = sorted(range(len(times)), key=times.__getitem__)[:limit]
    first = times[order[0]]
    requests = [
        Request(
            number=number, arrival_s=(times[i] - first) * kind.tick_s, input_tokens=inputs[i], output_tokens=outputs[i],
            prefix=tuple(prefixes.get(i, ())), block_tokens=block_tokens or kind.block_tokens, priority=priorities[i],
            adapter=asked[i], images=pictures[i][0], image_size=pictures[i][1],
        )
        for number, i in enumerate(order)
    ]  # fmt: skip
    return Traffic(requests=requests, unanswered=unanswered, adapters=tuple(adapters) if named else None)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any], Format]]:
    """Each row of a file: where it stands, its cells by column, and the format that the first row shows."""
    lines = read_lines(path, "requests", ScenarioError)
    first = next(lines, None)
    if first is None:
        raise ScenarioError(f"{path}: holds no request")
    lines = chain([first], lines)
    rows = _objects(path, lines) if first[1].lstrip().startswith(("{", "[")) else _cells(path, lines)
    kind: Format | None = None
    for where, row in rows:
        if kind is None:
            kind = _format(path, row)
            _check_spellings(path, row)
        yield where, row, kind


def _objects(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in lines:
        where = f"{path}, line {number}"
        row = parse_json(line, where, ScenarioError, one_line=True)
        if isinstance(row, list) and row and isinstance(row[0], dict):
            row = row[0]  # a list of objects is no JSON lines: the error names what they hold
            _refuse_texts(path, row)
            _format(path, row)
            raise ScenarioError(f"{path}: a JSON list: give one object a line (.jsonl)")
        if not isinstance(row, dict):
            raise ScenarioError(f"{where}: {shown(row)}: a request is an object, one a line")
        _refuse_texts(path, row)
        yield where, row


# What may stand beside the columns of a format.
SIDES = ("image_width", "image_height")
BESIDE = ("priority", "adapter", "images", *SIDES, "hash_ids")

# Conversations as text: ShareGPT, LMSYS and WildChat, OpenAI's batches, vLLM's custom prompts.
TEXTS = ("conversations", "conversation", "messages", "prompt", "body")


def _refuse_texts(path: Path, row: Mapping[str, Any]) -> None:
    if any(kind.fits(row) for kind in FORMATS):
        return
    if (texts := next((name for name in TEXTS if isinstance(row.get(name), list | str | dict)), None)) is not None:
        raise ScenarioError(
            f"{path}: {texts} as text (ShareGPT, LMSYS, WildChat) hold neither times nor token counts: count tokens "
            f"with the model's tokenizer, and give columns {FORMATS[0].columns}"
        )


def _cells(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    place = [1]

    def texts() -> Iterator[str]:
        for place[0], line in lines:
            yield line + "\n"

    table = csv.reader(texts())
    try:
        names = [name.strip() for name in next(table)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ScenarioError(f"{path}: two columns are called {shown(twice[0])}")
        _format(path, dict.fromkeys(names))
        for cells in table:
            if len(cells) != len(names):
                raise ScenarioError(f"{path}, line {place[0]}: {len(cells)} cells, the header has {len(names)}")
            yield f"{path}, line {place[0]}", dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise ScenarioError(f"{path}, line {place[0]}: not a table of requests: {error}") from None


def _format(path: Path, row: Mapping[str, Any]) -> Format:
    for kind in FORMATS:
        if kind.fits(row):
            return kind
    near = max(FORMATS, key=lambda kind: len({kind.arrival, kind.inputs, kind.outputs} & row.keys()))
    missing = [name for name in (near.arrival, near.inputs, near.outputs) if name not in row]
    found = truncated(", ".join(map(str, row)), 60)
    if len(missing) < 3:
        raise ScenarioError(f"{path}: columns {found}: {near.name} requests need {', '.join(missing)} too")
    plain, second, *others = FORMATS
    also = f"{second.name}: {second.columns}; or those of {', '.join(dict.fromkeys(kind.name for kind in others))}"
    raise ScenarioError(f"{path}: columns {found}: need {plain.columns} ({also})")


def _check_spellings(path: Path, row: Mapping[str, Any]) -> None:
    """Raise where a column is called nearly as one that may stand there, which is not read under that name."""
    for name in row:
        meant = {_plain(other): other for other in BESIDE}.get(_plain(name))
        if meant is not None and name not in BESIDE:
            raise ScenarioError(f"{path}: column {shown(name)}: is not read under that name: call it {meant}")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_").rstrip("s")


def _time(row: Mapping[str, Any], kind: Format, where: str) -> float:
    """Arrival: seconds, or of a format of dates whole nanoseconds."""
    value = row.get(kind.arrival)
    if kind.per_s is None:
        found = DATE.fullmatch(value.strip()) if isinstance(value, str) else None
        try:
            if found is not None:
                moment = datetime.fromisoformat(found["whole"] + (found["zone"] or "+00:00"))
                return int(moment.timestamp()) * 10**9 + int((found["part"] or "").ljust(9, "0")[:9])
        except ValueError:
            pass  # the 31st of February
        raise ScenarioError(f"{where}: {kind.arrival} = {_shown(value)}: give a time like 2023-11-16 18:17:03.5")
    number = _number(value)
    if number is None or not 0 <= number <= TIME_LIMIT_S * kind.per_s:
        raise ScenarioError(
            f"{where}: {kind.arrival} = {_shown(value)}: give a time of at least 0 and at most "
            f"{TIME_LIMIT_S * kind.per_s:.0e}"
        )
    return number / kind.per_s


def _whole(row: Mapping[str, Any], name: str, where: str, *, least: int, most: int = TOKENS_LIMIT) -> int:
    number = _number(row.get(name))
    if number is None or number != int(number) or not least <= number <= most:
        right = "a whole number" if least < 0 else "a positive number of tokens"
        if least == 0:
            right += ", or 0 for a request that failed"
        raise ScenarioError(f"{where}: {name} = {_shown(row.get(name))}: give {right} (at most {most:,})")
    return int(number)


def _prefix(row: Mapping[str, Any], where: str, *, most: int) -> array[int] | None:
    """Hashes of the blocks of a prompt, which has ``most`` of them."""
    hashes = row.get("hash_ids")
    if hashes is None or isinstance(hashes, str):  # a cell of a CSV
        return None
    if not isinstance(hashes, list) or not all(type(digest) is int for digest in hashes):
        raise ScenarioError(f"{where}: hash_ids = {shown(hashes)}: give a list of whole numbers, one a block")
    if len(hashes) > most:
        raise ScenarioError(
            f"{where}: hash_ids: {len(hashes)} hashes for a prompt of {most} blocks: say how many tokens a hash stands "
            "for (--trace-block-tokens)"
        )
    return array("q", hashes)


def _images(row: Mapping[str, Any], where: str) -> tuple[int, tuple[int, int] | None]:
    """How many images a request has, and the pixels of each, if they are said."""
    if row.get("images") in (None, ""):
        for name in SIDES:
            if row.get(name) not in (None, ""):
                raise ScenarioError(f"{where}: {name} = {_shown(row[name])}: is of images: say in images how many")
        return 0, None
    count = _count(row, "images", where, least=0, most=4096)
    if not count or not any(name in row for name in SIDES):
        return count, None
    width, height = (_count(row, name, where, least=1, most=65_536) for name in SIDES)
    return count, (width, height)


def _count(row: Mapping[str, Any], name: str, where: str, *, least: int, most: int) -> int:
    number = _number(row.get(name))
    if number is None or number != int(number) or not least <= number <= most:
        raise ScenarioError(f"{where}: {name} = {_shown(row.get(name))}: give a whole number from {least} to {most:,}")
    return int(number)


def _adapter(row: Mapping[str, Any], where: str) -> str:
    """The adapter that a request asks for; empty: none."""
    name = row.get("adapter")
    if name is None or isinstance(name, str):
        return (name or "").strip()
    if type(name) is int:
        return str(name)
    raise ScenarioError(f"{where}: adapter = {shown(name)}: give an adapter's name, or nothing")


def _number(value: Any) -> float | None:
    """A finite number of a cell or JSON value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    """A cell as it was written, another value as Python writes it."""
    return truncated(value, 60) if isinstance(value, str) and value else shown(value)
