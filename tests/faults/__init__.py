"""Faults put into real workers, and what comes of them: `make faults`."""
