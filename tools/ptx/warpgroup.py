"""wgmma: asynchronous products of warpgroups, with operands that shared memory holds in tiles.

A product that has been issued owns its accumulator registers until the wait that covers it: they
are undefined for everything else. Its operands in shared memory are read at issue or at the wait
(`Options.copies`), so whoever overwrites them too early shows in the result, and in `Order`.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from .faults import Fault, Unsupported
from .floats import SHORT, to_tf32
from .matrices import Fragments, fragments_c, product, tile_a, tile_c
from .operands import vector

SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # by the descriptor's last two bits; 16: none


@dataclass(frozen=True)
class Descriptor:
    """A shared memory descriptor of wgmma, in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def of(cls, bits):
        """Take a descriptor's 64 bits apart."""
        bits = int(bits)
        if bits >> 49 & 7:
            raise Unsupported("a wgmma descriptor with a base offset")
        fields = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(*fields, SWIZZLE_BYTES[bits >> 62 & 3])

    def addresses(self, rows, columns, size, transposed):
        """Return the address of every element [rows, columns] of ``size`` bytes.

        Rows are M or N, columns K. Canonical layouts, ``transposed`` with M or N contiguous: atoms
        of 8 lines, as long as the swizzle, repeat by the leading and the stride byte offset.
        """
        i, j = np.arange(rows)[:, None], np.arange(columns)[None]
        width = self.swizzle // size  # elements of a line of an atom
        if transposed:
            if self.swizzle == 16:
                raise Unsupported("a transposed wgmma operand without swizzle")
            along, line, inside = i // width * self.leading, j, i % width
        elif self.swizzle == 16:
            along, line, inside = j // width * self.leading, i, j % width
        else:
            along, line, inside = 0, i, j
        flat = (
            self.start + along + line // 8 * self.stride + line % 8 * self.swizzle + inside * size
        )
        return flat ^ (flat >> 3 & (self.swizzle - 16))


@dataclass
class Product:
    """An issued wgmma: the warpgroups that issued it and what it still has to do."""

    operation: object
    groups: np.ndarray  # warpgroups of the wave, bool
    inputs: dict  # what it read at issue: descriptors, registers
    granules: list  # per warpgroup: (its warps, granules it reads)
    targets: list  # registers of the accumulator, by number
    sources: list  # [(register of the left operand, its values at issue)]

    def part(self, groups):
        """Return the same product for some of its warpgroups."""
        groups = self.groups & groups
        granules = [pair for pair in self.granules if groups[pair[0][0] // 4]]
        return replace(self, groups=groups, granules=granules)


@dataclass
class Accumulator:
    """A register that products own in some threads: its value in the chain of products."""

    value: np.ndarray
    undefined: np.ndarray | None
    owned: np.ndarray

    def take(self, value, undefined, threads):
        """Replace the value in some threads."""
        if self.undefined is not None or undefined is not None:
            nothing = np.zeros(len(threads), np.uint32)
            new, old = (nothing if x is None else x for x in (undefined, self.undefined))
            bits = np.where(threads, new, old)
            self.undefined = bits if bits.any() else None
        self.value = np.where(threads, value.view(np.uint32), self.value.view(np.uint32))


class Products:
    """Products under way, and the accumulators that they own."""

    def __init__(self, machine):
        self.machine = machine
        self.open, self.groups = [], []  # products; (number, warpgroups, products) as committed
        self.committed = np.zeros(machine.count // 128, int)  # groups so far, per warpgroup
        self.flying = {}  # register: Accumulator
        self.fenced = [None] * len(self.committed)  # registers at a warpgroup's last wgmma.fence

    def fence(self, groups):
        """Remember the registers as they are: products of the warpgroups may use these values."""
        values = list(self.machine.registers.values)
        for group in np.flatnonzero(groups):
            self.fenced[group] = values

    def check_fence(self, registers, groups):
        """Fail if a register changed since the last fence, unless products alone changed it."""
        fenced = [self.fenced[group] for group in np.flatnonzero(groups)]
        for values in {id(x): x for x in fenced}.values():
            if values is None:
                raise Fault("race", "no wgmma.fence stands before a warpgroup's first wgmma")
            threads = (groups & [x is values for x in self.fenced]).repeat(128)
            for register in registers:
                changed = threads
                if register in self.flying:
                    changed = threads & ~self.flying[register].owned
                then, now = values[register], self.machine.registers.values[register]
                if then is not now and (then != now)[changed].any():
                    raise Fault(
                        "race", "a register that wgmma uses changed after the last wgmma.fence"
                    )

    def issue(self, item):
        """Start a product; with ``Options.copies == "issue"`` its result exists at once."""
        registers = self.machine.registers
        self.open.append(item)
        threads = item.groups.repeat(128)
        nothing = np.zeros(self.machine.count, np.uint32)
        for register in item.targets:
            now = registers.values[register], registers.undefined[register]
            flying = self.flying.setdefault(register, Accumulator(*now, np.zeros_like(threads)))
            flying.take(*now, threads & ~flying.owned)
            flying.owned = flying.owned | threads
        if self.machine.options.copies == "issue":
            item.operation(item)
        for register in item.targets:  # whoever looks before the wait finds nothing
            registers.put(register, registers.values[register], ~nothing, threads)

    def commit(self, groups):
        """Close the group of warpgroups."""
        mine = [item.part(groups) for item in self.open]
        self.open = [item for item in (i.part(~groups) for i in self.open) if item.groups.any()]
        self.groups.append((self.committed.copy(), groups, mine))
        self.committed = self.committed + groups

    def wait(self, groups, allowed):
        """Finish all groups of products but the last ``allowed``."""
        waiting, self.groups = self.groups, []
        finished = []
        for number, owners, items in waiting:
            done = groups & owners & (self.committed - number > allowed)
            finished += [item.part(done) for item in items if (item.groups & done).any()]
            if (owners & ~done).any():
                self.groups.append((number, owners & ~done, [item.part(~done) for item in items]))
        for item in finished:
            if self.machine.options.copies == "wait":
                item.operation(item)
        for item in finished:
            self._check_sources(item)
            self._finish(item)

    def _check_sources(self, item):
        """Fail if registers that a product reads have changed before its wait."""
        threads = item.groups.repeat(128)
        for register, then in item.sources:
            now = self.machine.registers.values[register]
            if now is not then and (now != then)[threads].any():
                raise Fault("race", "a register that wgmma reads changed before its wait")

    def _finish(self, item):
        machine = self.machine
        left = self.open + [other for _, _, items in self.groups for other in items]
        held = [pair for other in left for pair in other.granules]
        for warps, granules in item.granules:
            still = [other for same, other in held if same[0] == warps[0]]
            machine.order.let_go(granules, warps, still)
        for register in item.targets:
            if register not in self.flying:
                continue  # an earlier product of the chain has delivered it
            busy = [other.groups for other in left if register in other.targets]
            threads = (
                item.groups & ~np.logical_or.reduce([np.zeros_like(item.groups), *busy])
            ).repeat(128)
            flying = self.flying[register]
            nothing = np.zeros(machine.count, np.uint32)
            bits = nothing if flying.undefined is None else flying.undefined
            machine.registers.put(register, flying.value.view(np.uint32), bits, threads)
            flying.owned = flying.owned & ~threads
            if not flying.owned.any():
                del self.flying[register]


def _groups(machine, active):
    machine.whole_warps(active)
    if machine.block_threads % 128:
        raise Fault("divergence", "wgmma needs whole warpgroups of 128 threads")
    if active is None:
        return np.ones(machine.count // 128, bool)
    some = active.reshape(-1, 128)
    if not some[some.any(1)].all():
        raise Fault("divergence", "not all warps of a warpgroup are here")
    return some.any(1)


def multiply(instruction, machine):
    """wgmma.mma_async with float32 accumulators."""
    match = re.search(r"\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)$", instruction.name)
    if not match or match[3] != match[4] or match[3] not in ("bf16", "f16", "tf32"):
        raise Unsupported(f"unknown instruction: {instruction}")
    columns, depth, kind = int(match[1]), int(match[2]), match[3]
    target, a, b, scale_d, *flags = instruction.operands
    flags = [int(flag, 0) for flag in flags]
    if flags[:2] != [1, 1]:
        raise Unsupported(f"negated operands: {instruction}")
    registers = machine.registers
    from_registers = a.startswith("{")
    a_fragments = Fragments(a, machine, kind) if from_registers else None
    transposed = [False] * (2 - len(flags[2:])) + [bool(flag) for flag in flags[2:]]
    targets = [registers.index[name] for name in vector(target)]
    sources = [registers.index[name] for name in vector(a)] if from_registers else []
    read_b = registers.reader(b, "u64")
    read_a = None if from_registers else registers.reader(a, "u64")
    accumulate = registers.reader(scale_d, "pred")
    size = 4 if kind == "tf32" else 2

    def elements(read, rows, is_transposed, groups, active):
        """Return where the operand of each warpgroup lies: addresses, granules."""
        bits, undefined = read()
        registers.decided(undefined, active, "a descriptor")
        bits = bits.reshape(-1, 128)
        found = {}
        for group in np.flatnonzero(groups):
            if (bits[group] != bits[group, 0]).any():
                raise Fault("divergence", "a wgmma descriptor differs within a warpgroup")
            place = Descriptor.of(bits[group, 0]).addresses(rows, depth, size, is_transposed)
            block = group * 128 // machine.block_threads
            index = machine.shared.locate(place, size, None, block)
            found[group] = index
        return found

    def operand(found, rows, groups):
        """Load an operand's tile of warpgroups: (values, undefined) [all warpgroups, rows, K]."""
        values = np.zeros((machine.count // 128, rows, depth), np.float32)
        shadow = np.zeros(values.shape, bool)
        for group in np.flatnonzero(groups):
            index = found[group]
            words, undefined = machine.shared.load(index.ravel(), size)
            words = words.reshape(index.shape)
            values[group] = to_tf32(words) if kind == "tf32" else SHORT[kind][0](words)
            if undefined is not None:
                shadow[group] = (undefined != 0).reshape(index.shape)
        return values, shadow if shadow.any() else None

    def compute(item):
        inputs, groups = item.inputs, machine.count // 128
        if from_registers:
            tile, shadow = inputs["a"]
            left = (
                tile.reshape(groups, 64, -1),
                None if shadow is None else shadow.reshape(groups, 64, -1),
            )
        else:
            left = operand(inputs["a"], 64, item.groups)
        flying = machine.products.flying
        before = None
        if inputs["accumulate"].any():
            pairs = [(flying[r].value, flying[r].undefined) for r in targets]
            before = _accumulator(pairs, inputs["accumulate"], machine)
        right = operand(inputs["b"], columns, item.groups)
        values, undefined = product(left, right, before, machine.options.cut)
        values = fragments_c(values.reshape(-1, 16, columns))
        shadows = [None] * len(targets)
        if undefined is not None:
            shadows = fragments_c(undefined.reshape(-1, 16, columns))
        nothing = np.zeros(machine.count, np.uint32)
        for register, value, shadow in zip(targets, values, shadows, strict=True):
            bits = None if shadow is None else np.where(shadow, ~nothing, nothing)
            flying[register].take(value, bits, item.groups.repeat(128))

    def run(mask, active):
        groups = _groups(machine, active)
        machine.products.check_fence(targets + sources, groups)
        use, undefined = accumulate()
        registers.decided(undefined, active, "scale-d")
        inputs = {"accumulate": use, "b": elements(read_b, columns, transposed[1], groups, active)}
        tiles = [inputs["b"]]
        if from_registers:
            values, shadow = a_fragments.read()
            inputs["a"] = tile_a(values), None if shadow is None else tile_a(shadow)
        else:
            inputs["a"] = elements(read_a, 64, transposed[0], groups, active)
            tiles.append(inputs["a"])
        read = [(register, registers.values[register]) for register in sources]
        item = Product(compute, groups, inputs, [], targets, read)
        for group in np.flatnonzero(groups):
            warps = range(4 * group, 4 * group + 4)
            for tile in tiles:
                granules = np.unique(tile[group] * size // machine.order.granule)
                machine.order.hold(granules, warps, instruction.index)
                item.granules.append((warps, granules))
        machine.products.issue(item)

    return run


def _accumulator(pairs, use, machine):
    """Return the accumulator before a product as a tile, zero where it is not used."""
    groups = machine.count // 128
    values = np.stack([np.where(use, v.view(np.float32), np.float32(0)) for v, _ in pairs])
    tile = tile_c(values.reshape(len(pairs), machine.warps, 32, 1).transpose(1, 0, 2, 3))
    shadow = None
    if any(bits is not None for _, bits in pairs):
        nothing = np.zeros(machine.count, bool)
        shadow = np.stack([nothing if bits is None else (bits != 0) & use for _, bits in pairs])
        shadow = tile_c(shadow.reshape(len(pairs), machine.warps, 32, 1).transpose(1, 0, 2, 3))
        shadow = shadow.reshape(groups, 64, -1)
    return tile.reshape(groups, 64, -1), shadow


def fence(instruction, machine):
    """wgmma.fence: registers written so far may be used by the warpgroup's products."""
    return lambda mask, active: machine.products.fence(_groups(machine, active))


def commit(instruction, machine):
    """wgmma.commit_group."""
    return lambda mask, active: machine.products.commit(_groups(machine, active))


def wait(instruction, machine):
    """wgmma.wait_group N."""
    allowed = int(instruction.operands[0], 0)
    return lambda mask, active: machine.products.wait(_groups(machine, active), allowed)


INSTRUCTIONS = {
    "wgmma.mma_async": multiply,
    "wgmma.fence": fence,
    "wgmma.commit_group": commit,
    "wgmma.wait_group": wait,
}
