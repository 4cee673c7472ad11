"""Weight sync from stock Megatron-core to stock SGLang over NIXL and Ray Direct Transport.

Importing this package switches the SGLang patches on (see :mod:`sglang_rdt.activation`). It
imports neither torch, Ray, SGLang nor Megatron; each patch waits for its module to be imported.
"""

import sys

from sglang_rdt.activation import activate
from sglang_rdt.errors import SettingError

__version__ = "0.1.0"
__all__ = ["__version__", "activate"]

try:
    activate()
except SettingError as error:
    if sys.argv[0].endswith("sglang-rdt"):  # the command says it in one line
        sys.exit(f"sglang-rdt: {error}")
    raise
