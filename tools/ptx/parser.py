"""Text of a PTX module to kernels: parameters, registers, variables, instructions, labels.

Instructions keep their operands as text; what an operand means depends on the instruction and is
decided once, when it is decoded. Names declared in an inner ``{ }`` scope (inline assembly does so)
are made unique here, so that decoding knows one flat name space.
"""

import re
from dataclasses import dataclass, field

from .faults import Unsupported

SIZES = {"pred": 1}
SIZES |= {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``@guard name operands``, and the source line that it came from."""

    index: int
    guard: str | None
    negated: bool
    name: str
    operands: tuple[str, ...]
    source: str

    @property
    def parts(self):
        """The mnemonic and its qualifiers."""
        return self.name.split(".")

    def __str__(self):
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        where = f" ({self.source})" if self.source else ""
        return f"{guard}{self.name} {', '.join(self.operands)}".strip()[:160] + where


@dataclass(frozen=True)
class Variable:
    """A parameter or a variable in shared, local or constant memory; sizes in bytes."""

    name: str
    type: str
    size: int
    alignment: int


@dataclass
class Kernel:
    """One entry of a module. ``registers`` maps every register's name to its type."""

    name: str
    parameters: list[Variable]
    registers: dict[str, str] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)  # the tables of brx.idx


VARIABLE = re.compile(
    r"\.(?P<space>param|shared|local)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)"
    r"(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+(?P<name>[\w$]+)\s*(?P<length>\[\d*\])?"
)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
STATEMENT = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
LABEL = re.compile(r"([\w$]+)\s*:(?!:)\s*")
SPACE = re.compile(r"\s*")
NAME = re.compile(r"[%$A-Za-z_][\w$]*(?:\.[xyzw]\b)?")


def parse(text):
    """Return the kernels of a PTX module by name."""
    text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", "", text), flags=re.S)
    files = {
        m[1]: m[2].rsplit("/", 1)[-1] for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', text)
    }
    # Directives that end with their line become statements like the others.
    text = re.sub(r"(?m)^\s*(\.loc\s[^\n;]*|\.pragma[^\n;]*);?", r"\1;", text)
    kernels, start = {}, 0
    while entry := ENTRY.search(text, start):
        end = _matching_brace(text, entry.end())
        module_level = re.sub(r"\.entry.*", "", text[: entry.start()], flags=re.S)
        kernel = Kernel(entry[1], [_variable(m) for m in VARIABLE.finditer(entry[2])])
        kernel.shared = [
            _variable(m) for m in VARIABLE.finditer(module_level) if m["space"] == "shared"
        ]
        _Body(kernel, files).read(text[entry.end() : end])
        kernels[kernel.name] = kernel
        start = end
    if not kernels:
        raise Unsupported("the module has no .entry")
    return kernels


def split_operands(text):
    """Split at the commas that are not inside braces or brackets."""
    operands, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            operands.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*operands, last) if last else tuple(operands)


def _variable(match):
    element = SIZES.get(match["type"])
    if element is None:
        raise Unsupported(f"variable of type .{match['type']}: {match[0]}")
    length = match["length"]
    count = 1 if not length else int(length[1:-1] or 0)
    alignment = int(match["align"] or element)
    return Variable(match["name"], match["type"], element * count, alignment)


def _matching_brace(text, at):
    depth = 1
    while depth:
        brace = re.compile(r"[{}]").search(text, at)
        if brace is None:
            raise Unsupported("unbalanced braces")
        depth += 1 if brace[0] == "{" else -1
        at = brace.end()
    return at - 1


class _Body:
    """Reads statements in order and keeps the stack of scopes."""

    def __init__(self, kernel, files):
        self.kernel, self.files, self.location = kernel, files, ""
        self.scopes, self.count = [{}], 0  # name as written -> unique name
        self.pending = []  # instructions with the scopes in which their names are looked up

    def read(self, body):
        at = 0
        while True:
            at = SPACE.match(body, at).end()
            if at == len(body):
                break
            if body[at] == "{":
                self.count += 1
                self.scopes = [*self.scopes, {}]
                at += 1
            elif body[at] in "};":
                self.scopes = self.scopes[:-1] if body[at] == "}" else self.scopes
                at += 1
            elif label := LABEL.match(body, at):
                self.kernel.labels[self._declare(label[1])] = len(self.pending)
                at = label.end()
            else:
                end = body.index(";", at)
                self._statement(" ".join(body[at:end].split()))
                at = end + 1
        self._resolve()

    def _declare(self, name):
        unique = name if len(self.scopes) == 1 else f"{name}~{self.count}"
        self.scopes[-1][name] = unique
        return unique

    def _statement(self, text):
        if text.startswith(".loc "):
            _, file, line, *rest = text.replace(",", " ").split()
            self.location = f"{self.files.get(file, 'file ' + file)}:{line}"
            if "inlined_at" in rest:
                file, line = rest[rest.index("inlined_at") + 1 :][:2]
                self.location += f" < {self.files.get(file, 'file ' + file)}:{line}"
        elif text.startswith(".reg"):
            self._registers(text)
        elif variable := VARIABLE.match(text):
            spaces = {"shared": self.kernel.shared, "local": self.kernel.local}
            self._declare(variable["name"])
            spaces[variable["space"]].append(_variable(variable))
        elif text.startswith(".branchtargets"):
            table = next(reversed(self.kernel.labels))  # the label just before it
            self.kernel.targets[table] = text.split(maxsplit=1)[1].replace(" ", "").split(",")
        elif text.startswith(".pragma"):
            pass
        elif match := STATEMENT.match(text):
            self.pending.append((match, self.location, self.scopes))
        else:
            raise Unsupported(f"cannot parse {text!r}")

    def _registers(self, text):
        _, kind, names = text.split(maxsplit=2)
        for name in names.split(","):
            prefix, _, count = name.strip().rstrip(">").partition("<")
            for written in [f"{prefix}{i}" for i in range(int(count))] if count else [prefix]:
                self.kernel.registers[self._declare(written)] = kind[1:]

    def _resolve(self):
        for index, (match, location, scopes) in enumerate(self.pending):
            negated, guard, name, rest = match.groups()

            operands = split_operands(rest)
            if len(scopes) > 1:  # outside of inner scopes every name is its own

                def unique(name, scopes=scopes):
                    return next((s[name[0]] for s in reversed(scopes) if name[0] in s), name[0])

                operands = tuple(NAME.sub(unique, operand) for operand in operands)
                guard = guard and NAME.sub(unique, guard)
            self.kernel.instructions.append(
                Instruction(index, guard, bool(negated), name, operands, location)
            )
