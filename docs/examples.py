"""Has the reference show the examples of docstrings as code: an extension of griffe."""

from __future__ import annotations

import re
import textwrap

from griffe import Extension

_EXAMPLE = re.compile(r"^Examples?:\n((?:[ ]*>>>.*(?:\n(?!\n).*)*\n?\n?)+)", re.MULTILINE)


class Examples(Extension):
    """Makes what follows after `Example:`, indented or not, a section that griffe knows."""

    def on_instance(self, *, obj, **kwargs) -> None:
        """Rewrites one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_as_section, obj.docstring.value)


def _as_section(found):
    return "Examples:\n" + textwrap.indent(textwrap.dedent(found[1]), "    ")
