"""What is asked: the scenario, its layout, machine, memory and kind, resolved and checked."""
