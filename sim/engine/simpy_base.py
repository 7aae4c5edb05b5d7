"""The classes of SimPy that the engine's environment, events and resources extend.

A compiled engine has classes of its own in this place, :mod:`sim.engine.native_base`: see docs/compiled.md.
"""

from simpy.core import Environment
from simpy.events import Event
from simpy.resources.base import BaseResource, Get, Put

__all__ = ["BaseResource", "Environment", "Event", "Get", "Put"]
