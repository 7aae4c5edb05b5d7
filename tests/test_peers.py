"""The page of peers is what its command writes, and says what it should."""

from __future__ import annotations

from pathlib import Path

from sim.studies.peers import GPUS, PEERS, WORKS, main


def test_the_page_in_the_docs_is_the_commands(tmp_path: Path) -> None:
    out = tmp_path / "peers.md"
    assert main(["--out", str(out)]) == 0
    assert out.read_text() == (Path(__file__).parents[1] / "docs" / "peers.md").read_text()


def test_every_peer_has_a_gpu_and_a_figure_for_most_works() -> None:
    for peer in PEERS:
        assert peer.gpu in GPUS
        assert len(peer.ms) == len(WORKS)
        assert sum(value is not None for value in peer.ms) >= 2
