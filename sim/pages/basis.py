"""What every report says about where its numbers come from."""

from __future__ import annotations

from hardware.profile import Profile
from sim.pages.page import Section, TextTable
from sim.scenario.field_table import FieldTable
from sim.scenario.machine import Machine


def profile_rows(profile: Profile) -> list[list[str]]:
    """Which profile, fitted by what on what."""
    made = profile.provenance
    return [
        ["profile", profile.gpu if profile.status == "calibrated" else f"of {profile.basis}, scaled to {profile.gpu}"],
        ["fitted by", f"{made.command} ({made.date})" if made.date else made.command],
        ["fitted on", f"{len(made.files)} files of measurements, listed below"],
    ]


def details(machine: Machine, scenario: FieldTable) -> list[Section]:
    """Folded sections: the files behind the profile, every field of the scenario, the datasheet with its sources."""
    gpu, files = machine.gpu, machine.profile.provenance.files
    given = scenario.model_fields_set
    fields = [
        [name, "-" if value is None else str(value), "given" if name in given else "default"]
        for name, value in scenario.model_dump(mode="json").items()
    ]
    sheet = [
        [name, value if isinstance(value, str) else f"{value:,g}", confidence, source]
        for name, value, confidence, source in gpu.sheet
    ]
    digests = [[name, digest[:16]] for name, digest in files.items()]
    head = ["figure", "value (SI)", "confidence", "source"]
    return [
        Section(
            title="The measurements that the profile was fitted on",
            table=TextTable(head=["file", "SHA-256"], rows=digests, words=(0, 1)),
            folded=True,
        ),
        Section(
            title="Every field of the scenario",
            table=TextTable(head=["field", "value", ""], rows=fields, words=(0, 1, 2)),
            folded=True,
        ),
        Section(
            title=f"The datasheet of {gpu.name}, with sources",
            table=TextTable(head=head, rows=sheet, words=(0, 2, 3), minor=(2,)),
            folded=True,
        ),
    ]
