"""Many scenarios: grids, sweeps over workers, fronts and choices."""
