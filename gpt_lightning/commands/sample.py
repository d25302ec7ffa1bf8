"""The command `gpt-lightning sample`: text from a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt_lightning.errors import UserError

if (
    TYPE_CHECKING
):  # torch is imported when there is something to sample: --help must not wait for it
    pass


def sample(
    path: str,
    prompt: str = "",
    num_samples: int = 1,
    max_new_tokens: int = 500,
    temperature: float = 0.8,
    top_k: int | None = 200,
    seed: int = 1337,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
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
        dtype: Of the matrix products; bf16 is up to twice as fast and rounds: now and then it is
            another token. auto: bf16 where the device has it, else fp32; said above the text.
    """
    for name, value in {"num_samples": num_samples, "max_new_tokens": max_new_tokens}.items():
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    prompt = read_prompt(prompt)

    import torch

    from gpt_lightning.data.tokenizers import start_tokens
    from gpt_lightning.hardware.device import default_device
    from gpt_lightning.hardware.precision import check_accelerator, fastest_precision
    from gpt_lightning.model.generate import PACKED_FROM, check_sampling, generate
    from gpt_lightning.model.packed import prepack_for_decoding
    from gpt_lightning.runs.checkpoint import find_checkpoint, load_model

    check_sampling(temperature, top_k, prefix="--")
    check_accelerator(device, "32-true", "--device")
    torch_device = default_device() if device == "auto" else device
    checkpoint = find_checkpoint(Path(path))
    model, tokenizer = load_model(checkpoint)
    why = "as set"
    if dtype == "auto":
        precision, why = fastest_precision(torch_device)
        dtype = "bf16" if precision == "bf16-mixed" else "fp32"
    products = torch.bfloat16 if dtype == "bf16" else None
    # once, for all texts
    model = prepack_for_decoding(
        model.to(torch_device), products, num_samples * max_new_tokens >= PACKED_FROM
    )
    print(f"# {checkpoint}, in {dtype}: {why}", flush=True)
    start = torch.tensor([start_tokens(tokenizer, prompt)], device=torch_device)
    generator = torch.Generator(torch_device).manual_seed(seed)
    for number in range(num_samples):
        tokens = generate(
            model,
            start,
            max_new_tokens,
            temperature,
            top_k,
            generator,
            tokenizer.vocab_size,
            products,
        )
        text = tokenizer.decode(tokens[0].tolist())
        print("---------------" if number else "", text, sep="\n", flush=True)


def read_prompt(prompt: str) -> str:
    """The prompt itself, or the text of the file that `FILE:path` names."""
    if not prompt.startswith("FILE:"):
        return prompt
    path = Path(prompt.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt: cannot read {path}: {error}") from error
