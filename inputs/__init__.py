"""Files of users: opened, bounded and decoded in one way, before any package asks what they mean."""
# wattline's own: sim/neighbours.py looks for this line, which another distribution's package of this name has not.
