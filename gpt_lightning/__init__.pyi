from gpt_lightning.errors import UserError as UserError
from gpt_lightning.model.generate import generate as generate
from gpt_lightning.model.gpt import GPT as GPT
from gpt_lightning.model.gpt import GPTConfig as GPTConfig
from gpt_lightning.runs.sources import load_model as load_model
from gpt_lightning.script import GPTCLI as GPTCLI
from gpt_lightning.training.datamodule import TokenDataModule as TokenDataModule
from gpt_lightning.training.fit import FitResult as FitResult
from gpt_lightning.training.fit import fit as fit
from gpt_lightning.training.module import GPTModule as GPTModule

__version__: str
