"""Training re-evaluation curves: which training batches the final weights still remember.

Evaluate the *final* weights on every training batch and plot the loss against the step at which the
batch was seen: the training re-evaluation curve (TREC). Good data helps most where the curve is
lowest, and the curve's shape can be predicted before training, because AdamW's weights are an
exponential moving average (EMA) of its updates: the learning-rate schedule and the weight decay fix
the coefficient of every update in the final weights.

Source: Bergsma, Dey and Hestness, "Predicting Training Re-evaluation Curves Enables Effective Data
Curriculums for LLMs", ICLR 2026, arXiv 2509.25380. The optional subtraction of a reference model's
loss, the closed-form valleys and `SMALL_LM_LAW` are this project's.

Conventions:

* Step `t` runs from 1 to `T`; entry `t - 1` of an array belongs to it. `t / T` is the training
  fraction. `batch_fn` and optax count from 0.
* `T` counts optimiser updates: with gradient accumulation a batch is all of its micro-batches.
  Gradient clipping changes no coefficient. Parameters without weight decay are no EMA; the
  coefficients describe the decayed ones.
* Functions that say "host or graph" compute with JAX where an argument is a `jax.Array` (traced or
  not), in its precision but at least float32; anything else they compute in float64 with NumPy.
  Values are checked on the host only; shapes always.

A plan, before any training:

>>> lrs = schedule_values("step", 1000, 1e-2, warmup_steps=100, final_ratio=0.01)
>>> weight_decay = weight_decay_for_timescale(0.2, peak_lr=1e-2, num_steps=1000)
>>> c = coefficients_from_schedule(lrs, weight_decay)
>>> place_block(predict_trec(c, m=2.0), fraction=0.1)
(600, 700)

A recipe of several phases, with its own placement of good data: `Recipe` and `analyze_recipe`.
"""

from __future__ import annotations

from jaxlab.methods.trec.closed_form import (
    d2z_valley,
    ema_peak,
    linear_ema_peak,
    predicted_valley,
    step_critical_timescale,
    wsd_ema_peak,
)
from jaxlab.methods.trec.curves import (
    bin_curve,
    compute_trec,
    pearson,
    reevaluation_loss,
    valley,
)
from jaxlab.methods.trec.ema import (
    adamw_alphas,
    adamw_timescale,
    coefficients_from_schedule,
    ema_coefficients,
    exponential_averaging,
    momentum_coefficients,
    recommended_timescale,
    sum_repeats,
    update_coefficients,
    weight_decay_for_timescale,
)
from jaxlab.methods.trec.placement import curriculum, place_block, place_lowest
from jaxlab.methods.trec.prediction import (
    SMALL_LM_LAW,
    PowerLaw,
    TrainingFractionFit,
    effective_tpp,
    fit_power_law,
    fit_training_fraction,
    predict_trec,
)
from jaxlab.methods.trec.recipe_analysis import (
    RecipeReport,
    WindowReport,
    analyze_recipe,
    evaluate_window,
)
from jaxlab.methods.trec.recipes import Phase, Recipe, RecipeSteps, recipe_steps
from jaxlab.methods.trec.trace import (
    TraceEmaState,
    ema_from_opt_state,
    find_trace,
    trace_ema,
)
from jaxlab.ops.schedules import make_schedule, schedule_values

__all__ = [
    "SMALL_LM_LAW",
    "Phase",
    "PowerLaw",
    "Recipe",
    "RecipeReport",
    "RecipeSteps",
    "TraceEmaState",
    "TrainingFractionFit",
    "WindowReport",
    "adamw_alphas",
    "adamw_timescale",
    "analyze_recipe",
    "bin_curve",
    "coefficients_from_schedule",
    "compute_trec",
    "curriculum",
    "d2z_valley",
    "effective_tpp",
    "ema_coefficients",
    "ema_from_opt_state",
    "ema_peak",
    "evaluate_window",
    "exponential_averaging",
    "find_trace",
    "fit_power_law",
    "fit_training_fraction",
    "linear_ema_peak",
    "make_schedule",
    "momentum_coefficients",
    "pearson",
    "place_block",
    "place_lowest",
    "predict_trec",
    "predicted_valley",
    "recipe_steps",
    "recommended_timescale",
    "reevaluation_loss",
    "schedule_values",
    "step_critical_timescale",
    "sum_repeats",
    "trace_ema",
    "update_coefficients",
    "valley",
    "weight_decay_for_timescale",
    "wsd_ema_peak",
]
