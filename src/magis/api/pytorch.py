"""The running PyTorch, and whether magis knows it."""

from __future__ import annotations

import os
import re

from magis.errors import UsageError

SUPPORTED = ((2, 11), (2, 15))
"""From the first version to before the second."""
OVERRIDE = "MAGIS_ANY_TORCH"


def torch_version() -> str:
    """The running PyTorch's version, such as 2.13.0+cpu."""
    import torch

    return str(torch.__version__)


def check_torch() -> None:
    """Raises UsageError when this PyTorch is older or newer than those that magis is tested on."""
    version = torch_version()
    found = re.match(r"(\d+)\.(\d+)", version)
    first, end = SUPPORTED
    if found and not first <= (int(found[1]), int(found[2])) < end and os.environ.get(OVERRIDE, "") in ("", "0"):
        supported = f"torch>={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        raise UsageError(f"torch {version} is not supported: install {supported}, or set {OVERRIDE}=1 to try it")
