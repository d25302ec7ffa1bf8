"""The command `gpt-lightning plot`: losses and speed of runs as a picture."""

from collections.abc import Sequence
from pathlib import Path

from gpt_lightning.files import explained
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.runs.history import find_run, read_curves


def make_parser() -> OneLineParser:
    """Return the parser of the command."""
    about = "Draw losses of runs over steps, tokens and wall time, their speed and its stalls."
    parser = OneLineParser(prog="gpt-lightning plot", description=about)
    about = "Run folders, or folders of runs, of which the newest run is taken."
    parser.add_argument("runs", nargs="+", metavar="RUN", help=about)
    about = "Picture, .png, .svg or .pdf; without a suffix .png and .svg. null: in the first RUN."
    parser.add_argument("--out", type=str | None, help=about)
    about = "Published curves to draw beside the runs, such as nanogpt-shakespeare-char."
    parser.add_argument("--reference", nargs="+", default=[], metavar="NAME", help=about)
    return parser


def run(argv: list[str]) -> None:
    """Draw the picture that the arguments `plot RUN...` name."""
    args = make_parser().parse_args(underscored(argv[1:]))
    draw(args.runs, args.out, args.reference)


def draw(runs: Sequence[str], out: str | None = None, references: Sequence[str] = ()) -> None:
    """Write the picture of runs, and print its path.

    Raises:
        UserError: A run or a published curve is missing, a file of a run is damaged, or the picture
            cannot be written.
    """
    folders = [find_run(address) for address in runs]
    curves = {str(folder): read_curves(folder) for folder in folders}
    for name in references:
        from gpt_lightning.reproduce.published import as_run, find_curve  # it imports torch

        curves[name] = as_run(find_curve(name))
    from gpt_lightning.tables.pictures import plot_runs  # matplotlib takes half a second

    path = Path(out or folders[0] / ("compared" if len(folders) > 1 else "curves"))
    given = path.suffix in (".png", ".svg", ".pdf")
    paths = [path] if given else [Path(f"{path}{suffix}") for suffix in (".png", ".svg")]
    with explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        plot_runs(paths, curves)
    print(f"curves      {', '.join(map(str, paths))}")
