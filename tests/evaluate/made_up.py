"""Made-up items of the tasks, and a tiny model with random weights."""

import json
import random
from pathlib import Path

import torch

from gpt_lightning.model.gpt import GPT, GPTConfig

TEXT = "the cat sat on a mat and then it slept near an old grey house by two small rivers"


def tiny_gpt(vocab_size: int = 256, block_size: int = 64, **config: object) -> GPT:
    """Return a model whose logits differ enough for a task to have right and wrong answers."""
    torch.manual_seed(1)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": block_size}
    model = GPT(GPTConfig(**{**shape, "vocab_size": vocab_size, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def sentence(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(TEXT.split(), k=n))


def hellaswag_items(n: int, seed: int = 0) -> list[dict]:
    """Return items with everything that the published ones have: marks, empty parts, spaces."""
    rng = random.Random(seed)
    items = []
    for index in range(n):
        first = sentence(rng, rng.randint(2, 9)).capitalize() + "."
        second = sentence(rng, 2)
        if index % 5 == 0:
            first = f"[header] How to {sentence(rng, 2)} [title] {first} [step] {sentence(rng, 3)}"
        if index % 7 == 0:
            second = ""
        endings = [f"{sentence(rng, rng.randint(1, 7))}." for _ in range(4)]
        if index % 5 == 0:
            endings[1] = f"{endings[1]} [substeps] {sentence(rng, 3)}  {sentence(rng, 2)} [title]"
        items.append(
            {
                "ind": index,
                "activity_label": sentence(rng, 2).capitalize(),
                "ctx_a": first,
                "ctx_b": second,
                "ctx": f"{first} {second}".strip(),
                "label": rng.randrange(4) if index % 2 else str(rng.randrange(4)),
                "endings": endings,
            }
        )
    return items


def lambada_items(n: int, seed: int = 0) -> list[dict]:
    """Return passages; one has a line break before its last words, one two spaces."""
    rng = random.Random(seed)
    texts = [sentence(rng, rng.randint(2, 30)) for _ in range(n)]
    texts[0] = texts[0].replace(" ", "\n", 1) + " it"
    texts[1] = f"{texts[1]}  then"
    return [{"text": text} for text in texts]


def wikitext(pages: int, seed: int = 0) -> str:
    """Return a text with WikiText's marks, titles and sections."""
    rng = random.Random(seed)
    lines = [" "]
    for number in range(pages):
        lines += [f" = Page {number} = ", " "]
        for _ in range(rng.randint(1, 3)):
            lines += [f" = = {sentence(rng, 2)} = = ", " "]
            body = sentence(rng, rng.randint(5, 40))
            lines += [
                f' {body} , 1 @,@ 200 and 2 @.@ 5 ; a well @-@ known ( or so ) " name " : it \'s '
                f"[ here ] , the dogs ' N 20 ° north . {body} ! why ? ",
                " ",
            ]
    return "\n".join(lines) + "\n"


def write_files(folder: Path, n: int = 8) -> Path:
    """Write the files of the three tasks, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in (
        ("hellaswag_val.jsonl", hellaswag_items(n)),
        ("lambada_test.jsonl", lambada_items(n)),
    ):
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (folder / name).write_text(lines, encoding="utf-8")
    (folder / "wiki.test.raw").write_text(wikitext(n), encoding="utf-8")
    return folder
