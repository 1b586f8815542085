"""A machine whose clock is set by hand: what a round costs there is a formula of the test."""


class Machine:
    """Stands in for `specattn.decoding.text.statistics.Clock`.

    A moment has passed once `late` others have been noted behind it, as on a device that the host
    does not wait for.
    """

    def __init__(self, late=0):
        self.time, self.moments, self.late = 0.0, [], late

    def now(self):
        self.moments.append(self.time)
        return len(self.moments) - 1

    def passed(self, moment):
        return moment + self.late < len(self.moments)

    def seconds(self, begin, end):
        return self.moments[end] - self.moments[begin]
