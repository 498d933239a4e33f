"""Hydra's side of jaxlab's launcher. Imported at every Hydra start, so it imports nothing else.

The class has to live in the namespace package `hydra_plugins`; the work is done by
`jaxlab.sweeps.launcher`.
"""

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher


class VmapLauncher(Launcher):
    """Runs all jobs that differ in traced fields alone as the trials of one compiled program."""

    def setup(self, *, hydra_context, task_function, config):
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        from jaxlab.sweeps.launcher import launch

        return launch(self.hydra_context, self.config, job_overrides, initial_job_idx)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="vmap",
    node={"_target_": "hydra_plugins.jaxlab_vmap.VmapLauncher"},
    provider="jaxlab",
)
