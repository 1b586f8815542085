"""Bulk copies of the asynchronous proxy (TMA); to come."""


class Copies:
    """Bulk copies under way."""

    def __init__(self, machine):
        self.machine, self.pending = machine, []

    def land_one(self):
        """Land the oldest copy; False if there is none."""
        return False


INSTRUCTIONS = {}
