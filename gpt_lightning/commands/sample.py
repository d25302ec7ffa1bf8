"""The command `gpt-lightning sample`: generate text from a checkpoint."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, count, groupby, islice
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from gpt_lightning.data.tokenizers import TextStream, Tokenizer, start_tokens
from gpt_lightning.errors import MemoryExhaustedError, UserError, is_out_of_memory, reason_of
from gpt_lightning.files import Fields, explained, new_path
from gpt_lightning.parsing import Seed, TopP
from gpt_lightning.runs.folders import find_checkpoint

if TYPE_CHECKING:
    from gpt_lightning.model.fast.decoder import Decoder

SEED_STEP = 2_654_435_761  # odd, so that 2^32 texts have different seeds
Report = Callable[[Sequence["Text"]], None]


def sample(
    path: str,
    ckpt_path: Literal["best", "last"] = "best",
    prompt: str = "",
    prompts: str | None = None,
    out: str | None = None,
    num_samples: PositiveInt = 1,
    batch_size: PositiveInt = 8,
    max_new_tokens: PositiveInt = 500,
    temperature: NonNegativeFloat = 0.8,
    top_k: PositiveInt | None = 200,
    top_p: TopP | None = None,
    min_p: TopP | None = None,
    repetition_penalty: PositiveFloat = 1.0,
    stop: list[str] | None = None,
    seed: Seed = 1337,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
    network: str | Fields | None = None,
    json: bool = False,
) -> None:
    """Generate text with a trained model.

    Without a prompt on a terminal, a text follows each line that is typed, until Ctrl-D.

    Args:
        path: Checkpoint, run folder, or folder of an experiment (its newest run).
        ckpt_path: Checkpoint of a run folder. best: of the lowest validation loss; last: newest.
        prompt: Beginning of the text; empty: start a new text, or on a terminal read prompts.
        prompts: File with a prompt per line, or, as .jsonl, with objects that have a key prompt.
        out: New file of JSON Lines, with the keys prompt, text (what follows it), seed and tokens.
        num_samples: Number of texts per prompt.
        batch_size: Number of texts that are generated together: those of one prompt, and of prompts
            with the same number of tokens.
        max_new_tokens: Number of tokens per text.
        temperature: Divisor of the logits. Higher values give more variety; 0 always takes the most
            likely token.
        top_k: Number of most likely tokens to sample from; null: all.
        top_p: Total probability of the most likely tokens to sample from; null: all.
        min_p: Least probability, as a share of the likeliest token's, to sample from; null: all.
        repetition_penalty: Divisor of the logits of tokens that the text has; 1: none.
        stop: Text before which a text ends. Repeat the option for several.
        seed: Seed of a prompt's first text. Text i has seed + i x 2,654,435,761 modulo 2^32.
        device: Device of the model. auto: cuda, else mps, else cpu.
        dtype: dtype of matrix products. bf16 is up to 2x faster; rounding occasionally changes a
            token. auto: bf16 if the device supports it, else fp32. The first line printed names it.
        network: Network of one's own (also --model.network), such as my_package.MyGPT; null: that
            of the run's config.yaml.
        json: Print a line of JSON for each text, with the keys of --out.
    """
    asks = not (prompt or prompts or out or json) and sys.stdin.isatty() and sys.stdout.isatty()
    given = read_prompts(prompt, prompts)
    if "" in (stop or ()):
        raise UserError("--stop is empty: give the text before which a text ends, or leave it out")
    if out is not None:
        new_path("--out", out)  # checked before the model is read
    n_tokens = len(given) * num_samples * max_new_tokens
    if ckpt_path == "last":
        path = str(find_checkpoint(Path(path), last=True))
    decoder, tokenizer = load(path, device, dtype, n_tokens, network, sys.stderr if json else None)

    from gpt_lightning.model.generate import generate  # it imports torch, which takes seconds

    how: Fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    how |= {"max_new_tokens": max_new_tokens, "repetition_penalty": repetition_penalty}
    draw = partial(generate, decoder, vocab_size=tokenizer.vocab_size, **how)
    texts = partial(make_texts, tokenizer, stop or (), seed, num_samples)
    rounds = typed_texts(texts) if asks else iter([texts(given)])
    with reporting(out, batch_size, json) as report:
        for batch in chain.from_iterable(equal_lengths(each, batch_size) for each in rounds):
            complete(batch, draw, decoder.device, report)


def load(
    path: str, device: str, dtype: str, n_tokens: int, network: Any, file: Any = None
) -> tuple["Decoder", Tokenizer]:
    """Print the checkpoint of a path, and return its model, ready to decode, and its tokenizer.

    Args:
        path: Value of PATH.
        device: Value of --device.
        dtype: Value of --dtype.
        n_tokens: Number of tokens of all texts. Few are not worth laying out the weights.
        network: Value of --network.
        file: File to print to; None: standard output.
    """
    from gpt_lightning.hardware.precision import DTYPES, fastest_precision
    from gpt_lightning.model.generate import PACKED_FROM, make_decoder
    from gpt_lightning.runs.sources import open_model

    source, model, tokenizer, kind = open_model(path, device, network)
    why = "as set"
    if dtype == "auto":
        precision, why = fastest_precision(kind)
        dtype = "bf16" if precision == "bf16-mixed" else "fp32"
    decoder = make_decoder(model.to(kind), DTYPES[dtype].cast, n_tokens >= PACKED_FROM)
    print(f"# {source}, in {dtype}: {why}", flush=True, file=file)
    return decoder, tokenizer


def read_prompts(prompt: str, prompts: str | None) -> list[tuple[str, str]]:
    """Return each prompt after its place, which is the option or a line of the file.

    Args:
        prompt: Value of --prompt.
        prompts: Value of --prompts. Blank lines of the file are skipped.

    Raises:
        UserError: The file has no prompt, or a line of a .jsonl is not an object with a prompt.
    """
    if prompts is None:
        return [("--prompt", prompt)]
    try:
        lines = Path(prompts).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {prompts}: {reason_of(error)}; give text in UTF-8") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"--prompts {prompts}, line {number}"
            found.append((place, json_prompt(place, line) if prompts.endswith(".jsonl") else line))
    if not found:
        raise UserError(f"--prompts {prompts} has no prompt: write one per line")
    return found


def json_prompt(place: str, line: str) -> str:
    """Return the value of the key prompt in a line of JSON."""
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        prompt = loads(line)["prompt"]
        if isinstance(prompt, str):
            return prompt
    raise UserError(f'{place}: expected an object such as {{"prompt": "Once upon a time"}}')


# ---- texts ---------------------------------------------------------------------------------------


class Text(TextStream):
    """A text to generate.

    Args:
        tokenizer: Tokenizer of the model.
        stop: Stop texts.
        place: Place of the prompt, for errors.
        prompt: Prompt; empty: start a new text.
        seed: Seed of the draws.

    Attributes:
        start: Tokens that the text begins with.
        beginning: Text of these tokens.
        separator: Line to print before the text.
        shown: Number of printed characters, with those of `beginning`.
        reported: True when the whole text has been printed or written.

    Raises:
        UserError: The tokenizer has no tokens for the prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], place: str, prompt: str, seed: int
    ):
        super().__init__(tokenizer, stop)
        try:
            self.start = start_tokens(tokenizer, prompt)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        self.prompt, self.seed = prompt, seed
        self.beginning = prompt or tokenizer.decode(self.start)
        self.separator = "---------------"
        self.shown = 0
        self.reported = False


def make_texts(
    tokenizer: Tokenizer,
    stop: Sequence[str],
    seed: int,
    num_samples: int,
    prompts: list[tuple[str, str]],
    round_number: int = 0,
) -> list[Text]:
    """Return the texts of prompts, (place, prompt) each, with their seeds in a round of prompts."""
    return [
        Text(tokenizer, stop, place, prompt, (seed + i * SEED_STEP) % 2**32)
        for place, prompt in prompts
        for i in range(round_number * num_samples, (round_number + 1) * num_samples)
    ]


def typed_texts(make: Callable[..., list[Text]]) -> Iterator[list[Text]]:
    """Yield the texts of each prompt that is typed on the terminal, until Ctrl-D.

    Args:
        make: The function `make_texts` with its arguments but those of the prompt.
    """
    with suppress(ImportError):
        import readline  # noqa: F401, input() then edits lines and recalls the ones before
    with suppress(EOFError):
        for number in count():
            try:
                yield make([("the prompt", input("prompt (Ctrl-D ends): "))], number)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
    print()


def equal_lengths(texts: list[Text], batch_size: int) -> Iterator[list[Text]]:
    """Yield texts in batches whose prompts have equal numbers of tokens.

    They need no padding, which would change the positions of tokens.
    """
    texts.sort(key=lambda text: len(text.start))
    texts[0].separator = ""
    for _, group in groupby(texts, key=lambda text: len(text.start)):
        while batch := list(islice(group, batch_size)):
            yield batch


def complete(batch: Sequence[Text], draw: Callable[..., Any], device: Any, report: Report) -> None:
    """Generate the texts of a batch.

    Args:
        batch: Texts of `equal_lengths`.
        draw: The function `generate` with its arguments but those of the batch.
        device: Device of the model.
        report: Function to call with the batch before it grows and whenever it has grown.
    """
    import torch  # not for --help

    def on_tokens(tokens: list[int]) -> bool:
        for text, token in zip(batch, tokens, strict=True):
            text.add(token)
        report(batch)
        return all(text.ended for text in batch)

    report(batch)
    draw(
        idx=torch.tensor([text.start for text in batch], device=device),
        generator=[torch.Generator(device).manual_seed(text.seed) for text in batch],
        on_tokens=on_tokens,
    )
    for text in batch:
        text.close()
    report(batch)


@contextmanager
def reporting(out: str | None, batch_size: int, as_json: bool) -> Iterator[Report]:
    """Yield a function that prints texts, or writes them to a new file.

    Args:
        out: Value of --out.
        batch_size: Value of --batch_size, for the advice when memory runs out.
        as_json: Value of --json.

    Raises:
        UserError: The file exists, or cannot be written.
        MemoryExhaustedError: Memory ran out inside the context.
    """
    try:
        if as_json:
            yield partial(write_lines, sys.stdout)
        elif out is None:
            yield print_texts
        else:
            fix = "give --out the name of a new file, in a folder that exists and has space"
            # the buffer takes a whole line, so that each line is one write
            with explained("write", out, fix), open(out, "x", 2**20, "utf-8") as file:
                yield partial(write_lines, file)
    except KeyboardInterrupt:
        print()  # ends the line of a text
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        size = f"--batch_size {batch_size} or " if batch_size > 1 else ""
        raise MemoryExhaustedError(f"out of memory: lower {size}--max_new_tokens") from error


def print_texts(batch: Sequence[Text]) -> None:
    """Print the texts one below the other; a text grows when those before it have ended."""
    for text in batch:
        if text.reported:
            continue
        if not text.shown:
            print(text.separator)
        whole = text.beginning + text.text
        print(whole[text.shown :], end="", flush=True)
        text.shown = len(whole)
        if not text.ended:
            return
        print(flush=True)
        text.reported = True


def write_lines(file: TextIO, batch: Sequence[Text]) -> None:
    """Append a line of JSON for each text that has ended since the last call."""
    for text in batch:
        if text.ended and not text.reported:
            line = {key: getattr(text, key) for key in ("prompt", "text", "seed", "tokens")}
            print(dumps(line), file=file, flush=True)
            text.reported = True
