"""A logger without a folder, as W&B's and MLflow's are, for `--trainer.logger`."""

from typing import Any, ClassVar

from lightning.pytorch.loggers.logger import Logger


class RemoteLogger(Logger):
    """Keeps what it is given in memory, over all sessions of a process."""

    rows: ClassVar[list[tuple[int | None, dict[str, float]]]] = []
    hyperparameters: ClassVar[dict[str, Any]] = {}

    def __init__(self, project: str = "project") -> None:
        super().__init__()
        self.project = project

    @property
    def name(self) -> str:
        return self.project

    @property
    def version(self) -> str:
        return "5f2c"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.hyperparameters.update(params)
