"""Search settings with Optuna, and stop bad runs early: sweep.py TEXT [--trials N]."""

import argparse

import lightning as L
import optuna

from gpt_lightning import UserError, fit


class Pruning(L.Callback):
    """Report each validation to a trial, and stop the run of a trial that is worse than others.

    Args:
        trial: Trial of this run.
    """

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.pruned = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trial.report(float(trainer.callback_metrics["val/loss"]), trainer.global_step)
        if self.trial.should_prune():
            trainer.should_stop = self.pruned = True  # ends between two steps; the run is saved


def objective(trial: optuna.Trial, text: str, configs: list[str]) -> float:
    """Train with the settings of a trial and return the best validation loss."""
    settings = {
        "data.corpus": None,
        "data.text_file": text,
        "model.learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "model.config.n_embd": trial.suggest_categorical("n_embd", [64, 128, 192]),
        "model.config.dropout": trial.suggest_float("dropout", 0.0, 0.3),
    }
    pruning = Pruning(trial)
    result = fit(*configs, settings, callbacks=[pruning], run_name="sweep")
    trial.set_user_attr("run", str(result.run_folder))
    if pruning.pruned:
        raise optuna.TrialPruned
    assert result.best_loss is not None
    return result.best_loss


def main() -> None:
    """Run the trials and print the best one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--config", nargs="+", default=["quickstart"])
    args = parser.parse_args()
    study = optuna.create_study(
        storage="sqlite:///sweep.db",
        study_name="sweep",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    study.optimize(
        lambda trial: objective(trial, args.text, args.config),
        n_trials=args.trials,
        catch=(UserError,),  # a learning rate at which the loss is not finite
    )
    best = study.best_trial
    print(f"best: {best.value:.4f}, {best.params}, {best.user_attrs['run']}")


if __name__ == "__main__":
    main()
