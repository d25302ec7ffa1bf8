"""The command `sample` on a tiny random model of bytes: texts, seeds, batches, output, mistakes."""

import json
import sys
from pathlib import Path

import pytest
import torch

from gpt_lightning.cli import main
from gpt_lightning.commands.sample import SEED_STEP, sample
from gpt_lightning.data.tokenizers import ByteTokenizer, CharTokenizer, TextStream
from gpt_lightning.model.fast.decoder import Decoder
from gpt_lightning.model.generate import generate

HEAD = "# a.ckpt, in fp32: as set\n"
SMALL = ("--dtype", "fp32", "--device", "cpu", "--max_new_tokens", "20")


def printed(capsys, *args: str) -> str:
    assert main(["sample", "a.ckpt", *SMALL, *args]) == 0
    return capsys.readouterr().out


def lines(*args: str) -> list[dict]:
    """Return the lines of --out."""
    out = Path("out.jsonl")
    out.unlink(missing_ok=True)
    assert main(["sample", "a.ckpt", *SMALL, "--out", str(out), *args]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


# ---- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [("--prompt", "Once é"), ()])
def test_one_text_is_that_of_generate_with_one_generator(model, capsys, given):
    """The output of a text, bit for bit, as before texts had seeds of their own."""
    gpt, tokenizer = model
    start = torch.tensor([tokenizer.encode(given[1] if given else "\n").tolist()])
    generator = torch.Generator().manual_seed(7)
    tokens = generate(gpt, start, 20, 0.8, 200, generator, tokenizer.vocab_size)
    text = tokenizer.decode(tokens[0].tolist())
    assert printed(capsys, "--seed", "7", *given) == f"{HEAD}\n{text}\n"


def test_a_sample_does_not_depend_on_how_many_there_are(model):
    eight = lines("--num_samples", "8", "--seed", "5")
    assert len({line["text"] for line in eight}) == 8
    assert [line["seed"] for line in eight] == [(5 + i * SEED_STEP) % 2**32 for i in range(8)]
    assert lines("--num_samples", "4", "--seed", "5") == eight[:4]
    assert lines("--num_samples", "8", "--seed", "5", "--batch_size", "3") == eight
    for line in (eight[3], eight[7]):
        assert lines("--seed", str(line["seed"])) == [line]


def test_samples_of_a_prompt_are_separated_on_the_terminal(model, capsys):
    texts = ["\n" + line["text"] for line in lines("--num_samples", "3")]
    separated = "\n---------------\n".join(texts)
    capsys.readouterr()
    assert printed(capsys, "--num_samples", "3") == f"{HEAD}\n{separated}\n"
    assert printed(capsys, "--num_samples", "3", "--batch_size", "1") == f"{HEAD}\n{separated}\n"


def test_prompts_of_different_lengths_have_the_texts_that_they_have_alone(model):
    prompts = ["one", "a longer prompt", "two", "x" * 40, "six", "a longer pr0mpt"]
    Path("prompts.txt").write_text("\n".join(prompts) + "\n\n")
    together = lines("--prompts", "prompts.txt", "--num_samples", "2")
    assert sorted(line["prompt"] for line in together) == sorted(prompts * 2)
    for prompt in prompts:
        alone = lines("--prompt", prompt, "--num_samples", "2")
        assert [line for line in together if line["prompt"] == prompt] == alone


def test_json_is_a_line_for_each_text_and_nothing_else(model, capsys):
    expected = lines("--num_samples", "3", "--min_p", "0.1", "--repetition_penalty", "1.2")
    capsys.readouterr()
    how = ("--num_samples", "3", "--min_p", "0.1", "--repetition_penalty", "1.2", "--json")
    assert [json.loads(line) for line in printed(capsys, *how).splitlines()] == expected
    assert expected != lines("--num_samples", "3")


def test_a_terminal_is_asked_for_prompts(model, monkeypatch, capsys):
    first = printed(capsys, "--prompt", "ab")
    second = "cd" + lines("--prompt", "cd", "--num_samples", "2")[1]["text"]  # the next seed
    capsys.readouterr()
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    typed = ["cd", "ab"]

    def answer(asked):
        if not typed:
            raise EOFError
        return typed.pop()

    monkeypatch.setattr("builtins.input", answer)
    assert printed(capsys) == first + f"\n{second}\n\n"


def test_texts_of_equal_length_are_one_batch(model, monkeypatch):
    rows = []
    step = Decoder.__call__

    def counted(self, idx, start, caches):
        rows.append(len(idx))
        return step(self, idx, start, caches)

    monkeypatch.setattr(Decoder, "__call__", counted)
    lines("--num_samples", "8")
    assert rows == [8] * 20
    rows.clear()
    Path("prompts.txt").write_text("one\nlonger\ntwo\nsix\nten\n")
    lines("--prompts", "prompts.txt", "--batch_size", "3")
    assert rows == [3] * 20 + [1] * 40
    rows.clear()
    lines("--num_samples", "11")
    assert rows == [8] * 20 + [3] * 20


def test_a_line_has_the_generated_text_and_tokens(model):
    Path("prompts.jsonl").write_text('{"prompt": "caf\\u00e9\\n", "id": 3}\n\n{"prompt": ""}\n')
    empty, cafe = lines("--prompts", "prompts.jsonl", "--max_new_tokens", "9")
    assert list(cafe) == ["prompt", "text", "seed", "tokens"]
    assert (cafe["prompt"], cafe["seed"], len(cafe["tokens"])) == ("café\n", 1337, 9)
    assert cafe["text"] == ByteTokenizer().decode(cafe["tokens"])
    assert empty["prompt"] == ""
    assert empty == lines("--max_new_tokens", "9")[0]


def test_each_row_of_a_batch_ends_before_its_own_stop_text(model):
    whole = lines("--num_samples", "6", "--max_new_tokens", "60")
    stops = [whole[0]["text"][30:32], whole[1]["text"][7:10], whole[2]["text"][50:51]]
    stop = [word for text in stops for word in ("--stop", text)]
    ended = lines("--num_samples", "6", "--max_new_tokens", "60", *stop)
    key = {line["seed"]: line for line in whole}
    lengths = set()
    for line in ended:
        text = key[line["seed"]]["text"]
        expected = min((text.partition(s)[0] for s in stops), key=len)
        assert line["text"] == expected
        assert line["tokens"] == key[line["seed"]]["tokens"][: len(line["tokens"])]
        lengths.add(len(line["tokens"]))
    assert len(lengths) > 2


@pytest.mark.parametrize("text", ["- a", '"q"', "null", "a, b", "[1]", "# x", "\n\n", "-", "é:"])
def test_a_stop_text_is_taken_as_it_is_typed(text, model, monkeypatch, capsys):
    seen = []
    create = TextStream.__init__
    monkeypatch.setattr(
        TextStream, "__init__", lambda self, *args: seen.append(args[1]) or create(self, *args)
    )
    printed(capsys, "--stop", text, "--max_new_tokens", "1", f"--stop={text}")
    assert seen == [[text, text]]


# ---- output --------------------------------------------------------------------------------------


class Output:
    """A file that notes what is written, and when the tokens come."""

    encoding = "utf-8"

    def __init__(self):
        self.events = []

    def write(self, text):
        self.events.append(text)

    def flush(self):
        self.events.append("FLUSH")


def test_a_text_is_printed_as_its_tokens_come(model, monkeypatch):
    """Each token's characters are flushed before the next token, and no half character is."""
    text = "né\U0001f600!"
    script = list(text.encode())
    monkeypatch.setattr(
        "gpt_lightning.model.generate.sample_token",
        lambda logits, *how: torch.tensor([[script[len(drawn)]]]),
    )
    output, drawn = Output(), []
    add = TextStream.add
    monkeypatch.setattr(sys, "stdout", output)

    def noted(self, token):
        output.events.append("TOKEN")
        drawn.append(token)
        add(self, token)

    monkeypatch.setattr(TextStream, "add", noted)
    count = str(len(script))
    assert main(["sample", "a.ckpt", *SMALL, "--prompt", "ab", "--max_new_tokens", count]) == 0
    shown = "".join(output.events).partition("as set\n")[2].replace("FLUSH", "")
    steps = shown.split("TOKEN")
    assert steps == ["\nab", "n", "", "é", "", "", "", "\U0001f600", "!\n"]
    assert "".join(output.events).count("FLUSHTOKEN") == len(script)


def test_half_a_character_at_the_end_is_printed_at_the_end(model, monkeypatch, capsys):
    drawn = [[97, 0xC3], [0xC3, 98], [0x80, 0xA9]]
    monkeypatch.setattr(
        "gpt_lightning.model.generate.sample_token",
        lambda logits, *how: torch.tensor(drawn.pop(0))[:, None],
    )
    found = printed(capsys, "--num_samples", "2", "--max_new_tokens", "2", "--prompt", ">")
    assert found == f"{HEAD}\n>a\ufffd\n---------------\n>\ufffdb\n"


class Interrupt:
    """Raise an exception at the n-th token, and note what --out has then."""

    def __init__(self, monkeypatch, n, error):
        self.n, add = n, TextStream.add

        def interrupted(stream, token):
            self.n -= 1
            if self.n == 0:
                self.out = Path("out.jsonl").read_text() if Path("out.jsonl").exists() else ""
                raise error
            add(stream, token)

        monkeypatch.setattr(TextStream, "add", interrupted)


def test_ctrl_c_leaves_what_was_printed(model, monkeypatch, capsys):
    (line,) = lines("--prompt", "ab")
    capsys.readouterr()
    Interrupt(monkeypatch, 9, KeyboardInterrupt())
    assert main(["sample", "a.ckpt", *SMALL, "--prompt", "ab"]) == 130
    out, err = capsys.readouterr()
    assert out == f"{HEAD}\nab{line['text'][: len(out) - len(HEAD) - 4]}\n"
    assert len(out) > len(HEAD) + 6
    assert err == "error: interrupted\n"


def test_an_ended_run_has_lost_no_text_that_was_done(model, monkeypatch):
    """Texts that have ended are in the file while others of their batch still grow."""
    stop = lines("--num_samples", "4")[2]["text"][:2]
    expected = lines("--num_samples", "4", "--stop", stop)
    Path("out.jsonl").unlink()
    interrupt = Interrupt(monkeypatch, 4 * 19, KeyboardInterrupt())
    out = ("--out", "out.jsonl", "--num_samples", "4", "--stop", stop)
    assert main(["sample", "a.ckpt", *SMALL, *out]) == 130
    found = Path("out.jsonl").read_text()
    assert found.endswith("}\n")
    assert interrupt.out == found  # the line was there before the file was closed
    assert json.loads(found) in expected
    assert json.loads(found)["seed"] == (1337 + 2 * SEED_STEP) % 2**32


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("--prompts=deep.jsonl", "--prompts deep.jsonl, line 1"),
        ("--prompt=é", "--prompt"),
    ],
)
def test_wrong_prompts_are_one_line(model, capsys, args, names):
    model[1] = CharTokenizer("ab")
    Path("deep.jsonl").write_text("[" * 100_000 + "\n")
    assert main(["sample", "a.ckpt", "--device=cpu", args, "--out=new.jsonl"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert names in error
    assert not Path("new.jsonl").exists()


@pytest.mark.parametrize(
    ("precision", "asked", "used", "why"),
    [
        ("bf16-mixed", "auto", "bf16", "it has it"),
        ("16-mixed", "auto", "fp32", "it has it"),
        ("32-true", "auto", "fp32", "it has it"),
        ("bf16-mixed", "fp32", "fp32", "as set"),
    ],
)
def test_the_commands_products(precision, asked, used, why, model, monkeypatch, capsys):
    monkeypatch.setattr(
        "gpt_lightning.hardware.precision.fastest_precision",
        lambda device: (precision, "it has it"),
    )
    made = []
    create = Decoder.__init__
    monkeypatch.setattr(
        Decoder, "__init__", lambda self, *args: made.append(args[1:]) or create(self, *args)
    )
    for n in (1, 64):  # weights are laid out for many tokens alone
        sample("a.ckpt", max_new_tokens=1, num_samples=n, device="cpu", dtype=asked)
    products = torch.bfloat16 if used == "bf16" else None
    assert made == [(products, False), (products, True)]
    assert capsys.readouterr().out.startswith(f"# a.ckpt, in {used}: {why}\n")
