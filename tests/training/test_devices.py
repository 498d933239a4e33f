"""The trial axis over several devices; the flag must be set before JAX starts."""

import os
import subprocess
import sys
from pathlib import Path


def test_eight_devices_share_the_lanes(cache_folder):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.eight_devices"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
