"""What a kernel can do wrong, as exceptions that name the instruction and the threads."""


class Fault(Exception):
    """An error of the executed kernel; `kind` names the detector."""

    def __init__(self, kind, message):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message

    def __reduce__(self):
        return type(self), (self.kind, self.message)


class Unsupported(Exception):
    """Something that this emulator does not know; never a verdict on the kernel."""


def expect_qualifiers(instruction, known):
    """Fail on a qualifier between mnemonic and type that would be ignored otherwise."""
    if unknown := set(instruction.parts[1:-1]) - set(known):
        raise Unsupported(f"unknown instruction: {instruction}: {', '.join(sorted(unknown))}")
