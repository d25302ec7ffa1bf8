"""Where the configuration files that come with the package lie."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def config_file(name: str) -> Path:
    """A file of configs/: that of the checkout, else the copy inside an installed package."""
    checkout = PACKAGE.parent / "configs" / name
    return checkout if checkout.exists() else PACKAGE / "configs" / name
