"""Dense peak rates by chip, each with the document that states it.

Rates are TFLOP/s of one device, a multiply-add counted as 2, without structured sparsity: a number
that a datasheet gives "with sparsity" is halved here. fp32 is the rate of the plain CUDA cores, the
other columns are rates of the tensor cores with FP32 accumulation, as training uses them. None: the
chip has no such unit. Chips without a known vendor document are left out.
"""

from typing import NamedTuple

# Dense bf16 tensor-core peak of one A100, in FLOP/s; the source is A100 below. nanoGPT divides by
# it on every device.
A100_BF16_PEAK_FLOPS = 312.0e12

_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions"

# Datasheets and product pages; S: states the number with sparsity (halved below).
A100 = f"{_NVIDIA}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
A10 = f"{_NVIDIA}/Data-Center/a10/pdf/a10-datasheet.pdf"
T4 = f"{_NVIDIA}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
A10G = (
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
)
H100 = "https://www.nvidia.com/en-us/data-center/h100/"  # S
H200 = "https://www.nvidia.com/en-us/data-center/h200/"  # S
HGX = "https://www.nvidia.com/en-us/data-center/hgx/"  # S, of eight B200 together
L4 = "https://www.nvidia.com/en-us/data-center/l4/"  # S
L40 = "https://www.nvidia.com/en-us/data-center/l40/"
L40S = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
COMPARE = "https://www.nvidia.com/en-us/geforce/graphics-cards/compare/"  # cores and boost clock

# Architecture white papers; their appendices give every rate dense, and by accumulation.
HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
BLACKWELL_PRO = "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"


class Chip(NamedTuple):
    """One row of the table.

    Attributes:
        name: Regular expression for torch.cuda.get_device_name() without the optional prefixes
            "NVIDIA " and "Tesla ".
        label: Name of the chip for people.
        bf16: TFLOP/s in bfloat16; fp16, tf32 and fp32 likewise.
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


# fmt: off
_DATA_CENTER_AND_WORKSTATION = (
    #    torch's name                         label            bf16    fp16    tf32   fp32  source
    Chip(r"V100-PCIE-(16|32)GB",              "V100 PCIe",     None,  112.0,   None,  14.0, V100),
    Chip(r"V100-SXM2-(16|32)GB",              "V100 SXM2",     None,  125.0,   None,  15.7, V100),
    Chip(r"V100S-PCIE-32GB",                  "V100S PCIe",    None,  130.0,   None,  16.4, V100),
    Chip(r"T4",                               "T4",            None,   65.0,   None,   8.1, T4),
    Chip(r"A100-(SXM4|PCIE)-(40|80)GB",       "A100",         312.0,  312.0,  156.0,  19.5, A100),
    Chip(r"A100 80GB PCIe",                   "A100 PCIe",    312.0,  312.0,  156.0,  19.5, A100),
    Chip(r"A10",                              "A10",          125.0,  125.0,   62.5,  31.2, A10),
    # Not an A10: Amazon's variant has more SMs, and tensor cores at half rate like a GeForce.
    Chip(r"A10G",                             "A10G",          70.0,   70.0,   35.0,  35.0, A10G),
    Chip(r"A40",                              "A40",          149.7,  149.7,   74.8,  37.4, GA102),
    Chip(r"RTX A6000",                        "RTX A6000",    154.8,  154.8,   77.4,  38.7, GA102),
    Chip(r"L4",                               "L4",           121.0,  121.0,   60.0,  30.3, L4),
    Chip(r"L40",                              "L40",          181.0,  181.0,   90.5,  90.5, L40),
    Chip(r"L40S",                             "L40S",         362.0,  362.0,  183.0,  91.6, L40S),
    Chip(r"RTX 6000 Ada Generation",          "RTX 6000 Ada", 364.2,  364.2,  182.1,  91.1, ADA),
    Chip(r"H100 80GB HBM3",                   "H100 SXM",     989.4,  989.4,  494.7,  66.9, HOPPER),
    Chip(r"H100 PCIe",                        "H100 PCIe",    756.0,  756.0,  378.0,  51.2, HOPPER),
    Chip(r"H100 NVL",                         "H100 NVL",     835.5,  835.5,  417.5,  60.0, H100),
    Chip(r"H200",                             "H200 SXM",     989.5,  989.5,  494.5,  67.0, H200),
    Chip(r"H200 NVL",                         "H200 NVL",     835.5,  835.5,  417.5,  60.0, H200),
    # 36 and 18 PFLOP/s with sparsity and 600 TFLOP/s plain, by eight GPUs.
    Chip(r"B200",                             "B200",        2250.0, 2250.0, 1125.0,  75.0, HGX),
    Chip(r"RTX PRO 6000 Blackwell Workstation Edition",
         "RTX PRO 6000 Workstation",                   503.8,  503.8,  251.9, 126.0, BLACKWELL_PRO),
    Chip(r"RTX PRO 6000 Blackwell Max-Q Workstation Edition",
         "RTX PRO 6000 Max-Q",                         438.9,  438.9,  219.5, 109.7, BLACKWELL_PRO),
)

# (model, CUDA cores, boost clock in MHz, source); the compare page rounds clocks to 10 MHz.
_GEFORCE = (
    ("3060",           3584, 1780, COMPARE),
    ("3060 Ti",        4864, 1670, COMPARE),
    ("3070",           5888, 1725, GA102),
    ("3070 Ti",        6144, 1770, COMPARE),
    ("3080",           8704, 1710, GA102),  # 10 GB; the 12 GB card has the same name and 3% more
    ("3080 Ti",       10240, 1670, COMPARE),
    ("3090",          10496, 1695, GA102),
    ("3090 Ti",       10752, 1860, COMPARE),
    ("4060",           3072, 2460, COMPARE),
    ("4060 Ti",        4352, 2540, COMPARE),
    ("4070",           5888, 2480, COMPARE),
    ("4070 SUPER",     7168, 2480, COMPARE),
    ("4070 Ti",        7680, 2610, COMPARE),
    ("4070 Ti SUPER",  8448, 2610, COMPARE),
    ("4080",           9728, 2505, ADA),
    ("4080 SUPER",    10240, 2550, COMPARE),
    ("4090",          16384, 2520, ADA),
    ("5050",           2560, 2570, COMPARE),
    ("5060",           3840, 2500, COMPARE),
    ("5060 Ti",        4608, 2570, COMPARE),
    ("5070",           6144, 2512, BLACKWELL),
    ("5070 Ti",        8960, 2452, BLACKWELL),
    ("5080",          10752, 2617, BLACKWELL),
    ("5090",          21760, 2407, BLACKWELL),
)
# fmt: on


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


CHIPS = _DATA_CENTER_AND_WORKSTATION + tuple(_geforce(*row) for row in _GEFORCE)

_APPLEGPUINFO = "https://github.com/philipturner/applegpuinfo/issues"
_METAL = "https://github.com/philipturner/metal-benchmarks"

# Highest GPU clock in MHz. Apple does not publish it; owners read it with `powermetrics`. The
# source gives "M2 Pro" and larger chips as "at least".
APPLE_GPU_MHZ: dict[str, tuple[int, str]] = {
    "M1": (1278, _METAL),
    "M1 Pro": (1296, _METAL),
    "M1 Max": (1296, _METAL),
    "M1 Ultra": (1296, _METAL),
    "M2": (1398, _METAL),
    "M2 Pro": (1398, _METAL),
    "M2 Max": (1398, f"{_APPLEGPUINFO}/10"),
    "M2 Ultra": (1398, _METAL),
    "M3": (1338, f"{_APPLEGPUINFO}/15"),
    "M3 Max": (1380, f"{_APPLEGPUINFO}/4"),
    "M4": (1470, "https://hmc-tech.com/gpu/apple-10-core-m4-fl-vs-apple-10-core-m4-fl"),
    "M4 Pro": (1578, "https://macmegasite.com/?p=118175"),
    "M5": (1578, "https://michaelstinkerings.org/apple-m5-gpu-roofline-analysis"),
    "M5 Max": (1620, "https://github.com/feedback-assistant/reports/issues/830"),
}
