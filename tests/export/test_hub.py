"""An export is sent to a hub, here a stand-in for it, or says why not and lies on the disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.export.hub import check_push, push
from tests.support.fake_hub import TOKEN, FakeHub, served

# The hub's own library calls its HTTP client in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with served() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture
def export(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "README.md").write_text("---\ntags:\n- noloco\n---\n\n# A model\n")
    (directory / "model.safetensors").write_bytes(bytes(range(256)))
    return directory


@pytest.mark.parametrize("public", [False, True])
def test_all_files_arrive_in_a_model_that_is_private_unless_asked(hub: FakeHub, export: Path, public: bool) -> None:
    check_push("me/mine")
    for _ in range(2):  # once more into the model that is there
        assert push(export, "me/mine", public=public) == f"Sent to {hub.url}/me/mine."
    assert hub.models == {"me/mine": {path.name: path.read_bytes() for path in export.iterdir()}}
    assert hub.private == {"me/mine": not public}


@pytest.mark.parametrize("name", ["mine", "", "a/b/c", "me/..", "me/ä", "-/", "me/m-", "me/m.", "me/m.git", "me/a--b"])
def test_a_name_that_no_model_has_is_refused_before_anything_is_sent(hub: FakeHub, name: str) -> None:
    with user_error(Exit.USAGE, "cannot send"):
        check_push(name)


def test_without_a_token_or_with_a_wrong_one_nothing_begins(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match="does not answer") as wrong:
        check_push("me/mine")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="has no token") as none:
        check_push("me/mine")
    assert (wrong.value.code, none.value.code) == (Exit.UNREACHABLE, Exit.USAGE)


def test_what_the_hub_refuses_stays_on_the_disk(hub: FakeHub, export: Path) -> None:
    hub.refuses = True
    with pytest.raises(UserError, match="did not take it") as refused:
        push(export, "me/mine", public=False)
    assert "hf upload me/mine" in refused.value.hint
    assert (export / "model.safetensors").exists()
    assert not hub.models["me/mine"]
