"""Stand-ins for a card's copy stream that bracket what it may do.

`Late` copies as late as order allows, `Early` as soon as it is asked. Both check each copy against
the uses of its slot, and overwrite a slot with NaN as soon as its unit is done, so that a missing
dependency fails or shows in the result.
"""

from sdx_accel.runtime.copies import HostCopies


class _Event:
    """Recorded again and again, as a card's: `token` is the newest recording, None before."""

    def __init__(self):
        self.token = None
        self.target = None


class _Queue(HostCopies):
    """A copy stream, first in, first out, that checks the order which it is given."""

    def __init__(self):
        self.allocated = 0
        self.copied = []
        self._waiting = []
        # (slot, token of the mark that ends its use) of all uses
        self._uses = []
        self._in_use = None

    def allocate(self, n_bytes):
        self.allocated += 1
        # NaN in every float format
        return super().allocate(n_bytes).fill_(255)

    def event(self):
        return _Event()

    def copy(self, target, source, after, done):
        assert target.numel() == source.numel()
        known = {event.token for event in after}
        for slot, token in self._uses:
            assert token in known or not _overlap(slot, target), "a slot is overwritten in use"
        assert self._in_use is None or not _overlap(self._in_use, target)
        done.token, done.target = object(), target
        self._waiting.append((target, source, done.token))

    def _run_one(self):
        target, source, _ = self._waiting.pop(0)
        target.copy_(source)
        self.copied.append(source.data_ptr())

    def wait(self, event):
        while event.token in {token for _, _, token in self._waiting}:
            self._run_one()
        self._in_use = event.target

    def mark(self, event):
        self._uses = [use for use in self._uses if use[1] is not event.token]
        event.token = object()
        if self._in_use is not None:
            self._uses.append((self._in_use, event.token))
            self._in_use.fill_(255)
        self._in_use = None

    def drain(self):
        while self._waiting:
            self._run_one()
        self._uses = []
        self._in_use = None


def _overlap(a, b):
    return a.data_ptr() < b.data_ptr() + b.numel() and b.data_ptr() < a.data_ptr() + a.numel()


class Late(_Queue):
    """Copies only when the computation waits."""


class Early(_Queue):
    """Copies as soon as it is asked to."""

    def copy(self, target, source, after, done):
        super().copy(target, source, after, done)
        while self._waiting:
            self._run_one()
