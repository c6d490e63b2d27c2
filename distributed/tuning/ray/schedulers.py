"""Ray Tune's schedulers, configured from a sweep plan. Importing Ray is left to the functions."""

from __future__ import annotations

import types
from typing import Any

from distributed.errors import ConfigError
from distributed.tuning.plan import SweepPlan
from distributed.tuning.sweep import OPEN, progress_of, score_of

STOPPING_S = 60  # time for trials to save and leave after the sweep was stopped; then their actors are killed


def make_scheduler(plan: SweepPlan) -> Any:
    """Return the scheduler that `plan` names, primed with the results of trials of an earlier process."""
    from ray.tune import schedulers

    options = {
        name: int(value) if float(value).is_integer() else value for name, value in plan.scheduler_options.items()
    }
    if plan.scheduler is None:
        return _patient(schedulers.FIFOScheduler)()
    kinds = {"asha": schedulers.ASHAScheduler, "hyperband": schedulers.HyperBandScheduler}
    kind = _patient(kinds.get(plan.scheduler) or _population(plan))
    made = kind(time_attr="progress", metric="score", mode="min", **options)
    if plan.scheduler == "asha":
        _replay(made, plan)
    return made


def _patient(kind: Any) -> Any:
    """Return a subclass of the scheduler `kind` with which Ray Tune waits longer for its actors at the end of a sweep.

    Workaround (Ray 2.60, no upstream issue known; may go when Ray Tune makes the timeout a setting): Ray Tune waits a
    hard-coded 10 s before it kills the actors (`_actor_force_cleanup_timeout`). Some trials need longer to save, so
    wait as long as for a trial that is stopped alone. Only a scheduler receives the controller.
    """

    class Patient(kind):  # type: ignore[misc]
        def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
            if tune_controller is not None:
                tune_controller._tune_controller._actor_force_cleanup_timeout = STOPPING_S
            super().on_trial_add(tune_controller, trial)

    return Patient


def _population(plan: SweepPlan) -> type:
    """Return a subclass of Ray Tune's population based training for our search space and trial numbers."""
    from ray.tune.schedulers import PopulationBasedTraining

    mutations = {"values": _mutations(plan)}

    class OurPopulationBasedTraining(PopulationBasedTraining):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(hyperparam_mutations=mutations, **options)

        def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
            # Workaround (Ray 2.60, ray-project/ray#14176; may go when it accepts a searcher that does not learn):
            # population based training refuses every searcher, because one might learn from values that it changes.
            # Search algorithms that learn were refused before (check_pairing).
            super().on_trial_add(types.SimpleNamespace(search_alg=None), trial)

        def _get_new_config(self, trial: Any, trial_to_clone: Any) -> Any:
            config, operations = super()._get_new_config(trial, trial_to_clone)
            values = {name: plan.space[name].inside(value) for name, value in config["values"].items()}
            return {**config, "values": values, "trial": trial.config["trial"]}, operations

    return OurPopulationBasedTraining


def _mutations(plan: SweepPlan) -> dict[str, Any]:
    """Return the dimensions that population based training may change, as domains of Ray Tune."""
    from ray import tune

    made: dict[str, Any] = {}
    for name, each in plan.space.items():
        if each.kind == "choice":
            made[name] = list(each.values)
        elif each.kind == "randint":
            made[name] = tune.randint(int(each.low), int(each.high))
        elif each.is_varied and each.sampler is None:
            made[name] = getattr(tune, each.kind)(each.low, each.high)
    if not made:
        raise ConfigError(
            "scheduler='pbt' finds no value that it can change in this search space: write uniform, loguniform, randint or choice"
        )
    return made


def _replay(scheduler: Any, plan: SweepPlan) -> None:
    """Tell a scheduler the results of trials of an earlier process, so that it compares later trials with them."""

    class Earlier:
        def __init__(self, number: int) -> None:
            self.trial_id = f"earlier-{number}"

    for record in plan.earlier:
        if record.status in OPEN:
            continue
        trial = Earlier(record.number)
        scheduler.on_trial_add(None, trial)
        for number, row in enumerate(record.rows):
            score = score_of(row, plan.metric, plan.mode)
            scheduler.on_trial_result(None, trial, {"progress": progress_of(row, number + 1), "score": score})
