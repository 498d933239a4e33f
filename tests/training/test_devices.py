"""Several devices; the flag must be set before JAX starts, so in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("check", ["lanes", "mesh", "float64"])
def test_eight_devices(cache_folder, check):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.eight_devices", check],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
