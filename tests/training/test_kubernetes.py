"""examples/kubernetes.yaml agrees with Kubernetes' schemas, our exit codes and what pods start."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_launchers import CONFIG
from tiny_fit import rows

from gpt_lightning.errors import EXIT_AGAIN, UserError

FILE = Path(__file__).resolve().parents[2] / "examples/kubernetes.yaml"


@pytest.fixture
def documents():
    return {each["kind"]: each for each in yaml.safe_load_all(FILE.read_text())}


def test_the_schemas_of_kubernetes_accept_the_file(documents):
    validate = pytest.importorskip("kubernetes_validate", reason="make setup installs it").validate
    job, pytorch = documents["Job"], documents["PyTorchJob"]
    validate(documents["Service"], "1.37", strict=True)
    validate(job, "1.37", strict=True)
    for replicas in pytorch["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replicas["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        template = replicas["template"]["spec"] | {"restartPolicy": replicas["restartPolicy"]}
        spec = {"template": {"spec": template}}
        validate(job | {"spec": spec}, "1.37", strict=True)


def assert_has_the_fields(value, kind, models):
    """Check the fields of Kubeflow's own types, and the types of their numbers and texts."""
    if of_map := re.fullmatch(r"dict\(str, (.*)\)", kind):
        for part in value.values():
            assert_has_the_fields(part, of_map[1], models)
    elif kind.startswith("KubeflowOrg"):
        model = getattr(models, kind)
        names = {theirs: ours for ours, theirs in model.attribute_map.items()}
        assert not value.keys() - names.keys(), kind
        model(**{names[key]: part for key, part in value.items()})  # raises if one is missing
        for key, part in value.items():
            assert_has_the_fields(part, model.openapi_types[names[key]], models)
    elif kind in ("int", "str"):
        assert type(value).__name__ == kind


def test_the_types_of_kubeflow_accept_the_pytorchjob(documents):
    # also accepted, by hand: the schema of the operator 1.9, kubeflow.org_pytorchjobs.yaml
    models = pytest.importorskip("kubeflow.training.models", reason="make setup installs it")
    job = documents["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert_has_the_fields(job, "KubeflowOrgV1PyTorchJob", models)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    replicas["Worker"]["restartPolici"] = "Never"
    with pytest.raises(AssertionError, match="KubeflowOrgV1ReplicaSpec"):
        assert_has_the_fields(job, "KubeflowOrgV1PyTorchJob", models)


def test_the_job_starts_again_unless_a_person_must_change_something(documents):
    rules = documents["Job"]["spec"]["podFailurePolicy"]["rules"]
    (ends,) = (rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob")
    assert UserError.exit_code in ends
    assert EXIT_AGAIN not in ends
    assert max(ends) < 128  # a signal


@pytest.mark.slow
def test_the_command_of_the_job_trains_in_two_pods(documents, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    program = f"{shlex.quote(sys.executable)} -m gpt_lightning"
    command = [word.replace("gpt-lightning", program) for word in container["command"]]
    options = ["--config", "run.yaml", "--run_name=pods", "--resume", "auto"]
    pods = [
        subprocess.Popen(
            [*command, *options],
            env=os.environ | given | {"JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    output, _ = pods[0].communicate(timeout=100)
    assert pods[1].wait(timeout=20) == pods[0].returncode == 0
    assert "started     2 machines: trainer.num_nodes 1 -> 2\n" in output
    assert "x 2 ranks" in output
    assert rows("pods")[-1]["step"] == 8
