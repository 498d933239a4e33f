"""Hydra's side of jaxlab's sweeps. Imported at every Hydra start, so it imports nothing else.

The classes have to live in the namespace package `hydra_plugins`; the work is done by
`jaxlab.sweeps.launcher`. The task function of a sweep is its `Task`.
"""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper


class VmapLauncher(Launcher):
    """Runs all jobs that differ in traced fields alone as the trials of one compiled program."""

    def setup(self, *, hydra_context, task_function, config):
        self.task_function = task_function

    def launch(self, job_overrides, initial_job_idx):
        from jaxlab.sweeps.launcher import launch

        return launch(self.task_function, job_overrides)


class TrialSweeper(Sweeper):
    """Hands the validated trials of a sweep that are not finished to any of Hydra's launchers."""

    def setup(self, *, hydra_context, task_function, config):
        self.task_function = task_function
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        from jaxlab.sweeps.launcher import sweep

        return sweep(self.launcher, self.task_function)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="vmap",
    node={"_target_": "hydra_plugins.jaxlab_vmap.VmapLauncher"},
    provider="jaxlab",
)
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="trials",
    node={"_target_": "hydra_plugins.jaxlab_vmap.TrialSweeper"},
    provider="jaxlab",
)
