"""Overlap operator by operator: which products and stages can be cut, and the best setting of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import workloads
from hardware.errors import HardwareError
from sim.errors import ScenarioError
from sim.result.timeline import Timeline
from sim.run.runner import simulate
from sim.scenario.layout import layout_of
from sim.scenario.operators import setting, spelled
from sim.scenario.spec import Scenario
from workloads.families.nodes import placed_nodes
from workloads.kernel_names import CollectiveOp
from workloads.layer_passes.overlap import Stage, overlap
from workloads.layer_passes.schedule import Schedule
from workloads.layer_passes.tree import Exchange, Placed, RankSplit
from workloads.ops import WIDE, Gemm, Overlap, Pointwise

Settings = Mapping[str, Overlap]
Objective = Callable[[Timeline], float]
REFUSALS = (ScenarioError, workloads.WorkloadError, HardwareError)
STAGE = 1  # of the products that are cut together: a layer has one such run of neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Products that a collective feeds or ends, and neighbours that one stage can hold."""

    products: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]


def own_settings(scenario: Scenario) -> dict[str, Overlap]:
    """Products whose nodes say how they overlap, each in sequence: what a run says of an operator goes before that."""
    blocks = workloads.load_model(scenario.model).blocks if scenario.tp > 1 else ()
    nodes = (node for block in blocks for node in block.nodes)
    return {node.name: Overlap(chunks=1) for node in nodes if isinstance(node, Gemm) and node.overlap is not None}


def in_sequence(scenario: Scenario) -> bool:
    """Whether nothing runs beside anything."""
    said = {name: setting(text) for name, text in scenario.overlap_ops or ()}
    if scenario.overlap != "chunks" or scenario.overlap_chunks > 1 or any(one.chunks > 1 for one in said.values()):
        return False
    return all(name in said for name in own_settings(scenario))


def sequential_fields(scenario: Scenario) -> dict[str, Any]:
    """The fields of ``scenario`` in sequence, whatever its model's operators say."""
    return {
        "overlap": "chunks",
        "overlap_chunks": 1,
        "sm_margin": False,
        "overlap_ops": {name: one.chunks for name, one in own_settings(scenario).items()} or None,
    }


def choices_of(scenario: Scenario) -> Choices:
    """What the overlap pass can cut of the model's layers in the scenario's layout."""
    model, split = workloads.load_model(scenario.model), RankSplit.of(layout_of(scenario))
    products: dict[str, None] = {}
    stages: dict[tuple[str, ...], None] = {}
    for _, block, _ in model.layer_groups(range(scenario.layers or model.layers)):
        nodes = tuple(
            replace(one, overlap=None) if isinstance(one, Gemm) else one for one in placed_nodes(block, split)
        )
        stages |= dict.fromkeys(_neighbours(nodes))
        cut = (step for step in overlap(nodes, lambda _: Schedule(pieces=2)) if isinstance(step, Stage))
        products |= dict.fromkeys(step.nodes[0].name for step in cut)
    return Choices(products=tuple(products), stages=tuple(stages))


def _neighbours(nodes: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Two products with nothing between but what works on each element, the second ended by a sum."""
    first: Gemm | None = None
    for node, after in zip(nodes, (*nodes[1:], None), strict=True):
        match node:
            case Gemm():
                summed = isinstance(after, Exchange) and after.op is not CollectiveOp.ALL_GATHER
                if first is not None and summed:
                    yield first.name, node.name
                first = node
            case Pointwise() if node.op in WIDE:
                pass
            case _:
                first = None


@dataclass(slots=True)
class Search:
    """Settings of operators, tried from one for all; what cannot run (uneven pieces) is no candidate."""

    start: Scenario  # the best setting for all
    settings: tuple[Overlap, ...]
    step: Callable[[], None]
    known: dict[tuple[tuple[str, str], ...], Timeline | None] = field(default_factory=dict)

    @property
    def for_all(self) -> Overlap:
        return Overlap(chunks=self.start.overlap_chunks, comm_ctas=self.start.comm_ctas)

    def run(self, settings: Settings) -> Timeline | None:
        """The step with ``settings``, simulated once."""
        key = tuple(sorted((name, spelled(one)) for name, one in settings.items()))
        if key not in self.known:
            plain = {"overlap_chunks": 1, "sm_margin": False, "overlap_ops": key}
            fields = self.start.model_dump() | plain
            try:
                self.known[key] = simulate(Scenario.parse(fields, where="overlap study"), shortcuts=True)
            except REFUSALS:
                self.known[key] = None
            self.step()
        return self.known[key]

    def best(self, objective: Objective) -> Timeline:
        """Each operator's settings alone, the two best of each combined, one operator after the other, until no change
        of a single one helps."""
        choices = choices_of(self.start)
        start = own_settings(self.start) | dict.fromkeys(choices.products, self.for_all)
        moves: list[tuple[tuple[str, ...], list[Overlap]]] = []
        for names in (*((one,) for one in choices.products), *choices.stages):
            stage = STAGE if len(names) > 1 else None
            found = [replace(one, stage=stage) for one in self.settings if one.chunks > 1 or stage is None]
            made = ((self.run(_moved(start, names, one)), i) for i, one in enumerate(found))
            ranked = sorted((objective(run), i) for run, i in made if run is not None)
            moves.append((names, [found[i] for _, i in ranked[:2]]))
        now, best = start, self.run(start) or simulate(self.start, shortcuts=True)
        improved = True
        while improved:
            improved = False
            for names, found in moves:
                for one in found:
                    move = _moved(now, names, one)
                    tried = self.run(move)
                    if tried is not None and objective(tried) < objective(best) * (1.0 - 1e-9):
                        now, best, improved = move, tried, True
        return best


def _moved(now: Settings, names: tuple[str, ...], one: Overlap) -> dict[str, Overlap]:
    """``now`` with ``names`` set to ``one``; who shared a stage with one of them is on its own again."""
    stages = {now[name].stage for name in names if name in now} - {None}
    made = {name: replace(was, stage=None) if was.stage in stages else was for name, was in now.items()}
    return made | dict.fromkeys(names, one)


def flag(scenario: Scenario) -> str:
    """The settings of single operators, as ``--overlap-ops`` takes them."""
    return ",".join(f"{name}={text}" for name, text in scenario.overlap_ops or ())


def flags(scenario: Scenario) -> str:
    """What runs ``scenario``'s operators so: products are cut along tokens where ranks hold slices of these.

    >>> flags(Scenario.of(model="llama3-8b", tp=2, sequence_parallel=True, overlap_ops="down_gemm=4x8"))
    '--sequence-parallel --overlap-ops down_gemm=4x8'
    """
    return f"{'--sequence-parallel ' if scenario.sequence_parallel else ''}--overlap-ops {flag(scenario)}"


def words(scenario: Scenario) -> str:
    """The settings of single operators, as a user would say them.

    >>> words(Scenario.of(model="llama3-8b", tp=2, overlap_ops="down_gemm=4x8"))
    'down_gemm 4 chunks on 8 CTAs'
    """
    parts = []
    for name, text in scenario.overlap_ops or ():
        one = setting(text)
        chunks = "sequential" if one.chunks == 1 else f"{one.chunks} chunks"
        ctas = "" if one.comm_ctas is None else f" on {one.comm_ctas} CTAs"
        parts.append(f"{name} {chunks}{ctas}" + ("" if one.stage is None else f" in stage {one.stage}"))
    return ", ".join(parts) or "all sequential"
