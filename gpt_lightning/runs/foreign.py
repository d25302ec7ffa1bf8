"""Descriptions of files of other programs, for error messages."""

import struct
from pathlib import Path
from typing import Any

import torch

PLACE = "in the folder of its config.json, and give that folder"
HEAD_BYTES = 64


def describe_file(path: Path) -> str:
    """Return the likely kind of a file that torch.save has not written, and the fix."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        return "it is empty, so its copy was interrupted; copy it again, or take another checkpoint"
    if head.startswith(b"PK"):
        return "its end is missing or damaged; copy it again, or take another checkpoint"
    if is_safetensors(head, path.stat().st_size):
        return f"it is a safetensors file: name it model.safetensors, {PLACE}"
    if head.startswith(b"GGUF"):
        return "it is llama.cpp's GGUF; give the weights that it was converted from"
    if head.startswith(b"\x80"):
        return f"it is a pickle: if it is an old pytorch_model.bin, name it so, {PLACE}"
    try:
        head.decode("utf-8")
    except UnicodeDecodeError:
        return "it is no file of torch.save"
    return "it is a text file; give a file of checkpoints/, or a run folder"


def is_safetensors(head: bytes, n_bytes: int) -> bool:
    """Return whether a file begins with the length of a JSON header, and the header."""
    if len(head) < 9 or head[8:9] != b"{":
        return False
    (length,) = struct.unpack("<Q", head[:8])
    return bool(length <= n_bytes - 8)


def describe_content(content: Any) -> str | None:
    """Return the likely content of another program's torch.save, and the fix; None if unknown."""
    if not isinstance(content, dict):
        return f"it holds an object of type {type(content).__name__}"
    if {"model", "model_args"} <= content.keys():
        return "it is a checkpoint of nanoGPT's train.py: give it as --model.init_from"
    if "state_dict" in content and "hyper_parameters" not in content:
        return "it is a checkpoint of another Lightning program"
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return f"it holds weights alone: name it pytorch_model.bin, {PLACE}"
    return None
