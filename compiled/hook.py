"""Hatch's build hook of the compiled engine, off unless asked for: see docs/compiled.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledEngine(BuildHookInterface[Any]):
    """Adds the shared libraries to the wheel, beside the modules that they are compiled from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is packed; an editable install stays pure Python, whose modules change."""
        if version == "editable":
            self.app.display_warning("an editable install of wattline is not compiled: its modules may change")
            return
        self._folder = tempfile.TemporaryDirectory()
        into = Path(self._folder.name)
        subprocess.run([sys.executable, str(Path(self.root, "compiled/build.py")), "--into", str(into)], check=True)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in into.rglob("*"):
            if path.is_file():
                build_data["force_include"][str(path)] = path.relative_to(into).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the shared libraries once the wheel holds them."""
        if version != "editable":
            self._folder.cleanup()
