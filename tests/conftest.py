from __future__ import annotations

pytest_plugins = ["bytecheckpoint.testing.fixtures", "s3_server"]
