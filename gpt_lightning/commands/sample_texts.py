"""Texts of the command `sample`: their prompts, batches, and output while they grow."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, islice
from typing import Any, BinaryIO

from gpt_lightning.data.text_stream import TextStream
from gpt_lightning.data.tokenizers import Tokenizer, start_tokens
from gpt_lightning.errors import MemoryExhaustedError, UserError, is_out_of_memory
from gpt_lightning.files import explained

Report = Callable[[Sequence["Text"]], None]


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
    ) -> None:
        super().__init__(tokenizer, stop)
        try:
            self.start = start_tokens(tokenizer, prompt)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        self.prompt, self.seed = prompt, seed
        self.beginning = prompt or tokenizer.decode(self.start)
        self.separator, self.shown, self.reported = "---------------", 0, False


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
def reporting(out: str | None, batch_size: int) -> Iterator[Report]:
    """Yield a function that prints texts, or writes them to a new file.

    Args:
        out: Value of --out.
        batch_size: Value of --batch_size, for the advice when memory runs out.

    Raises:
        UserError: The file exists, or cannot be written.
        MemoryExhaustedError: Memory ran out inside the context.
    """
    try:
        if out is None:
            yield print_texts
        else:
            fix = "give --out the name of a new file, in a folder that exists and has space"
            # the buffer takes a whole line, so that each line is one write
            with explained("write", out, fix), open(out, "xb", buffering=2**20) as file:
                yield partial(write_lines, file)
    except KeyboardInterrupt:
        print()  # ends the line of a text
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fix = f"lower --batch_size {batch_size} or --max_new_tokens"
        raise MemoryExhaustedError(f"out of memory: {fix}") from error


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


def write_lines(file: BinaryIO, batch: Sequence[Text]) -> None:
    """Append a line of JSON for each text that has ended since the last call."""
    for text in batch:
        if text.ended and not text.reported:
            line = {key: getattr(text, key) for key in ("prompt", "text", "seed", "tokens")}
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            text.reported = True
