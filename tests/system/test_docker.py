"""The image and both compose files, with a real Docker engine: `make test-docker`.

A test takes minutes. The image is built (TORCH_OPTIONS as in docker/Dockerfile), or IMAGE names one that is there. What
a test starts has a project name of its own, and goes away with the test.
"""

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from limits import LAST_RESORT_S
from repository import ROOT

from noloco_node.errors import Exit
from noloco_node.swarm.invite import SCHEME

pytestmark = pytest.mark.docker

BUILD_S = 3600.0
CUT_OFF_S = 60.0


def why_not() -> str:
    if shutil.which("docker") is None:
        return "docker is not installed"
    told = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return "" if told.returncode == 0 else "no Docker engine answers: " + told.stderr.strip().splitlines()[-1]


def run(*command: str, limit_s: float = LAST_RESORT_S, **environment: str) -> bytes:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr.decode()[-2000:]}"
    return done.stdout


def build() -> str:
    options = ("--build-arg", f"TORCH_OPTIONS={os.environ.get('TORCH_OPTIONS', '')}")
    named = ("--network", "host", "-f", "docker/Dockerfile", "-t", "noloco-node")
    return run("docker", "build", *named, *options, ".", limit_s=BUILD_S, DOCKER_BUILDKIT="0").decode()


@pytest.fixture(scope="module")
def image() -> str:
    if missing := why_not():
        pytest.skip(missing)
    given = os.environ.get("IMAGE")
    if given is None:
        build()
    return given or "noloco-node"


class Project:
    def __init__(self, file: str, image: str) -> None:
        self.name = f"noloco-test-{os.getpid()}"
        compose = ["docker", "compose"] if self._has_plugin() else ["docker-compose"]
        self._compose = [*compose, "-p", self.name, "-f", f"docker/{file}"]
        self._every = [*self._compose, "--profile", "*"]
        self._image = image

    @staticmethod
    def _has_plugin() -> bool:
        return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0

    def __call__(self, *words: str) -> bytes:
        settings = {"IMAGE": self._image, "PUBLISH": "4001-4005", "TEXT": str(ROOT / "docs")}
        # The engine of a busy machine takes its time; compose version 1 gives it a minute otherwise.
        # Compose 2 neither stops nor removes what belongs to a profile that is not named.
        command = (
            self._every if words[0] in ("stop", "down") and len(words) > 1 and words[1][0] == "-" else self._compose
        )
        return run(*command, *words, COMPOSE_HTTP_TIMEOUT="600", **settings)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, running or not, oldest first."""
        labels = [f"label=com.docker.compose.project={self.name}", f"label=com.docker.compose.service={service}"]
        told = run("docker", "ps", "-aq", "--no-trunc", "--filter", labels[0], "--filter", labels[1])
        return told.decode().split()[::-1]

    def left(self) -> list[str]:
        own = ["-q", "--filter", f"label=com.docker.compose.project={self.name}"]
        kinds = (["ps", "-a"], ["network", "ls"], ["volume", "ls"])
        return [each for kind in kinds for each in run("docker", *kind, *own).decode().split()]


def said(container: str) -> str:
    done = subprocess.run(["docker", "logs", container], capture_output=True, check=True, timeout=LAST_RESORT_S)
    return (done.stdout + done.stderr).decode()


def steps(container: str) -> int:
    """Return the last inner step that a node has spoken of; 0 before the first."""
    return max(map(int, re.findall(r" step (\d+), round", said(container))), default=0)


def state(container: str) -> tuple[str, int]:
    (told,) = json.loads(run("docker", "inspect", container))
    return told["State"]["Status"], told["State"]["ExitCode"]


def until(condition: Callable[[], bool], what: str, limit_s: float = LAST_RESORT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(1.0)


def train_on(containers: list[str]) -> None:
    now = {each: steps(each) for each in containers}
    until(lambda: all(steps(each) > now[each] for each in containers), "every node trains")


@contextmanager
def up(file: str, image: str, *words: str) -> Iterator[Project]:
    project = Project(file, image)
    try:
        project("up", "-d", "--no-build", *words)
        yield project
    finally:
        project("down", "--volumes", "--timeout", "60")
        assert project.left() == []


def test_the_image_is_small_and_a_change_of_the_code_leaves_its_lower_layers_alone(
    image: str, request: pytest.FixtureRequest
) -> None:
    (told,) = json.loads(run("docker", "image", "inspect", image))
    assert told["Config"]["User"] == "noloco"
    assert told["Size"] < 1.2e9 or "+cpu" not in torch_of(image)
    if "IMAGE" in os.environ:
        return
    marker = ROOT / "noloco_node" / "a_change.py"
    request.addfinalizer(lambda: marker.unlink(missing_ok=True))
    marker.write_text('"""Changes the code."""\n')
    log = build()
    (dependencies,) = re.findall(r"Step \d+/\d+ : RUN pip install --no-cache-dir --no-compile.*?(?=Step)", log, re.S)
    assert "Using cache" in dependencies


def torch_of(image: str) -> str:
    program = "import importlib.metadata as m; print(m.version('torch'))"
    return run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", program).decode()


def test_a_private_swarm_from_a_clean_clone_survives_what_happens_to_it(image: str, tmp_path: Path) -> None:
    with up("compose.yaml", image, "--scale", "node=4") as project:
        (bootstrap,), nodes = project.containers("bootstrap"), project.containers("node")
        assert len(nodes) == 4
        train_on(nodes)
        assert "text: your own, /text; " in said(nodes[0])
        assert "INVITE" not in str(json.loads(run("docker", "inspect", *nodes))[0]["Config"]["Env"])

        # The page, for browsers of this machine.
        project("up", "-d", "--no-build", "--no-recreate", "watch")
        (watch,) = project.containers("watch")
        until(lambda: "in a browser" in said(watch), "the page")
        (address,) = re.findall(r"http://0\.0\.0\.0:(\S+)", said(watch))
        with urllib.request.urlopen(f"http://127.0.0.1:{address}") as page:
            assert b"<title>" in page.read()

        # Killed and started again, it goes on as who it was.
        first = nodes[0]
        peer = re.findall(r"we are (\w+)", said(first))[0]
        run("docker", "kill", first)
        assert state(first) == ("exited", 137)
        run("docker", "start", first)
        until(lambda: said(first).count(f"we are {peer}") == 2, "the killed node is back")
        train_on(nodes)

        # Cut off for a minute, while the others train.
        network = f"{project.name}_default"
        run("docker", "network", "disconnect", network, first)
        train_on(nodes[1:])
        time.sleep(CUT_OFF_S)
        run("docker", "network", "connect", network, first)
        train_on(nodes)

        project("up", "-d", "--no-build", "--no-recreate", "--scale", "node=5")
        until(lambda: len(project.containers("node")) == 5, "a fifth node")
        train_on(project.containers("node"))

        for _ in range(2):
            project("run", "--rm", "export")
        packed = project("run", "--rm", "-T", "--entrypoint", "tar", "export", "-C", "/exported", "-c", ".")
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            assert {"./model/model.safetensors", "./model/config.json"} <= set(archive.getnames())
            assert "./model-2/model.safetensors" in archive.getnames()

        healthy = ["docker", "exec", "-i"]
        for each in (bootstrap, *nodes):
            run(*healthy, each, "entrypoint", "healthy")

        project("stop", "--timeout", "60")
        assert {state(each) for each in (bootstrap, watch, *project.containers("node"))} == {("exited", 0)}
        run("docker", "cp", f"{first}:/home/noloco/home", str(tmp_path))
        assert list((tmp_path / "home").glob("runs/*/checkpoint/*.safetensors"))
        assert (tmp_path / "home" / "identity.key").exists()


def test_a_private_wan_trains_with_a_site_that_nobody_can_dial(image: str) -> None:
    run("docker", "build", "-f", "docker/wan/Dockerfile", "-t", "noloco-wan", ".", limit_s=BUILD_S)
    with up("compose.wan.yaml", image) as project:
        nodes = [project.containers(f"node-{each}")[0] for each in ("a", "b1", "b2", "c")]
        (host,) = project.containers("host-a")
        program = (
            "import socket, time\nbegun = time.monotonic()\n"
            "try: socket.create_connection(('11.77.2.10', 9))\n"
            "except ConnectionRefusedError: print(time.monotonic() - begun)"
        )
        assert float(run("docker", "exec", host, "python3", "-c", program)) >= 0.05
        train_on(nodes)
        assert "a router is in between" in said(nodes[-1])

        # Two sites whose line was down until neither believed in the other become one swarm again.
        (bootstrap,) = project.containers("bootstrap")

        def told() -> str:
            return re.findall(r"replicas by stage: (.*)", said(bootstrap))[-1]

        until(lambda: told() == "0: 2, 1: 2", "all four nodes are known")
        project("stop", "router-b")
        until(lambda: sum(map(int, re.findall(r": (\d)", told()))) == 2, "site b is out of sight")
        project("start", "router-b")
        until(lambda: sum(map(int, re.findall(r": (\d)", told()))) == 4, "site b is back")
        train_on(nodes)
        assert "clock" not in "".join(map(said, [bootstrap, *nodes]))


def test_a_setting_that_names_what_user_1000_cannot_read_is_named(image: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "run.toml").touch(mode=0o600)
    for role, setting, path, place in (
        ("bootstrap", "RUN_FILE", secret / "run.toml", "/run.toml"),
        ("bootstrap", "RUN_DIR", secret, "/run-dir"),
        ("node", "TEXT", secret, "/text"),
        ("node", "INVITE_FILE", secret / "run.toml", "/invite-file"),
    ):
        once = ("docker", "run", "--rm", "--volume", f"{path}:{place}:ro", image, role)
        done = subprocess.run(once, capture_output=True, text=True, timeout=LAST_RESORT_S, check=False)
        assert (done.returncode, done.stderr) == (
            Exit.CONFIG,
            f"noloco-node: user 1000 cannot read what {setting} in docker/.env names.\n",
        )


def test_peers_of_two_versions_on_one_bridge_say_which_is_older(image: str, tmp_path: Path) -> None:
    name = f"noloco-test-{os.getpid()}"
    (tmp_path / "Dockerfile").write_text(
        f"FROM {image}\nUSER root\n"
        "RUN sed -i 's/^WIRE_VERSION = .*/WIRE_VERSION = 99/' "
        "\"$(python3 -c 'import noloco_node.network.wire as wire; print(wire.__file__)')\"\n"
    )
    host = "noloco-node init run.toml && noloco-node bootstrap --home home --relays 0 --listen /ip4/0.0.0.0/tcp/4001"
    try:
        run("docker", "build", "-t", name, str(tmp_path), DOCKER_BUILDKIT="0")
        run("docker", "network", "create", name)
        invites = {}
        for each, container in ((image, f"{name}-old"), (name, f"{name}-new")):
            shell = ("--network", name, "--workdir", "/tmp", "--entrypoint", "sh")
            run("docker", "run", "-d", "--name", container, *shell, each, "-c", host)
            until(lambda c=container: "to join from" in said(c), "the invite")
            invites[each] = next(line for line in said(container).splitlines() if line.startswith("noloco"))
        assert invites[name].startswith("noloco99:")

        def refused(version: str, *words: str) -> str:
            once = ("docker", "run", "--rm", "--network", name, "--entrypoint", "noloco-node", version, *words)
            done = subprocess.run(once, capture_output=True, text=True, timeout=LAST_RESORT_S, check=False)
            assert done.returncode == Exit.OTHER_RUN, done.stderr
            return done.stderr

        assert "a newer protocol" in refused(image, "join", "--home", "/tmp/home", invites[name])
        assert "an older protocol" in refused(name, "join", "--home", "/tmp/home", invites[image])
        forged = invites[name].replace("noloco99:", SCHEME)
        assert "does not speak of 'run' in this run or version" in refused(image, "status", forged)
    finally:
        for kind, what in (("rm", f"{name}-old"), ("rm", f"{name}-new"), ("rmi", name)):
            subprocess.run(["docker", kind, "-f", what], capture_output=True, check=False)
        subprocess.run(["docker", "network", "rm", name], capture_output=True, check=False)
