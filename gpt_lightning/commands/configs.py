"""The command `gpt-lightning configs`."""


def configs() -> None:
    """List the configurations that --config takes by name, with a line about each.

    A run trains as it is: `fit --config quickstart`. An overlay changes a run: `fit --config
    gpt2_124m --config model/gpt2-xl`.
    """
    from gpt_lightning.parsing import config_file, config_names

    titles = {}
    for name in config_names():
        with config_file(name).open(encoding="utf-8") as file:
            titles[name] = file.readline().removeprefix("# ").strip()
    overlays = {name for name, title in titles.items() if title.startswith("Overlay of ")}
    width = max(map(len, titles))
    for heading, group in {
        "runs: --config NAME": titles.keys() - overlays,
        "overlays: --config RUN --config NAME": overlays,
    }.items():
        print(f"{heading}\n")
        for name, title in titles.items():
            if name in group:
                print(f"  {name:<{width}}  {title}")
        print()
