# wattline's own: sim/neighbours.py looks for this line, which another distribution's package of this name has not.
