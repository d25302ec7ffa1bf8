"""examples/first_run.ipynb, run from its first cell to its last as Jupyter does."""

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_run.ipynb"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_notebook_trains_plots_samples_and_continues(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # none is in git
    kernel = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    kernel.execute(cwd=str(tmp_path))
    _, trained, plotted, sampled, continued = (
        cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    )
    errors = [o.text for o in trained if o.get("name") == "stderr"]
    # a package of the extra hf imports tqdm's widgets, which warn where ipywidgets is missing
    assert all("IProgress not found" in text for text in errors), errors
    result = next(o.data["text/plain"] for o in trained if o.output_type == "execute_result")
    loss = float(re.search(r"validation_loss=([\d.]+)", result)[1])
    assert loss < 2.6  # a random model has 4.6; words are there
    assert any("image/png" in o.get("data", {}) for o in plotted)
    text = "".join(o.get("text", "") for o in sampled)
    assert text.startswith("The ")
    assert len(text) == 4 + 200 + 1
    assert continued[-1].data["text/plain"] == "350"
    assert (tmp_path / "lightning_logs" / "notebook" / "version_0" / "config.yaml").is_file()
