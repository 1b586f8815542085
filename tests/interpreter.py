"""Triton's interpreter without what it does again in every launch and every call of a function.

Each launch, and each function that a kernel calls, lets it look through the whole of Triton's
language and put its own functions in the place of what a compiler reads: most of the time of
small kernels. Here that happens once in a process for each set of modules that kernels name, and
stays: where TRITON_INTERPRET is set, nothing in the process is compiled. What a kernel computes
is the interpreter's own, by the same calls.
"""

from functools import cache

from triton.runtime import interpreter


def patch_once():
    """Let kernels that are interpreted from now on run that way."""
    patch_for, nothing = cache(interpreter._patch_lang), interpreter._LangPatchScope()

    def once(function):
        patch_for(function)
        return nothing

    interpreter._patch_lang = once
