"""Launches that start before the ones before them have ended (programmatic dependent launch).

Until ``griddepcontrol.wait`` a thread may read what the launch calls constant, and write nothing:
all else may still be written, or read, by a launch before.
"""

import numpy as np

from .faults import Fault


class Dependencies:
    """Which threads of a wave have waited.

    Nobody needs to in a kernel that has no wait, if it is not said to be launched early.
    """

    def __init__(self, machine):
        names = [instruction.name for instruction in machine.kernel.instructions]
        waits = any(name.startswith("griddepcontrol.wait") for name in names)
        self.matters = waits or machine.launch.early
        self.waited = np.zeros(machine.count, bool)
        memory, keys = machine.memory, machine.launch.constants
        self.constants = [(memory.address(key), memory.where[key][1]) for key in keys]

    def check(self, address, size, active, *, write):
        """Fail on accesses of threads to global memory that come too early."""
        if self.matters:
            early = ~self.waited if active is None else active & ~self.waited
            self._refuse(address, size, early, write)

    def check_copy(self, thread, address, size, *, write):
        """Fail on a bulk copy of one thread that is issued too early."""
        if self.matters and not self.waited[thread]:
            self._refuse(address, size, np.ones(len(address), bool), write)

    def _refuse(self, address, size, early, write):
        if not write:
            for first, length in self.constants:
                early = early & ~((address >= first) & (address + size <= first + length))
        if early.any():
            place = int(np.broadcast_to(address, early.shape)[early][0])
            access = "write" if write else "read"
            raise Fault("dependency", f"{access} at {place:#x} before griddepcontrol.wait")


def control(instruction, machine):
    """griddepcontrol: what launches before have written is there, or the next one may start."""
    if "wait" not in instruction.parts:
        return lambda mask, active: None

    def run(mask, active):
        machine.dependencies.waited |= machine.running(active)

    return run


INSTRUCTIONS = {"griddepcontrol": control}
