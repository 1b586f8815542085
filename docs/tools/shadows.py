"""An extension of Griffe, which reads the source: a function named as its module hides the module.

So it is when Python imports ``from .merge_state import merge_state``; Griffe finds the module.
"""

from __future__ import annotations

import griffe


class Shadows(griffe.Extension):
    """Put such functions in the place of their modules."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        """Replace modules below a package that has been read."""
        for module in [pkg, *_packages(pkg)]:
            for name, inner in list(module.modules.items()):
                function = None if inner.is_alias else inner.members.get(name)
                if isinstance(function, griffe.Function):
                    module.del_member(name)
                    module.set_member(name, function)


def _packages(module):
    for inner in module.modules.values():
        if not inner.is_alias:
            yield inner
            yield from _packages(inner)
