"""Dense peak rates by chip, from peak_table.yaml, which names the document of each number."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

# Dense bf16 tensor-core peak of one A100, in FLOP/s. nanoGPT divides by it on every device.
A100_BF16_PEAK_FLOPS = 312.0e12


class Chip(NamedTuple):
    """One row of the table.

    Attributes:
        name: Regular expression for the name of the device (`peaks.device_name`) without the
            optional prefixes "NVIDIA " and "Tesla ".
        label: Name of the chip for people.
        bf16: TFLOP/s in bfloat16; fp16, tf32 and fp32 likewise; None if there is no number.
        source: URL of the document that states the numbers.
    """

    name: str
    label: str
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    source: str

    def tflops(self, dtype: str) -> float | None:
        """Return the rate of a dtype in TFLOP/s; None if the chip or the table lacks it."""
        rates = {"bf16": self.bf16, "fp16": self.fp16, "tf32": self.tf32, "fp32": self.fp32}
        return rates.get(dtype)


def _geforce(model: str, cores: int, boost_mhz: int, source: str) -> Chip:
    """Return a desktop GeForce of the series 30, 40 or 50, by the ratios of three white papers.

    A CUDA core does one multiply-add a clock. On a GeForce the tensor cores run 16-bit products
    with FP32 accumulation at twice that rate and TF32 at that rate; the figure often quoted for
    fp16, twice as high again, is with FP16 accumulation. The papers' rows (fp32, bf16, tf32):
    RTX 3090 35.6, 71, 35.6; RTX 4090 82.6, 165.2, 82.6; RTX 5090 104.8, 209.5, 104.8.
    """
    fp32 = cores * 2 * boost_mhz * 1e6 / 1e12
    label = f"RTX {model}"
    return Chip(f"GeForce {label}", label, 2 * fp32, 2 * fp32, fp32, fp32, source)


_TABLE: Any = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_SOURCES: dict[str, str] = _TABLE["sources"]


def _rows(name: str) -> list[Any]:
    return [[*numbers, _SOURCES[source]] for *numbers, source in _TABLE[name]]


CHIPS = [
    *(Chip(*row) for row in _rows("chips")),
    *(_geforce(*row) for row in _rows("geforce")),
]
# chip -> highest GPU clock in MHz, and its source
APPLE_GPU_MHZ: dict[str, tuple[int, str]] = {
    chip: (mhz, _SOURCES.get(source, source))
    for chip, (mhz, source) in _TABLE["apple_gpu_mhz"].items()
}
