"""The command `gpt-lightning sample`: generate text from a checkpoint."""

from pathlib import Path
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, PositiveInt

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import Seed


def sample(
    path: str,
    prompt: str = "",
    num_samples: PositiveInt = 1,
    max_new_tokens: PositiveInt = 500,
    temperature: NonNegativeFloat = 0.8,
    top_k: PositiveInt | None = 200,
    seed: Seed = 1337,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
) -> None:
    """Generate text with a trained model.

    Args:
        path: Checkpoint, run folder (its best checkpoint), or folder of an experiment (its newest
            run).
        prompt: Beginning of the text. FILE:path reads it from a file; empty: start a new text.
        num_samples: Number of texts.
        max_new_tokens: Number of tokens per text.
        temperature: Divisor of the logits. Higher values give more variety; 0 always takes the most
            likely token.
        top_k: Number of most likely tokens to sample from; null: all.
        seed: Seed of the draws.
        device: Device of the model. auto: cuda, else mps, else cpu.
        dtype: dtype of matrix products. bf16 is up to 2x faster; rounding occasionally changes a
            token. auto: bf16 if the device supports it, else fp32. The first line printed names it.
    """
    prompt = read_prompt(prompt)

    import torch  # after the checks: --help must not wait for it

    from gpt_lightning.data.tokenizers import start_tokens
    from gpt_lightning.hardware.device import device_kind
    from gpt_lightning.hardware.precision import check_accelerator, fastest_precision
    from gpt_lightning.model.decoder import Decoder
    from gpt_lightning.model.generate import PACKED_FROM, generate
    from gpt_lightning.runs.sources import read_source, tokenizer_of

    check_accelerator(device, "--device")
    torch_device = device_kind(device)
    found = read_source(path)
    model, tokenizer = found.model(), tokenizer_of(found)
    why = "as set"
    if dtype == "auto":
        precision, why = fastest_precision(torch_device)
        dtype = "bf16" if precision == "bf16-mixed" else "fp32"
    products = torch.bfloat16 if dtype == "bf16" else None
    decoder = Decoder(
        model.to(torch_device), products, num_samples * max_new_tokens >= PACKED_FROM
    )
    print(f"# {found.source}, in {dtype}: {why}", flush=True)
    start = torch.tensor([start_tokens(tokenizer, prompt)], device=torch_device)
    generator = torch.Generator(torch_device).manual_seed(seed)
    for number in range(num_samples):
        tokens = generate(
            decoder,
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
    """Return the prompt, or the text of the file that `FILE:path` names."""
    if not prompt.startswith("FILE:"):
        return prompt
    path = Path(prompt.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt: cannot read {path}: {error}") from error
