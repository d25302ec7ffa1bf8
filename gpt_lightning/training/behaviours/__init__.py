"""Callbacks of each run of GPTModule, for all that is not the model's own work."""

from lightning import Callback

from gpt_lightning.training.behaviours.begin import BeginTraining
from gpt_lightning.training.behaviours.evaluated import EvaluatedPart, LastLoss
from gpt_lightning.training.behaviours.non_finite import NonFiniteGuard
from gpt_lightning.training.behaviours.process import MatmulPrecision, TrimMemory
from gpt_lightning.training.behaviours.step_seeds import StepSeeds
from gpt_lightning.training.behaviours.stop_between_steps import StopBetweenSteps


def of_every_run(guard: NonFiniteGuard) -> list[Callback]:
    """Return the behaviours in the order of their work; the guard is the module's own."""
    return [
        BeginTraining(),
        StepSeeds(),
        MatmulPrecision(),
        TrimMemory(),
        guard,
        EvaluatedPart(),
        LastLoss(),
        StopBetweenSteps(),
    ]
