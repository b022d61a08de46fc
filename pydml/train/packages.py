"""Packages that only some settings need: what is missing, or broken, is said together with what does without."""

from __future__ import annotations

import importlib
from typing import Any


def optional(module: str, what: str, *, package: str = "", instead: str = "") -> Any:
    """Import a module that pydml does without.

    An import can fail in any way: a torchvision that was built for another torch raises RuntimeError, and timm with it.

    Parameters
    ----------
    module
        Its name.
    what
        The setting that needs it, as the message begins.
    package
        What pip calls it, where that is another name.
    instead
        What to use without it.

    Raises
    ------
    ValueError
        Whatever the import raised.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        name, rest = module.split(".")[0], f"; or {instead}" if instead else ""
        if isinstance(error, ModuleNotFoundError) and error.name in (name, module):
            raise ValueError(f"{what} needs {name}: pip install {package or name}{rest}") from None
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        raise ValueError(f"{what} needs {name}, whose import fails here ({reason}): mend it{rest}") from error
