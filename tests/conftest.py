"""Before anything imports Ray, which reads its authentication settings once."""

from __future__ import annotations

import os
import secrets

# The end-to-end tests run under Ray's token authentication, as clusters of careful people do.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
