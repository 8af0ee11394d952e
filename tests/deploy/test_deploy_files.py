"""The image and the compose file: valid, closed by default, and in step with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose
from deploy_files import COMPOSE, ROOT, VariableMissing, compose, dockerfile, env_file, final_stage, healthcheck

from gateway.cli import main
from gateway.config import Settings

NEEDED = {"KVGATE_API_KEYS": "one,two", "GRAFANA_PASSWORD": "secret"}
EXAMPLE = env_file(ROOT / "deploy" / ".env.example")


def shipped() -> dict[str, Any]:
    """The compose file with the example's environment and the secrets it lacks."""
    return compose(EXAMPLE | NEEDED)


def test_hadolint_has_no_complaint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_image_does_not_run_as_root_and_has_no_tools_of_development() -> None:
    stage = final_stage()
    assert stage["USER"].split(":")[0].isdigit()
    assert int(stage["USER"].split(":")[0]) > 0
    assert [rest for name, rest in dockerfile() if name == "FROM"] == ["python:3.12-slim AS build", "python:3.12-slim"]
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "requirements/serve.txt" in text
    assert "dev.txt" not in text
    assert "[dev]" not in text


def test_image_serves_on_the_default_port() -> None:
    stage = final_stage()
    assert stage["EXPOSE"] == str(Settings().port)
    assert json.loads(stage["ENTRYPOINT"]) == ["kvgate"]
    assert json.loads(stage["CMD"]) == ["serve", "--host", "0.0.0.0"]
    assert f"'KVGATE_PORT', '{Settings().port}'" in healthcheck()[-1]


def test_image_copies_what_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source for name, rest in dockerfile() if name == "COPY" and "--from" not in rest for source in rest.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_container_without_keys_refuses_to_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVGATE_API_KEYS", raising=False)
    assert main([*json.loads(final_stage()["CMD"]), "--backend", "http://127.0.0.1:9"]) == 2
    assert "api_keys" in capsys.readouterr().err


def test_environment_of_the_compose_file_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in shipped()["services"]["kvgate"]["environment"].items():
        monkeypatch.setenv(name, value)
    assert main(["config", "--host", "0.0.0.0", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert [backend["url"] for backend in settings["backends"]] == ["http://vllm:8000"]
    assert len(settings["api_keys"]) == 2


def test_compose_file_follows_the_specification() -> None:
    checked = PyCompose.from_yaml(yaml.safe_dump(shipped()))
    assert set(checked.service_names()) == {"vllm", "kvgate", "prometheus", "grafana"}


def test_the_specification_is_really_checked() -> None:
    broken = shipped()
    broken["services"]["kvgate"]["healthchek"] = {}
    with pytest.raises(ValueError, match="healthchek"):
        PyCompose.from_yaml(yaml.safe_dump(broken))


@pytest.mark.parametrize("name", NEEDED)
def test_secrets_have_no_default(name: str) -> None:
    assert EXAMPLE[name] == ""
    with pytest.raises(VariableMissing, match=name):
        compose(EXAMPLE | NEEDED | {name: ""})


def test_example_of_the_environment_lists_every_variable() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{([A-Z_]+)", text)) == EXAMPLE.keys()
    assert compose(NEEDED | {"MODEL": EXAMPLE["MODEL"]}) == shipped()


def test_vllm_is_pinned_and_gets_the_gpu() -> None:
    vllm = shipped()["services"]["vllm"]
    assert vllm["image"] == "vllm/vllm-openai:v0.32.0"
    (device,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "ports" not in vllm  # clients come through the gateway


def test_only_the_gateway_is_reached_from_other_machines() -> None:
    for name, service in shipped()["services"].items():
        public = [port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")]
        assert bool(public) == (name == "kvgate"), name


def test_mounted_files_exist() -> None:
    volumes = shipped()["volumes"]
    for service in shipped()["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (COMPOSE.parent / source).exists() if source.startswith(".") else source in volumes, mount


def test_prometheus_and_grafana_look_at_the_services() -> None:
    services = shipped()["services"]
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target for job in config["scrape_configs"] for group in job["static_configs"] for target in group["targets"]
    }
    assert targets == {f"kvgate:{Settings().port}", "vllm:8000"}
    assert {target.split(":")[0] for target in targets} <= services.keys()

    provisioning = ROOT / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvgate.yaml").read_text())["providers"]
    mounts = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/kvgate.json" in mounts
