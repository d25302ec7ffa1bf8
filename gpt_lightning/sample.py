"""The command `gpt-lightning sample`: text from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt_lightning.errors import UserError

if (
    TYPE_CHECKING
):  # torch is imported when there is something to sample: --help must not wait for it
    from gpt_lightning.data.tokenizers import Tokenizer
    from gpt_lightning.model import GPT


def sample(
    path: str,
    prompt: str = "",
    num_samples: int = 1,
    max_new_tokens: int = 500,
    temperature: float = 0.8,
    top_k: int | None = 200,
    seed: int = 1337,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
) -> None:
    """Write text with a trained model.

    Args:
        path: A checkpoint, a run folder (its best checkpoint) or an experiment's folder (its newest
            run).
        prompt: What the text begins with; FILE:path reads it from a file; empty: the start of a
            text.
        num_samples: How many texts.
        max_new_tokens: Tokens a text.
        temperature: Divides the logits; below 1 is safer, above 1 bolder, 0 takes the most likely
            token.
        top_k: Samples among the k most likely tokens only; null: among all.
        seed: Of the draws.
        device: Where the model runs; auto: cuda, else mps, else cpu.
    """
    for name, value in {
        "num_samples": num_samples,
        "max_new_tokens": max_new_tokens,
        "top_k": top_k,
    }.items():
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if temperature < 0:
        raise UserError(f"--temperature is {temperature}; it must not be negative")
    prompt = read_prompt(prompt)
    checkpoint = find_checkpoint(Path(path))

    import torch

    from gpt_lightning.device import check_accelerator
    from gpt_lightning.generate import generate

    check_accelerator(device, "32-true")
    if device == "auto":
        device = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    model, tokenizer = load_checkpoint(checkpoint)
    model.to(device)
    print(f"# {checkpoint}", flush=True)
    start = torch.tensor([start_tokens(tokenizer, prompt)], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for number in range(num_samples):
        tokens = generate(
            model, start, max_new_tokens, temperature, top_k, generator, tokenizer.vocab_size
        )
        print(
            "---------------" if number else "",
            tokenizer.decode(tokens[0].tolist()),
            sep="\n",
            flush=True,
        )


def read_prompt(prompt: str) -> str:
    """The prompt itself, or the text of the file that `FILE:path` names."""
    if not prompt.startswith("FILE:"):
        return prompt
    path = Path(prompt.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt: cannot read {path}: {error}") from error


def start_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What a sample begins with: the prompt's tokens.

    Without a prompt it is what stands before a text in the training data: the end-of-text token,
    where there is one, else a new line, else the first token.
    """
    if prompt:
        return [int(token) for token in tokenizer.encode(prompt)]
    if tokenizer.eot_token is not None:
        return [tokenizer.eot_token]
    try:
        return [int(tokenizer.encode("\n")[0])]
    except UserError:  # a vocabulary of characters without one
        return [0]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means.

    Args:
        path: a file, which is taken as it is; a run folder, of which the best checkpoint is taken,
            else `last.ckpt`; or a folder of runs `version_N`, of which the highest N is taken.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(
            f"{path} does not exist: give a checkpoint or a run folder, "
            "such as lightning_logs/NAME/version_0"
        )
    versions = [p for p in path.glob("version_*") if re.fullmatch(r"version_\d+", p.name)]
    run = max(versions, key=lambda p: int(p.name.removeprefix("version_")), default=path)
    best = sorted(
        (run / "checkpoints").glob("best-step-*.ckpt")
    )  # zero-padded: the last is the latest
    last = run / "checkpoints" / "last.ckpt"
    found = [*best[-1:], *([last] if last.exists() else [])]
    if not found:
        raise UserError(
            f"{run} has no checkpoints/*.ckpt: give a checkpoint, "
            "or train one with gpt-lightning fit"
        )
    return found[0]


def load_checkpoint(path: Path) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and the tokenizer of its data.

    Reads tensors, numbers and words only: nothing in the file can name code to run.

    Raises:
        UserError: the file is damaged, or not one of ours.
    """
    import torch

    from gpt_lightning.data.tokenizers import tokenizer_from_spec
    from gpt_lightning.model import GPT, GPTConfig

    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        config = GPTConfig(**checkpoint["hyper_parameters"]["config"])
        spec = checkpoint["gpt_lightning"]["tokenizer"]
        weights = checkpoint["state_dict"]
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} is not a checkpoint of gpt-lightning fit, or is damaged "
            f"({type(error).__name__}: {reason})"
        ) from error
    model = GPT(config)
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")}
    )
    return model.eval(), tokenizer_from_spec(spec)
