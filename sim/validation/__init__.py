"""Measured records: taken, predicted, compared."""
